"""What is done with calibration sets: blocks for a recipe, the commands, and what stands in reports."""

"""What a served model is worth: task suites, distance from a baseline, and the intervals of both."""

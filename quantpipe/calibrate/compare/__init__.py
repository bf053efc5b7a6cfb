"""Calibration sets against each other: what they are measured on, the runs, and what comes out."""

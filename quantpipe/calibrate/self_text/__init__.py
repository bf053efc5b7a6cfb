"""Calibration text that the base model writes itself."""

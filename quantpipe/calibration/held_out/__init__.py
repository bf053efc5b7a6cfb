"""Rows that are kept out of calibration, as windows to evaluate on."""

"""What a run says of its calibration set, in words and plots."""

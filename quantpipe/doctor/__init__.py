"""What this machine can run, and whether its GPU computes what it should, and how fast."""

"""What a run says of itself: one report as plain data, and the files that are rendered from it."""

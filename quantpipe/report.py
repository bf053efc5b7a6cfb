"""Progress on the terminal. Knows nothing of what is being done."""

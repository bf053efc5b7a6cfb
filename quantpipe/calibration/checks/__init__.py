"""What keeps rows out: overlap with evaluations, near duplicates, and the share that is held out."""

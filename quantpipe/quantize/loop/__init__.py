"""The block-by-block loop: statistics, solving, what is handed on, checkpoints, and what comes out."""

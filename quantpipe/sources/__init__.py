"""Where base models come from. Whatever the source, the result is a model folder on this disk."""

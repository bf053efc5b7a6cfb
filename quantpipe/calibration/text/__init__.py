"""Texts as they are compared: their words, when two are the same, and which language one is in. Knows no samples."""

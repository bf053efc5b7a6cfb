"""Releases that were judged: kept in an archive, compared with each other, and followed over time."""

"""Guessing tokens ahead and keeping those that the model would have chosen."""

"""How far a candidate's predictions are from the baseline's: by slice, by position, and against a stored baseline."""

"""The recipe: what may be asked for, read from YAML with the position of every key, checked as a whole."""

"""Kinds of tasks of the short form: what is asked of a model, and how its answer is scored. One file each."""

"""Whether a candidate may be released, how the verdict is kept, and how it is shown."""

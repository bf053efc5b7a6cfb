"""From rows to samples: mapped, filtered, generated or taken from the running Python. Knows no tokens."""

"""What a set may say: its YAML, the kinds of source, and how a row's fields are named, as strict frozen data."""

"""The report as one HTML document that loads nothing and runs nothing."""

"""Sections of a report from plain records: rows of results, a manifest, a coverage.."""

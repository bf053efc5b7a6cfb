"""Plots as SVG text: one small function for each kind of exhibit. Colours and fonts are the page's classes."""

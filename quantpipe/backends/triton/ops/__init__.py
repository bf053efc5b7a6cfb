"""Triton kernels, each with the Python function that launches it."""

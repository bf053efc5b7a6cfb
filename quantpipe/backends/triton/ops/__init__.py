"""Triton kernels and the functions that launch them. Importing any of them imports Triton."""

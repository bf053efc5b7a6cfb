"""Executes decoders on CUDA GPUs. Importing this package does not import Triton."""

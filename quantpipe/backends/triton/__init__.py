"""Executes decoders on CUDA GPUs. Importing this package does not import Triton."""

from quantpipe.backends.triton.backend import TritonBackend

__all__ = ["TritonBackend"]

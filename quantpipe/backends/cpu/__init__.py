"""Executes a decoder on the CPU: through compiled kernels of our own, or through torch's, proved right at start-up."""

from quantpipe.backends.cpu.backend import CpuBackend
from quantpipe.backends.cpu.torch_backend import TorchBackend

__all__ = ["CpuBackend", "TorchBackend"]

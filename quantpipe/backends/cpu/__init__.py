"""Executes a decoder on the CPU through torch's own kernels, each proved right at start-up before it is used."""

from quantpipe.backends.cpu.backend import CpuBackend

__all__ = ["CpuBackend"]

"""What executes a decoder description. Adding a backend: one file or folder and one line of BACKENDS."""

from collections.abc import Callable

from quantpipe.backends.cpu import CpuBackend, TorchBackend
from quantpipe.backends.protocol import Backend
from quantpipe.backends.reference import ReferenceBackend
from quantpipe.backends.triton import TritonBackend

BACKENDS: dict[str, Callable[[], Backend]] = {
    "reference": ReferenceBackend,
    "cpu": CpuBackend,
    "torch": TorchBackend,
    "triton": TritonBackend,
}

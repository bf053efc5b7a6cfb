"""Loads a model folder for CUDA GPUs. Triton is imported when a model is loaded, not before: it is optional."""

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from quantpipe.backends.protocol import Activations
from quantpipe.errors import QuantpipeError

if TYPE_CHECKING:
    from quantpipe.backends.triton.executor import TritonExecutor


class TritonBackend:
    """The row ``triton`` of the backends table."""

    name = "triton"

    def load(
        self,
        folder: Path,
        activation_divisor: float,
        num_threads: int | None,
        activations: Activations = "int16",
        memory_utilization: float | None = None,
    ) -> "TritonExecutor":
        """Read every weight into its kernel's layout on the GPU.

        ArtifactError where the folder is damaged or not known; QuantpipeError where this machine or these kernels
        cannot run it. ``activations`` has no bearing: under weight-only schemes they stay in floating point; nor has
        ``num_threads``.
        """
        if find_spec("triton") is None:
            raise QuantpipeError(
                "engine.backend: 'triton' needs the package triton, and it is not installed; run `pip install "
                "'quantpipe[triton]'` or set another backend, such as 'cpu'"
            )
        from quantpipe.backends.triton.loading import load

        return load(folder, activation_divisor, memory_utilization)

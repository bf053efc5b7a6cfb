"""Loads a model folder for CUDA GPUs. Triton is imported when a model is loaded, not before: it is optional."""

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from quantpipe.backends.protocol import Activations
from quantpipe.errors import RecipeError
from quantpipe.models.description import DecoderDescription

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

        ArtifactError where the folder is damaged or not known; RecipeError where this machine or these kernels cannot
        run it; DataError where memory does not suffice. ``activations`` has no bearing: under weight-only schemes they
        stay in floating point; nor has ``num_threads``.
        """
        _require_triton()
        from quantpipe.backends.triton.loading import load

        return load(folder, activation_divisor, memory_utilization)

    def check(self, description: DecoderDescription | None = None) -> None:
        """Raise RecipeError where this machine has no GPU that the kernels run on, or none of them takes a size."""
        _require_triton()
        from quantpipe.backends.triton.requirements import check_decoder, usable_device

        usable_device()
        if description is not None:
            check_decoder(description)


def _require_triton() -> None:
    if find_spec("triton") is None:
        raise RecipeError(
            "engine.backend: 'triton' needs the package triton, and it is not installed; run `pip install "
            "'quantpipe[triton]'` or set another backend, such as 'cpu'"
        )

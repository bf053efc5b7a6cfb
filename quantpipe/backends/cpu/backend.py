"""Loads a model folder for the CPU: for the compiled kernels where they can run it, else for torch's operators."""

from dataclasses import replace
from pathlib import Path

import torch

from quantpipe.backends.cpu.executor import CpuExecutor
from quantpipe.backends.cpu.native.executor import NativeExecutor, load_native
from quantpipe.backends.cpu.native.library import NativeError
from quantpipe.backends.cpu.torch_backend import load_torch
from quantpipe.backends.protocol import Activations
from quantpipe.formats.artifact import Artifact
from quantpipe.models import describe
from quantpipe.models.description import DecoderDescription


class CpuBackend:
    """The row ``cpu`` of the backends table."""

    name = "cpu"

    def load(
        self,
        folder: Path,
        activation_divisor: float,
        num_threads: int | None,
        activations: Activations = "int16",
        memory_utilization: float | None = None,
    ) -> NativeExecutor | CpuExecutor:
        """Read every weight into its kernel's layout. ArtifactError where the folder is damaged or not known.

        ``memory_utilization`` has no bearing: RAM is accounted for once steps were measured.
        """
        if num_threads is not None:
            torch.set_num_threads(num_threads)
        artifact = Artifact.open(folder)
        description = describe(artifact)
        try:
            return load_native(artifact, description, activation_divisor, torch.get_num_threads(), activations)
        except NativeError as error:
            executor = load_torch(artifact, description, activation_divisor)
            return replace(executor, notes=(f"torch operators, slower: {error}", *executor.notes))

    def check(self, description: DecoderDescription | None = None) -> None:
        """Nothing is asked of the machine, nor of a decoder."""

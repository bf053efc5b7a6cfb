"""A quantized model as an artifact on disk, under the names that its base model's checkpoint has."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from quantpipe.formats.artifact import Artifact
from quantpipe.formats.artifact_writer import quantization_config, write_artifact
from quantpipe.quantize.loop.records import QuantizedModel
from quantpipe.quantize.model.loading import StreamedModel
from quantpipe.quantize.targets.discover import Targets


def write_quantized(
    target: Path,
    model: StreamedModel,
    quantized: QuantizedModel,
    targets: Targets,
    manifest: Mapping[str, Any],
    sidecars: Mapping[str, Mapping[str, Tensor]] | None = None,
) -> Artifact:
    """Write ``quantized`` into the folder ``target``, atomically; tensors are read from disk one shard at a time.

    Raises DataError where the disk is full or the folder cannot be written.
    """
    names = model.names
    return write_artifact(
        target,
        model.base,
        names.of_modules(quantized.weights),
        quantization_config(names.declared(targets.schemes), names.both(targets.ignored)),
        manifest,
        tensors=names.of_tensors(quantized.tensors),
        added=quantized.added,
        config_updates=quantized.config_updates,
        sidecars=sidecars,
    )

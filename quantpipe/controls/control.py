"""What a control does to an artifact: tensors and files that take the place of its own."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from quantpipe.formats.artifact import Artifact

_LAYER = re.compile(r"(.*\.layers\.)(\d+)\.")


@dataclass(frozen=True)
class Damage:
    """``tensors`` have the names, dtypes and shapes of stored ones; ``files`` are whole contents by name."""

    tensors: Mapping[str, torch.Tensor] = field(default_factory=dict)
    files: Mapping[str, bytes] = field(default_factory=dict)


# The damage, or why there is nothing in this artifact to be damaged so.
Control = Callable[[Artifact], Damage | str]


def linears_by_layer(artifact: Artifact) -> dict[int, list[str]]:
    """The quantized linears of each decoder layer, layers in order."""
    found: dict[int, list[str]] = {}
    for module in artifact.schemes:
        if (match := _LAYER.match(module)) is not None:
            found.setdefault(int(match[2]), []).append(module)
    return dict(sorted(found.items()))


def middle_linears(artifact: Artifact) -> list[str]:
    """Those of the quantized layer in the middle; none where nothing is quantized."""
    layers = list(linears_by_layer(artifact).values())
    return layers[len(layers) // 2] if layers else []


def tensors_by_layer(artifact: Artifact) -> dict[int, dict[str, str]]:
    """All tensors of each decoder layer: the name within the layer, and the whole name. Layers in order."""
    found: dict[int, dict[str, str]] = {}
    for name in artifact.stored:
        if (match := _LAYER.match(name)) is not None:
            found.setdefault(int(match[2]), {})[name[match.end() :]] = name
    return dict(sorted(found.items()))

"""The sidecar ``kv_scales.safetensors``: one scale per layer and KV head for keys and for values, mode `int8_static`.

Named as other readers name such scales, ``model.layers.N.self_attn.k_scale`` and ``v_scale``, float32 [J]. It lies
beside the weights instead of among them, because others would load or refuse it.

Shapes: J KV heads.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from quantpipe.errors import ArtifactError
from quantpipe.formats.digests import KV_SCALES_NAME

_TENSOR_NAME = "model.layers.{layer}.self_attn.{part}_scale"


@dataclass(frozen=True)
class KVScales:
    """Scales of every layer, float32 [J] each: a stored integer times its scale is the key (after rope) or value."""

    key: tuple[Tensor, ...]
    value: tuple[Tensor, ...]

    def tensors(self) -> dict[str, Tensor]:
        """What the sidecar holds, by name."""
        parts = {"k": self.key, "v": self.value}
        return {
            _TENSOR_NAME.format(layer=layer, part=part): scale_J.contiguous()
            for part, scales in parts.items()
            for layer, scale_J in enumerate(scales)
        }


def read_kv_scales(folder: Path, num_layers: int, num_kv_heads: int) -> KVScales:
    """The sidecar of a model folder. ArtifactError where it is missing, short, misshapen, or a scale cannot be one."""
    path = folder / KV_SCALES_NAME
    if not path.is_file():
        raise ArtifactError(
            f"{path}: no such file; KV cache mode int8_static needs calibrated scales: quantize with "
            "`kv_cache: int8_static`, or serve with another kv_dtype"
        )
    try:
        tensors = load_file(path)
    except (OSError, SafetensorError) as error:
        raise ArtifactError(f"{path}: not a readable safetensors file: {error}") from error
    scales = KVScales(*(_of_layers(path, tensors, part, num_layers, num_kv_heads) for part in ("k", "v")))
    for name in tensors.keys() - scales.tensors().keys():
        raise ArtifactError(f"{path}: tensor {name} belongs to none of the model's {num_layers} layers")
    return scales


def _of_layers(
    path: Path, tensors: Mapping[str, Tensor], part: str, num_layers: int, num_kv_heads: int
) -> tuple[Tensor, ...]:
    names = [_TENSOR_NAME.format(layer=layer, part=part) for layer in range(num_layers)]
    return tuple(_checked(path, name, tensors.get(name), num_kv_heads) for name in names)


def _checked(path: Path, name: str, scale_J: Tensor | None, num_kv_heads: int) -> Tensor:
    if scale_J is None:
        raise ArtifactError(f"{path}: tensor {name} is missing; the file is incomplete, make the artifact again")
    if scale_J.dtype != torch.float32 or scale_J.shape != (num_kv_heads,):
        dtype = str(scale_J.dtype).removeprefix("torch.")
        raise ArtifactError(
            f"{path}: tensor {name} is {dtype} {list(scale_J.shape)}; float32 [{num_kv_heads}] is expected"
        )
    wrong_J = ~(scale_J.isfinite() & (scale_J > 0))
    if bool(wrong_J.any()):
        head = int(wrong_J.nonzero()[0])
        raise ArtifactError(
            f"{path}: tensor {name}: scale {float(scale_J[head])} of KV head {head} is not a positive number"
        )
    return scale_J

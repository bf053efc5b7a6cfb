"""Scales that a pair can take without a rounding error in the parameters that are stored as they are.

A transform leaves the model's function as it is only if norms, biases and routers hold the rescaled values exactly.

Shapes: P scaled channels, C rows of a parameter that channels divide or multiply (several may belong to one channel),
n values in each row.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quantpipe.quantize.transforms.pair_candidates import ScalePair
from quantpipe.quantize.transforms.transform import TransformInput


@dataclass(frozen=True, eq=False)
class Stored:
    """A parameter in its stored dtype: ``old_Cn`` divided by its channel's scale, or multiplied (``is_divided`` false).

    ``offset`` is what the module adds to the stored value before it is used.
    """

    old_Cn: Tensor
    channel_of_C: Tensor
    dtype: torch.dtype
    is_divided: bool = True
    offset: float = 0.0

    def rescaled(self, scale_P: Tensor) -> tuple[Tensor, Tensor]:
        """The values that ``scale_P`` asks for, and what the stored dtype makes of them, both in float32."""
        scale_C1 = scale_P[self.channel_of_C].unsqueeze(1)
        wanted_Cn = self.old_Cn * scale_C1
        if self.is_divided:
            wanted_Cn = (self.old_Cn + self.offset) / scale_C1 - self.offset
        return wanted_Cn, wanted_Cn.to(self.dtype).float()


def stored_of(given: TransformInput, pair: ScalePair) -> list[Stored]:
    """What of a pair is stored as it is: all but the weights of linears that are going to be quantized."""
    stored = []
    every_P = torch.arange(pair.num_channels)
    for leaf, parameter in given.block.get_submodule(pair.producer).named_parameters(recurse=False):
        if leaf == "weight" and pair.producer in given.linears:
            continue
        old_Pn = parameter[pair.rows_P].reshape(pair.num_channels, -1)
        dtype = given.original.get_parameter(f"{pair.producer}.{leaf}").dtype
        stored.append(Stored(old_Pn, every_P, dtype, offset=pair.offset if leaf == "weight" else 0.0))
    for name in pair.followers:
        weight_NK = given.block.get_parameter(f"{name}.weight")
        dtype = given.original.get_parameter(f"{name}.weight").dtype
        stored.append(Stored(weight_NK.T, pair.channel_of_K, dtype, is_divided=False))
    return stored


def exact_scale(wanted_P: Tensor, stored: Sequence[Stored]) -> Tensor:
    """The scale near ``wanted_P`` that every parameter of ``stored`` can take without a rounding error.

    One value for each channel: whatever scale its rounded quotient amounts to. Several: powers of two. A channel whose
    rescaled values are not held exactly, or leave the range of their dtype, keeps its scale of one.
    """
    if not stored:
        return wanted_P
    is_free = len(stored) == 1 and stored[0].is_divided and stored[0].old_Cn.shape[1] == 1
    scale_P = wanted_P if is_free else wanted_P.log2().round().exp2()
    for each in stored:
        wanted_Cn, new_Cn = each.rescaled(scale_P)
        normal_Cn = torch.isfinite(new_Cn) & (new_Cn.abs() >= torch.finfo(each.dtype).tiny)
        kept_Cn = (normal_Cn & (new_Cn + each.offset != 0)) | (each.old_Cn == -each.offset)
        if not is_free:
            kept_Cn &= new_Cn == wanted_Cn
        kept_P = torch.ones_like(scale_P).scatter_reduce(0, each.channel_of_C, kept_Cn.all(1).to(scale_P.dtype), "amin")
        scale_P = torch.where(kept_P > 0, scale_P, 1.0)
    if not is_free:
        return scale_P
    old_P = stored[0].old_Cn[:, 0] + stored[0].offset
    new_P = stored[0].rescaled(scale_P)[1][:, 0] + stored[0].offset
    return torch.where(old_P == 0, scale_P, old_P / new_P)


@torch.no_grad()
def apply_exactly(given: TransformInput, pair: ScalePair, scale_P: Tensor) -> None:
    """Apply a scale made by ``exact_scale``, and put what is stored on its grid again: quotients are off by an ulp."""
    pair.apply(given.block, scale_P)
    own = given.block.get_submodule(pair.producer).named_parameters(recurse=False)
    names = [f"{pair.producer}.{leaf}" for leaf, _ in own] + [f"{name}.weight" for name in pair.followers]
    for name in names:
        if name.removesuffix(".weight") not in given.linears:
            parameter = given.block.get_parameter(name)
            parameter.copy_(parameter.to(given.original.get_parameter(name).dtype))

"""The KV cache modes: how keys and values are rounded, and what a cache keeps of each token and KV head.

Quantizer, backends, engine and recipes all read this one list. Keys are stored after rope.

Shapes: any leading ones, then J KV heads, D head_dim, C stored codes (D, or D / 2 where two share a byte), P parameters
that a token and head carries beside its codes.
Source: `int8_per_token_head` is vLLM's rule of that name. Four bits follow Liu et al. 2024, "KIVI: A Tuning-Free
Asymmetric 2bit Quantization for KV Cache", but per token for values and keys alike; unlike vLLM's mode of the
name `int4_per_token_head` ours rotates nothing.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from quantpipe.errors import RecipeError, suggest
from quantpipe.formats.layout import quantize_activations

INT8_MAX = 127
INT4_MAX = 15
# Static scales cannot carry a NaN or an infinity, so this code, which no finite value gets, does.
NOT_FINITE_CODE = -128


@dataclass(frozen=True)
class KVRule:
    """How keys, or values, are stored.

    ``bits`` None is the compute dtype. 8 is symmetric: one float32 scale per token and head, or, if ``is_static``, one
    scale per layer and head from the artifact's sidecar. 4 is asymmetric: two codes per byte, and one float16 scale and
    minimum per token and head.
    """

    bits: int | None
    is_static: bool = False

    def code_width(self, head_dim: int) -> int:
        """C: how many elements hold the codes of one head."""
        return head_dim // 2 if self.bits == 4 else head_dim

    @property
    def code_dtype(self) -> torch.dtype:
        return {None: torch.float32, 8: torch.int8, 4: torch.uint8}[self.bits]

    @property
    def num_parameters(self) -> int:
        """P."""
        if self.bits is None or self.is_static:
            return 0
        return 1 if self.bits == 8 else 2

    @property
    def parameter_dtype(self) -> torch.dtype:
        return torch.float32 if self.bits == 8 else torch.float16

    def head_bytes(self, head_dim: int) -> int:
        """Bytes that one token and head takes."""
        codes = self.code_width(head_dim) * self.code_dtype.itemsize
        return codes + self.num_parameters * self.parameter_dtype.itemsize


@dataclass(frozen=True)
class KVMode:
    """The rules of keys and of values."""

    key: KVRule
    value: KVRule

    @property
    def needs_scales(self) -> bool:
        """Whether it reads the artifact's ``kv_scales.safetensors``."""
        return self.key.is_static or self.value.is_static

    def token_bytes(self, num_kv_heads: int, head_dim: int) -> int:
        """Bytes that one token takes in one layer."""
        return num_kv_heads * (self.key.head_bytes(head_dim) + self.value.head_bytes(head_dim))


COMPUTE_DTYPE = KVRule(None)
INT8 = KVRule(8)
INT8_STATIC = KVRule(8, is_static=True)
INT4 = KVRule(4)

KV_MODES: dict[str, KVMode] = {
    "auto": KVMode(COMPUTE_DTYPE, COMPUTE_DTYPE),
    "int8_per_token_head": KVMode(INT8, INT8),
    "int8_static": KVMode(INT8_STATIC, INT8_STATIC),
    "k_int8_v_int4": KVMode(INT8, INT4),
    "int4_per_token_head": KVMode(INT4, INT4),
}


def kv_mode(name: str, where: str) -> KVMode:
    """The mode of that name. RecipeError that names ``where`` it was asked for, and the known ones."""
    if name not in KV_MODES:
        raise RecipeError(f"{where}: unknown '{name}'{suggest(name, KV_MODES)}")
    return KV_MODES[name]


def static_scale(absmax_J: Tensor) -> Tensor:
    """Scales [J] that cover the largest magnitudes seen: absmax / 127; a head that was always zero gets 1 / 127."""
    return torch.where(absmax_J == 0, torch.ones_like(absmax_J), absmax_J) / INT8_MAX


def encode_kv(x_JD: Tensor, rule: KVRule, scale_J1: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
    """Codes [..., J, C] and parameters [..., J, P] (None where there are none) of float32 keys or values [..., J, D].

    ``scale_J1`` belongs to a static rule. Values beyond a static scale's range are clamped. A head that holds a NaN or
    an infinity decodes to something that is not finite.
    """
    if rule.bits is None:
        return x_JD.float(), None
    if rule.bits == 4:
        return _encode_int4(x_JD.float())
    if not rule.is_static:
        return quantize_activations(x_JD, float(INT8_MAX))
    assert scale_J1 is not None, "a static rule comes with its scales"
    q_JD = (x_JD.float() / scale_J1).round_().clamp_(-INT8_MAX, INT8_MAX)
    return q_JD.masked_fill_(~x_JD.isfinite(), NOT_FINITE_CODE).to(torch.int8), None


def decode_kv(codes_JC: Tensor, parameters_JP: Tensor | None, rule: KVRule, scale_J1: Tensor | None = None) -> Tensor:
    """Float32 keys or values [..., J, D] of what ``encode_kv`` gave.

    Where heads do not lie last but one, ``scale_J1`` has the shape that spreads over what is decoded.
    """
    if rule.bits is None:
        return codes_JC
    if rule.is_static:
        assert scale_J1 is not None, "a static rule comes with its scales"
        return codes_JC.float().mul_(scale_J1).masked_fill_(codes_JC == NOT_FINITE_CODE, torch.nan)
    assert parameters_JP is not None, "a rule that scales per token keeps its scales"
    if rule.bits == 8:
        return codes_JC.float().mul_(parameters_JP)
    scale_J1, minimum_J1 = parameters_JP.float().chunk(2, dim=-1)
    return unpack_int4(codes_JC).mul_(scale_J1).add_(minimum_J1)


def round_kv(x_JD: Tensor, rule: KVRule, scale_J1: Tensor | None = None) -> Tensor:
    """What a cache gives back for ``x_JD`` [..., J, D]."""
    return decode_kv(*encode_kv(x_JD, rule, scale_J1), rule, scale_J1)


def unpack_int4(codes_JC: Tensor) -> Tensor:
    """Float32 [..., D] of bytes that hold dimension c in the low and c + D / 2 in the high half."""
    x_JD = torch.empty(*codes_JC.shape[:-1], 2 * codes_JC.shape[-1])
    low_JC, high_JC = x_JD.chunk(2, dim=-1)
    low_JC.copy_(codes_JC & INT4_MAX)
    high_JC.copy_(codes_JC >> 4)
    return x_JD


def _encode_int4(x_JD: Tensor) -> tuple[Tensor, Tensor]:
    minimum_J1, maximum_J1 = x_JD.aminmax(dim=-1, keepdim=True)
    # Cast before use: the codes are those that are best for the parameters that are read back.
    minimum_J1 = minimum_J1.half().float()
    scale_J1 = ((maximum_J1 - minimum_J1) / INT4_MAX).half().float()
    divisor_J1 = torch.where(scale_J1 == 0, torch.ones_like(scale_J1), scale_J1)
    q_JD = ((x_JD - minimum_J1) / divisor_J1).round_().clamp_(0, INT4_MAX).to(torch.uint8)
    low_JC, high_JC = q_JD.chunk(2, dim=-1)
    return low_JC | (high_JC << 4), torch.cat((scale_J1, minimum_J1), dim=-1).half()

"""How keys and values are rounded for a cache, and read back, by the rules of ``kv_mode``.

Shapes: any leading ones, then J KV heads, D head_dim, C stored codes (D, or D / 2 where two share a byte), P parameters
that a token and head carries beside its codes.
"""

import torch
from torch import Tensor

from quantpipe.formats.kv_mode import KVRule
from quantpipe.formats.layout import quantize_activations

INT8_MAX = 127
INT4_MAX = 15
# Static scales cannot carry a NaN or an infinity, so this code, which no finite value gets, does.
NOT_FINITE_CODE = -128


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

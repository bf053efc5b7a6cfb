"""What the stored numbers mean: the one rounding rule, the one scale rule, and the packing of 4-bit words.

Solvers, readers, backends and tests all call these. Scales arrive already cast to the dtype they are stored in,
so that what was optimised is what is read back.

Shapes: N out_features, K in_features, G groups along K, T tokens.
"""

import torch
from torch import Tensor

from quantpipe.formats.scheme import WeightScheme

# A zero scale would divide by zero in readers that requantize; any positive value represents all-zero weights.
SMALLEST_SCALE = 1e-9


def absmax_scale(weight_NK: Tensor, scheme: WeightScheme, scale_dtype: torch.dtype) -> Tensor:
    """Round-to-nearest scales [N, G]: max|w| / ((2^bits - 1) / 2), cast to ``scale_dtype``, never zero."""
    num_out, num_in = weight_NK.shape
    groups_NGg = weight_NK.reshape(num_out, scheme.num_groups(num_in), -1)
    scale_NG = groups_NGg.abs().amax(-1).float() / ((2**scheme.bits - 1) / 2)
    return cast_scale(scale_NG, scale_dtype)


def cast_scale(scale: Tensor, scale_dtype: torch.dtype) -> Tensor:
    """Clamp to what ``scale_dtype`` can hold as a positive normal number, and cast."""
    limits = torch.finfo(scale_dtype)
    return scale.clamp(max(SMALLEST_SCALE, limits.tiny), limits.max).to(scale_dtype)


def encode(weight_NK: Tensor, scale_NG: Tensor, scheme: WeightScheme) -> Tensor:
    """Integers [N, K] (int8): divide by the scale, round half to even, clamp to the signed range."""
    num_out, num_in = weight_NK.shape
    groups_NGg = weight_NK.float().reshape(num_out, scale_NG.shape[1], -1)
    q_NGg = (groups_NGg / scale_NG.float().unsqueeze(-1)).round_().clamp_(scheme.q_min, scheme.q_max)
    return q_NGg.reshape(num_out, num_in).to(torch.int8)


def decode(q_NK: Tensor, scale_NG: Tensor) -> Tensor:
    """Weights [N, K] in float32: q * scale, the scale of column k being that of group k // (K / G)."""
    num_out, num_in = q_NK.shape
    groups_NGg = q_NK.float().reshape(num_out, scale_NG.shape[1], -1)
    return (groups_NGg * scale_NG.float().unsqueeze(-1)).reshape(num_out, num_in)


def pack(q_NK: Tensor, bits: int) -> Tensor:
    """int32 words [N, ceil(K * bits / 32)]: q + 2^(bits-1), packed along K, least significant bits first."""
    per_word = 32 // bits
    offset_NK = q_NK.to(torch.int64) + (1 << (bits - 1))
    padded_NK = torch.nn.functional.pad(offset_NK, (0, -q_NK.shape[1] % per_word))
    shifts = torch.arange(per_word, device=q_NK.device) * bits
    words_NW = (padded_NK.reshape(q_NK.shape[0], -1, per_word) << shifts).sum(-1)
    return torch.where(words_NW >= 1 << 31, words_NW - (1 << 32), words_NW).to(torch.int32)


def unpack(words_NW: Tensor, bits: int, in_features: int) -> Tensor:
    """Inverse of ``pack``: signed integers [N, K] (int8)."""
    shifts = torch.arange(32 // bits, device=words_NW.device, dtype=torch.int32) * bits
    fields_NWf = (words_NW.unsqueeze(-1) >> shifts) & ((1 << bits) - 1)
    q_NK = fields_NWf.reshape(words_NW.shape[0], -1)[:, :in_features]
    return (q_NK - (1 << (bits - 1))).to(torch.int8)


def quantize_activations(x_TK: Tensor, divisor: float = 127.0) -> tuple[Tensor, Tensor]:
    """Per-token symmetric int8: q [T, K] (int8) and scales [T, 1] (float32).

    ``divisor`` 127 is the rule served (vLLM's); 127.5 is what compressed-tensors simulates in transformers.
    A row of zeros gets scale 1 / divisor, so nothing divides by zero; a row with NaN or infinity gets such a scale,
    so that an overflow stays visible in everything computed from it.
    """
    x_TK = x_TK.float()
    absmax_T1 = x_TK.abs().amax(-1, keepdim=True)
    scale_T1 = torch.where(absmax_T1 == 0, torch.ones_like(absmax_T1), absmax_T1) / divisor
    return (x_TK / scale_T1).round_().clamp_(-128, 127).to(torch.int8), scale_T1

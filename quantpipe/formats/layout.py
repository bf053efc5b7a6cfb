"""What the stored numbers mean: the one rounding rule, the one scale rule, and the packing into words.

Solvers, readers, backends and tests all call these. Scales arrive already cast to the dtype they are stored in,
so that what was optimised is what is read back.

Shapes: N out_features, K in_features, G groups along K, T tokens; in packing W words of a row, R runs of f values or
w words.
"""

import sys

import torch
from torch import Tensor

from quantpipe.formats.scheme import WeightScheme, num_words

# A zero scale would divide by zero in readers that requantize; any positive value represents all-zero weights.
SMALLEST_SCALE = 1e-9
_WORD_BITS = 32
_WORD_MASK = (1 << _WORD_BITS) - 1
# So many values of any width fill whole words.
_RUN = 32


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


def minmax_scale(weight_NK: Tensor, scheme: WeightScheme, scale_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Round-to-nearest scales [N, G] and zero points [N, G] (int8) of an asymmetric scheme.

    The range always holds zero, so that a weight of zero stays zero.
    """
    num_out, num_in = weight_NK.shape
    groups_NGg = weight_NK.float().reshape(num_out, scheme.num_groups(num_in), -1)
    low_NG, high_NG = groups_NGg.amin(-1).clamp_max(0), groups_NGg.amax(-1).clamp_min(0)
    scale_NG = cast_scale((high_NG - low_NG) / (2**scheme.bits - 1), scale_dtype)
    return scale_NG, zero_point(low_NG, scale_NG, scheme)


def zero_point(low_NG: Tensor, scale_NG: Tensor, scheme: WeightScheme) -> Tensor:
    """The integer (int8) that stands for zero where ``q_min`` stands for ``low_NG``."""
    zero_NG = scheme.q_min - low_NG / scale_NG.float()
    return zero_NG.round_().clamp_(scheme.q_min, scheme.q_max).to(torch.int8)


def encode(weight_NK: Tensor, scale_NG: Tensor, scheme: WeightScheme, zero_NG: Tensor | None = None) -> Tensor:
    """Integers [N, K] (int8): divide by the scale, add the zero point, round half to even, clamp to the range."""
    num_out, num_in = weight_NK.shape
    groups_NGg = weight_NK.float().reshape(num_out, scale_NG.shape[1], -1)
    q_NGg = groups_NGg / scale_NG.float().unsqueeze(-1)
    if zero_NG is not None:
        q_NGg += zero_NG.float().unsqueeze(-1)
    return q_NGg.round_().clamp_(scheme.q_min, scheme.q_max).reshape(num_out, num_in).to(torch.int8)


def decode(q_NK: Tensor, scale_NG: Tensor, zero_NG: Tensor | None = None) -> Tensor:
    """Weights [N, K] in float32: (q - zero) * scale, those of column k being of group k // (K / G)."""
    num_out, num_in = q_NK.shape
    groups_NGg = q_NK.float().reshape(num_out, scale_NG.shape[1], -1)
    if zero_NG is not None:
        groups_NGg = groups_NGg - zero_NG.float().unsqueeze(-1)
    return (groups_NGg * scale_NG.float().unsqueeze(-1)).reshape(num_out, num_in)


def pack(q_NK: Tensor, bits: int) -> Tensor:
    """int32 words [N, ceil(K * bits / 32)]: q + 2^(bits-1) as one stream of bits along K, the least significant first.

    Where ``bits`` does not divide 32 a value may begin in one word and end in the next.
    """
    offset_NK = q_NK.to(torch.int64) + (1 << (bits - 1))
    fields_NRf = _in_runs(offset_NK, _RUN)
    words_NRw = torch.zeros(*fields_NRf.shape[:2], bits, dtype=torch.int64, device=q_NK.device)
    for field, word, shift in _places(bits):
        words_NRw[..., word] |= (fields_NRf[..., field] << shift) & _WORD_MASK
        if shift + bits > _WORD_BITS:
            words_NRw[..., word + 1] |= fields_NRf[..., field] >> (_WORD_BITS - shift)
    words_NW = words_NRw.flatten(1)[:, : num_words(q_NK.shape[1], bits)]
    return torch.where(words_NW >= 1 << 31, words_NW - (1 << 32), words_NW).to(torch.int32)


def unpack(words_NW: Tensor, bits: int, in_features: int) -> Tensor:
    """Inverse of ``pack``: signed integers [N, K] (int8)."""
    if bits == 4 and sys.byteorder == "little":
        return _unpack_nibbles(words_NW)[:, :in_features]
    words_NRw = _in_runs(words_NW.to(torch.int64) & _WORD_MASK, bits)
    q_NRf = torch.empty(*words_NRw.shape[:2], _RUN, dtype=torch.int8, device=words_NW.device)
    for field, word, shift in _places(bits):
        value_NR = words_NRw[..., word] >> shift
        if shift + bits > _WORD_BITS:
            value_NR = value_NR | (words_NRw[..., word + 1] << (_WORD_BITS - shift))
        q_NRf[..., field] = (value_NR & ((1 << bits) - 1)) - (1 << (bits - 1))
    return q_NRf.flatten(1)[:, :in_features]


def _unpack_nibbles(words_NW: Tensor) -> Tensor:
    """The same for 4 bits, several times faster: bytes hold two values each, the first in their lower half."""
    bytes_NB = words_NW.contiguous().view(torch.uint8)
    q_NB2 = torch.stack((bytes_NB & 15, bytes_NB >> 4), dim=-1).view(torch.int8)
    return q_NB2.sub_(1 << 3).flatten(1)


def _places(bits: int) -> list[tuple[int, int, int]]:
    """Of each value in a run: its number, the word its lowest bit lies in, and where in that."""
    return [(field, *divmod(field * bits, _WORD_BITS)) for field in range(_RUN)]


def _in_runs(values_NC: Tensor, size: int) -> Tensor:
    """Rows cut into runs of ``size``, the last one filled up with zeros: [N, R, size]."""
    padded_NC = torch.nn.functional.pad(values_NC, (0, -values_NC.shape[1] % size))
    return padded_NC.reshape(values_NC.shape[0], -1, size)


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

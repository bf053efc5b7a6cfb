"""SmoothQuant: move the activations' outlier channels into the weights, where 8 bits hold them better.

Shapes: T sampled tokens, N out_features, K in_features, P channels of a producer.
Source: Xiao et al. 2022, "SmoothQuant: Accurate and Efficient Post-Training Quantization for Large Language Models",
equation 4, with the exponent searched per group of linears instead of one for the model.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quantpipe.formats.layout import absmax_scale, decode, encode, quantize_activations
from quantpipe.formats.scheme import WeightScheme
from quantpipe.quantize.transforms.pairs import ScalePair, find_pairs
from quantpipe.quantize.transforms.readers import Readers, largest_per_channel, observe
from quantpipe.quantize.transforms.stored_scale import apply_exactly, exact_scale, stored_of
from quantpipe.quantize.transforms.transform import TransformInput, TransformRecord

ALPHAS = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
SAMPLED_TOKENS = 256
# Channels quieter than this fraction of the loudest are treated as if they were this loud.
QUIETEST_FRAC = 1e-5


@dataclass(frozen=True, eq=False)
class _Readers:
    """Linears that read one tensor: it, their weights as one matrix, what they give out, and how that is stored."""

    x_TK: Tensor
    weight_NK: Tensor
    expected_TN: Tensor
    scheme: WeightScheme
    scale_dtype: torch.dtype

    def error(self, scale_K: Tensor) -> float:
        """Squared error of the output with input and weights rounded as they are when served."""
        q_TK, scale_T1 = quantize_activations(self.x_TK / scale_K)
        scaled_NK = self.weight_NK * scale_K
        scale_NG = absmax_scale(scaled_NK, self.scheme, self.scale_dtype)
        rounded_NK = decode(encode(scaled_NK, scale_NG, self.scheme), scale_NG)
        found_TN = (q_TK.float() @ rounded_NK.T) * scale_T1
        return float((found_TN - self.expected_TN).square().sum(dtype=torch.float64))


@torch.no_grad()
def apply_smoothquant(given: TransformInput) -> list[TransformRecord]:
    """Rescale every proved pair of the block by the exponent that leaves the least output error on sample tokens.

    Only pairs whose linears all read 8-bit activations; the others are left as they are, with the reason.
    """
    pairs, missing = find_pairs(given.block, given.linears, given.batches[0])
    records = [TransformRecord(names, None, None, reason) for names, reason in missing]
    eligible = []
    for pair in pairs:
        if all(given.schemes[name].activation_bits is not None for name in pair.consumers):
            eligible.append(pair)
        else:
            records.append(TransformRecord(pair.consumers, None, None, "what it reads is not quantized"))
    for pair, seen in zip(eligible, observe(given.block, eligible, given.batches, SAMPLED_TOKENS), strict=True):
        records.append(_smooth(given, pair, seen))
    return records


def _smooth(given: TransformInput, pair: ScalePair, seen: Sequence[Readers]) -> TransformRecord:
    if not seen:
        return TransformRecord(pair.consumers, None, None, "no calibration token reaches it")
    readers = [_prepared(given, each) for each in seen]
    absmax_x_K = torch.stack([each.inputs.absmax_K for each in seen]).amax(0)
    absmax_w_K = torch.stack([given.linears[name].weight.abs().amax(0) for name in pair.consumers]).amax(0)
    absmax_x_P, absmax_w_P = largest_per_channel(absmax_x_K, pair), largest_per_channel(absmax_w_K, pair)
    stored = stored_of(given, pair)
    energy = sum(float(each.expected_TN.square().sum(dtype=torch.float64)) for each in readers)

    def error(scale_P: Tensor) -> float:
        scale_K = scale_P[pair.channel_of_K]
        return sum(each.error(scale_K) for each in readers) / max(energy, torch.finfo(torch.float64).tiny)

    before = error(torch.ones(pair.num_channels))
    tried = [(alpha, exact_scale(smoothing_scale(absmax_x_P, absmax_w_P, alpha), stored)) for alpha in ALPHAS]
    after, alpha, scale_P = min(
        ((error(scale_P), alpha, scale_P) for alpha, scale_P in tried), key=lambda each: each[0]
    )
    if after >= before:
        return TransformRecord(pair.consumers, None, None, "no exponent lowers the output error", before, before)
    apply_exactly(given, pair, scale_P)
    return TransformRecord(pair.consumers, pair.producer, alpha, None, before, after)


def _prepared(given: TransformInput, readers: Readers) -> _Readers:
    weight_NK = torch.cat([given.linears[name].weight for name in readers.names])
    x_TK = readers.inputs.sample_TK
    first = readers.names[0]
    scale_dtype = given.original.get_parameter(f"{first}.weight").dtype
    return _Readers(x_TK, weight_NK, x_TK @ weight_NK.T, given.schemes[first], scale_dtype)


def smoothing_scale(absmax_x_P: Tensor, absmax_w_P: Tensor, alpha: float) -> Tensor:
    """max|x|^alpha / max|w|^(1 - alpha) for each channel (equation 4), centred on 1 so that norms keep their size."""
    loud_P = absmax_x_P.clamp_min(float(absmax_x_P.max()) * QUIETEST_FRAC).clamp_min(torch.finfo(torch.float32).tiny)
    heavy_P = absmax_w_P.clamp_min(float(absmax_w_P.max()) * QUIETEST_FRAC).clamp_min(torch.finfo(torch.float32).tiny)
    log_P = alpha * loud_P.log() - (1 - alpha) * heavy_P.log()
    return (log_P - (log_P.max() + log_P.min()) / 2).exp()

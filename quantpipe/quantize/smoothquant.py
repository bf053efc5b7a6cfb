"""SmoothQuant: move the activations' outlier channels into the weights, where 8 bits hold them better.

Shapes: S sequences, L tokens per sequence, T sampled tokens, N out_features, K in_features, P channels of a producer.
Source: Xiao et al. 2022, "SmoothQuant: Accurate and Efficient Post-Training Quantization for Large Language Models",
equation 4, with the exponent searched per group of linears instead of one for the model.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from quantpipe.formats.layout import absmax_scale, decode, encode, quantize_activations
from quantpipe.formats.scheme import WeightScheme
from quantpipe.quantize.block_runs import Batch, run_block
from quantpipe.quantize.pairs import ScalePair, find_pairs
from quantpipe.quantize.transform import TransformInput, TransformRecord

# A step of 0.05 and twice the tokens gave the same divergence on a real model and took 1.5 times as long.
ALPHAS = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
SAMPLED_TOKENS = 256
# Channels quieter than this fraction of the loudest are treated as if they were this loud.
QUIETEST_FRAC = 1e-5


class _Activations:
    """What a group of linears reads: the largest magnitude of each channel, and evenly spaced sample tokens.

    Models park enormous values in a few channels of a sequence's first token, which has a scale of its own when served.
    They would hide what the other tokens need, so the first token is not sampled, and it counts in ``absmax_K`` only up
    to the loudest channel of the others. Not at all would be wrong: a channel that only the first token uses would be
    scaled so far down in the weights that its values come out badly, and all later tokens attend to them.
    """

    def __init__(self, in_features: int, sampled_per_sequence: int) -> None:
        self._first_K = torch.zeros(in_features)
        self._others_K = torch.zeros(in_features)
        self._sampled_per_sequence = sampled_per_sequence
        self._sample: list[Tensor] = []

    def update(self, x_SLK: Tensor) -> None:
        length = x_SLK.shape[1]
        positions = torch.linspace(1, length - 1, min(length - 1, self._sampled_per_sequence)).round().long()
        self._sample.append(x_SLK[:, positions].flatten(0, 1))
        self._first_K = torch.maximum(self._first_K, x_SLK[:, 0].abs().amax(0))
        self._others_K = torch.maximum(self._others_K, x_SLK[:, 1:].abs().amax((0, 1)))

    @property
    def absmax_K(self) -> Tensor:
        return torch.maximum(self._others_K, self._first_K.clamp_max(float(self._others_K.max())))

    @property
    def sample_TK(self) -> Tensor:
        return torch.cat(self._sample)


@torch.no_grad()
def apply_smoothquant(given: TransformInput) -> list[TransformRecord]:
    """Rescale every proved pair of the block by the exponent that leaves the least output error on sample tokens."""
    pairs, missing = find_pairs(given.block, given.linears, given.batches[0])
    seen = _observe(given.block, given.linears, pairs, given.batches)
    records = [TransformRecord(names, None, None, reason) for names, reason in missing]
    for pair, activations in zip(pairs, seen, strict=True):
        best = _search(given, pair, activations)
        if best is None:
            records.append(TransformRecord(pair.consumers, None, None, "no exponent lowers the output error"))
            continue
        alpha, scale_P = best
        pair.apply(given.block, scale_P)
        for name, parameter in _stored_parameters(given, pair).items():
            parameter.copy_(parameter.to(given.original.get_parameter(name).dtype))
        records.append(TransformRecord(pair.consumers, pair.producer, alpha))
    return records


def _observe(
    block: nn.Module, linears: Mapping[str, nn.Linear], pairs: Sequence[ScalePair], batches: Sequence[Batch]
) -> list[_Activations]:
    """What the consumers of each pair read, in one pass over the calibration set."""
    per_sequence = max(1, SAMPLED_TOKENS // sum(len(batch.hidden_SLD) for batch in batches))
    readers = [linears[pair.consumers[0]] for pair in pairs]
    seen = [_Activations(reader.in_features, per_sequence) for reader in readers]
    inputs: dict[nn.Module, Tensor] = {}

    def note(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        inputs[module] = args[0]

    hooks = [reader.register_forward_pre_hook(note) for reader in readers]
    for batch in batches:
        run_block(block, batch)
        for reader, activations in zip(readers, seen, strict=True):
            activations.update(inputs[reader].reshape(*batch.hidden_SLD.shape[:2], reader.in_features))
    for hook in hooks:
        hook.remove()
    return seen


def _search(given: TransformInput, pair: ScalePair, activations: _Activations) -> tuple[float, Tensor] | None:
    """The exponent and scales with the least output error; None where leaving the group alone is as good."""
    weight_NK = torch.cat([given.linears[name].weight for name in pair.consumers])
    x_TK = activations.sample_TK
    expected_TN = x_TK @ weight_NK.T
    scale_dtype = given.original.get_parameter(f"{pair.consumers[0]}.weight").dtype
    stored = _stored_parameters(given, pair)

    def error(scale_K: Tensor) -> float:
        found_TN = _quantized_output(x_TK / scale_K, weight_NK * scale_K, given.schemes[pair.consumers[0]], scale_dtype)
        return float((found_TN - expected_TN).double().square().sum())

    num_channels = pair.num_channels(given.block)
    absmax_x_P = _largest_per_channel(activations.absmax_K, pair.channel_of_K, num_channels)
    absmax_w_P = _largest_per_channel(weight_NK.abs().amax(0), pair.channel_of_K, num_channels)
    dtypes = [given.original.get_parameter(name).dtype for name in stored]
    least = error(torch.ones(weight_NK.shape[1]))
    best = None
    for alpha in ALPHAS:
        wanted_P = smoothing_scale(absmax_x_P, absmax_w_P, alpha)
        scale_P = exact_scale(wanted_P, list(stored.values()), dtypes)
        found = error(scale_P[pair.channel_of_K])
        if found < least:
            least, best = found, (alpha, scale_P)
    return best


def smoothing_scale(absmax_x_P: Tensor, absmax_w_P: Tensor, alpha: float) -> Tensor:
    """max|x|^alpha / max|w|^(1 - alpha) for each channel (equation 4), centred on 1 so that norms keep their size."""
    loud_P = absmax_x_P.clamp_min(float(absmax_x_P.max()) * QUIETEST_FRAC).clamp_min(torch.finfo(torch.float32).tiny)
    heavy_P = absmax_w_P.clamp_min(float(absmax_w_P.max()) * QUIETEST_FRAC).clamp_min(torch.finfo(torch.float32).tiny)
    log_P = alpha * loud_P.log() - (1 - alpha) * heavy_P.log()
    return (log_P - (log_P.max() + log_P.min()) / 2).exp()


def exact_scale(wanted_P: Tensor, stored: Sequence[Tensor], dtypes: Sequence[torch.dtype]) -> Tensor:
    """The scale nearest ``wanted_P`` by which ``stored`` parameters can be divided without a rounding error.

    One parameter: whatever scale its rounded quotient amounts to. Several: powers of two, which divide exactly. A
    channel whose quotient leaves the range of its dtype keeps its scale of one.
    """
    scale_P = wanted_P.log2().round().exp2() if len(stored) > 1 else wanted_P
    for old_P, dtype in zip(stored, dtypes, strict=True):
        new_P = (old_P / scale_P).to(dtype).float()
        kept_P = torch.isfinite(new_P) & (new_P.abs() >= torch.finfo(dtype).tiny)
        scale_P = torch.where(kept_P | (old_P == 0), scale_P, 1.0)
    if len(stored) == 1:
        new_P = (stored[0] / scale_P).to(dtypes[0]).float()
        scale_P = torch.where(stored[0] == 0, scale_P, stored[0] / new_P)
    return scale_P


def _stored_parameters(given: TransformInput, pair: ScalePair) -> dict[str, Tensor]:
    """The producer's parameters that are stored as they are: all of a norm's, but only the bias of a target linear."""
    return {
        f"{pair.producer}.{leaf}": parameter
        for leaf, parameter in given.block.get_submodule(pair.producer).named_parameters(recurse=False)
        if not (leaf == "weight" and pair.producer in given.linears)
    }


def _largest_per_channel(value_K: Tensor, channel_of_K: Tensor, num_channels: int) -> Tensor:
    """The maximum over the columns that one channel feeds."""
    return torch.zeros(num_channels).scatter_reduce(0, channel_of_K, value_K, "amax")


def _quantized_output(x_TK: Tensor, weight_NK: Tensor, scheme: WeightScheme, scale_dtype: torch.dtype) -> Tensor:
    """x W^T with both rounded as they are when served."""
    q_TK, scale_T1 = quantize_activations(x_TK)
    scale_NG = absmax_scale(weight_NK, scheme, scale_dtype)
    return (q_TK.float() @ decode(encode(weight_NK, scale_NG, scheme), scale_NG).T) * scale_T1

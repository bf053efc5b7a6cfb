"""K-smoothing: divide loud channels of the keys, and multiply the queries, so that 8 bits per token and head hold keys.

Offline and exact: rows of the key and query matrices are rescaled, and biases and norms only by powers of two. A row of
a quantized weight has scales of its own, so weights lose nothing by it.

Shapes: S sequences, L tokens, H query heads, J KV heads, D head size.
Source: the division of per-channel magnitude between two factors of a product is that of Xiao et al. 2022,
"SmoothQuant", equation 4; Lin et al. 2024, "QServe: W4A8KV4 Quantization and System Co-design", section 4.2, apply it
to keys and queries with one scale for both channels that rope turns together.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from quantpipe.formats.kv_mode import INT8
from quantpipe.formats.kv_rounding import round_kv
from quantpipe.quantize.model.block_runs import Batch, StopForwardError, run_block
from quantpipe.quantize.model.watched_attention import AttentionCall, watching_attention
from quantpipe.quantize.transforms.key_folds import KeyFold, NoKeyFold, find_key_fold
from quantpipe.quantize.transforms.transform import TransformInput, TransformRecord

# 1 makes every channel of a head as loud as the others, which is best for a token as loud as the loudest.
ALPHAS = (0.25, 0.5, 0.75, 1.0)
# Of each of two sequences.
SAMPLED_TOKENS = 512
# Channels quieter than this fraction of their head's loudest are treated as if they were this loud.
QUIETEST_FRAC = 1e-3


@torch.no_grad()
def apply_k_smooth(given: TransformInput) -> list[TransformRecord]:
    """Rescale each KV head of the block by the exponent that leaves the least error of the attention output.

    A head for which no exponent lowers it is left alone. An attention whose fold cannot be proved is left as it is,
    with the reason.
    """
    fold = find_key_fold(given.block, given.batches[0])
    if isinstance(fold, NoKeyFold):
        return [TransformRecord(fold.modules or tuple(given.linears), None, None, fold.reason)]
    names = tuple(dict.fromkeys((fold.query, fold.key)))
    search = _Search(given, fold, _sample(given.block, given.batches))
    alpha_J, scale_JD = search.best()
    before, after = (
        search.errors(each).sum() / search.energy_J.sum() for each in (torch.ones_like(scale_JD), scale_JD)
    )
    if not bool((alpha_J > 0).any()):
        reason = "no exponent lowers the error of the attention output"
        return [TransformRecord(names, None, None, reason, float(before), float(before))]
    fold.apply(given.block, scale_JD)
    detail = f"{int((alpha_J > 0).sum())} of {len(alpha_J)} KV heads"
    return [TransformRecord(names, fold.key, float(alpha_J.mean()), None, float(before), float(after), detail)]


def _sample(block: nn.Module, batches: Sequence[Batch]) -> list[AttentionCall]:
    """What attention is called with for a sequence from the beginning and one from the end of the calibration set."""
    calls: list[AttentionCall] = []

    def keep(call: AttentionCall) -> None:
        calls.append(call.first_sequence(SAMPLED_TOKENS))
        raise StopForwardError

    for number in sorted({0, len(batches) - 1}):
        with watching_attention(keep):
            try:
                run_block(block, batches[number].first_sequence(torch.float32))
            except StopForwardError:
                continue
    return calls


@dataclass(frozen=True)
class _Search:
    """The error of the attention output in each KV head, with keys rounded as an int8 cache rounds them."""

    given: TransformInput
    fold: KeyFold
    calls: Sequence[AttentionCall]

    @property
    def energy_J(self) -> Tensor:
        return torch.stack([self._per_head(self._exact(call), call) for call in self.calls]).sum(0)

    def errors(self, scale_JD: Tensor) -> Tensor:
        """Squared errors [J] over all sampled tokens after folding ``scale_JD``."""
        return torch.stack([self._error(call, scale_JD) for call in self.calls]).sum(0)

    def best(self) -> tuple[Tensor, Tensor]:
        """For each KV head the exponent, 0 where none helps, and the scale [J, D]; where heads share, one for all."""
        loudness_JD = self._loudness()
        scale_JD = torch.ones_like(loudness_JD)
        least_J, alpha_J = self.errors(scale_JD), torch.zeros(len(scale_JD))
        for alpha in ALPHAS:
            tried_JD = exact_fold_scale(self.given, self.fold, smoothing_scale(loudness_JD, alpha))
            error_J = self.errors(tried_JD)
            is_better_J = error_J < least_J
            if self.fold.is_shared:
                is_better_J = (error_J.sum() < least_J.sum()).expand_as(error_J)
            least_J, alpha_J = torch.where(is_better_J, error_J, least_J), torch.where(is_better_J, alpha, alpha_J)
            scale_JD = torch.where(is_better_J.unsqueeze(1), tried_JD, scale_JD)
        return alpha_J, scale_JD

    def _loudness(self) -> Tensor:
        """The largest magnitude [J, D] of a channel's pair over the sampled tokens, as if rope had turned it fully."""
        partner_D = self.fold.partner_D
        key_JLD = torch.cat([call.key_SJLD[0][:, call.is_real_SL[0]] for call in self.calls], dim=1)
        is_turned_D = partner_D != torch.arange(len(partner_D))
        turned_JLD = torch.where(is_turned_D, torch.hypot(key_JLD, key_JLD[..., partner_D]), key_JLD.abs())
        return self.fold.shared(turned_JLD.amax(1))

    def _exact(self, call: AttentionCall) -> Tensor:
        return call.output(call.query_SHLD, call.key_SJLD, call.value_SJLD)

    def _error(self, call: AttentionCall, scale_JD: Tensor) -> Tensor:
        query_SHLD = call.query_SHLD * self.fold.for_queries(scale_JD).unsqueeze(1)
        key_SJLD = round_kv((call.key_SJLD / scale_JD.unsqueeze(1)).transpose(1, 2), INT8).transpose(1, 2)
        return self._per_head(call.output(query_SHLD, key_SJLD, call.value_SJLD) - self._exact(call), call)

    def _per_head(self, x_SLHD: Tensor, call: AttentionCall) -> Tensor:
        """The sum of squares [J] over the tokens and query heads of each KV head, in float64."""
        squares_H = x_SLHD[call.is_real_SL].double().square().sum((0, 2))
        return squares_H.view(len(self.fold.key_rows_JD), -1).sum(1)


def smoothing_scale(loudness_JD: Tensor, alpha: float) -> Tensor:
    """loudness^alpha for each channel, centred on 1 in each head so that keys and queries keep their size."""
    quietest_J1 = (loudness_JD.amax(1, keepdim=True) * QUIETEST_FRAC).clamp_min(torch.finfo(torch.float32).tiny)
    log_JD = alpha * torch.maximum(loudness_JD, quietest_J1).log()
    return (log_JD - log_JD.mean(1, keepdim=True)).exp()


def exact_fold_scale(given: TransformInput, fold: KeyFold, wanted_JD: Tensor) -> Tensor:
    """The scale near ``wanted_JD`` that everything stored as it is can take without a rounding error.

    Powers of two where a bias, a norm or an unquantized weight takes part; a pair of channels of which one's values
    leave the range of their dtype keeps its scale of one.
    """
    stored = [
        (module, leaf)
        for module in dict.fromkeys((fold.query, fold.key))
        for leaf, _ in given.block.get_submodule(module).named_parameters(recurse=False)
        if not (leaf == "weight" and module in given.linears)
    ]
    if not stored:
        return wanted_JD
    scale_JD = wanted_JD.log2().round().exp2()
    is_exact_JD = torch.ones_like(scale_JD, dtype=torch.bool)
    for module, rows, factor in fold.factors(scale_JD):
        for name in (f"{module}.{leaf}" for owner, leaf in stored if owner == module):
            parameter, dtype = given.block.get_parameter(name), given.original.get_parameter(name).dtype
            wanted = parameter.reshape(len(parameter), -1)[rows] * factor.unsqueeze(-1)
            is_exact = (wanted.to(dtype).float() == wanted).all(-1)
            is_exact_JD &= is_exact.view(len(scale_JD), -1, scale_JD.shape[1]).all(1)
    is_off_JD = fold.shared((~is_exact_JD).float()) > 0
    return torch.where(is_off_JD, 1.0, scale_JD)

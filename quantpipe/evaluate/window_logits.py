"""One window of text read by two models: their predictions compared position by position, in float64.

Shapes: T positions of the window that predict a token, R rows of one chunk, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from quantpipe.engine.request import PromptLogitsSink, SamplingParams
from quantpipe.errors import DataError
from quantpipe.evaluate.intervals import FloatArray
from quantpipe.evaluate.served import ServedModel

LogitsArray = npt.NDArray[np.float32]
READ_ONLY_PARAMS = SamplingParams(max_tokens=0, ignore_eos=True)
ROWS_AT_ONCE = 16  # float64 copies while comparing: 3 x 16 x 49,152 x 8 bytes = 19 MB


@dataclass(frozen=True)
class Positions:
    """Per position: both models' negative log-likelihood of the next token, KL(base || candidate), agreement."""

    base_nll_T: FloatArray
    cand_nll_T: FloatArray
    kl_T: FloatArray
    agrees_T: npt.NDArray[np.bool_]


def compare_window(base: ServedModel, cand: ServedModel, window: Sequence[int], where: str) -> Positions:
    """Keep the baseline's float32 logits of the window, then compare the candidate's chunk by chunk as they come.

    DataError, beginning with ``where``, for logits that are not finite or not one row for each position.
    """
    token_ids = tuple(int(token_id) for token_id in window)
    base_TV = _read_logits(base, token_ids, f"{where}: baseline")
    num_positions, vocab_size = base_TV.shape
    next_ids_T = torch.tensor(token_ids[1:])
    scratch_3RV = torch.empty(3, ROWS_AT_ONCE, vocab_size, dtype=torch.float64)
    parts: list[tuple[int, Positions]] = []

    def compare(first: int, cand_RV: LogitsArray) -> None:
        if cand_RV.shape[1] != vocab_size:
            raise DataError(f"{where}: vocabulary of {vocab_size} in the baseline, {cand_RV.shape[1]} in the candidate")
        end = min(first + len(cand_RV), num_positions)
        for start in range(first, end, ROWS_AT_ONCE):
            stop = min(start + ROWS_AT_ONCE, end)
            base_rows = torch.from_numpy(base_TV[start:stop])
            cand_rows = torch.tensor(cand_RV[start - first : stop - first])
            parts.append((start, _compare_rows(base_rows, cand_rows, next_ids_T[start:stop], scratch_3RV)))

    _run(cand, token_ids, compare)
    num_rows_T = np.zeros(num_positions, dtype=np.int64)
    for start, part in parts:
        num_rows_T[start : start + len(part.kl_T)] += 1
    _require_one_row_each(num_rows_T, f"{where}: candidate")
    positions = _join([part for _, part in sorted(parts, key=lambda each: each[0])])
    for model, values_T in (("baseline", positions.base_nll_T), ("candidate", positions.cand_nll_T)):
        _require_finite(values_T, f"{where}: {model}")
    _require_finite(positions.kl_T, f"{where}: KL")
    return positions


def _join(parts: Sequence[Positions]) -> Positions:
    return Positions(
        base_nll_T=np.concatenate([part.base_nll_T for part in parts]),
        cand_nll_T=np.concatenate([part.cand_nll_T for part in parts]),
        kl_T=np.concatenate([part.kl_T for part in parts]),
        agrees_T=np.concatenate([part.agrees_T for part in parts]),
    )


def _read_logits(model: ServedModel, token_ids: tuple[int, ...], where: str) -> LogitsArray:
    """Float32 logits [T, V] of every position that predicts a token of the window."""
    num_positions = len(token_ids) - 1
    kept: list[LogitsArray] = []
    num_rows_T = np.zeros(num_positions, dtype=np.int64)

    def keep(first: int, logits_RV: LogitsArray) -> None:
        if not kept:  # allocated once the vocabulary is known: chunks are never held twice
            kept.append(np.empty((num_positions, logits_RV.shape[1]), dtype=np.float32))
        wanted_RV = logits_RV[: max(num_positions - first, 0)]
        kept[0][first : first + len(wanted_RV)] = wanted_RV
        num_rows_T[first : first + len(wanted_RV)] += 1

    _run(model, token_ids, keep)
    _require_one_row_each(num_rows_T, where)
    return kept[0]


def _require_one_row_each(num_rows_T: npt.NDArray[np.int64], where: str) -> None:
    wrong = np.flatnonzero(num_rows_T != 1)
    if len(wrong):
        raise DataError(
            f"{where}: {len(wrong)} of {len(num_rows_T)} positions did not get one row of logits; the first, position "
            f"{wrong[0]}, got {num_rows_T[wrong[0]]}"
        )


def _run(model: ServedModel, token_ids: tuple[int, ...], sink: PromptLogitsSink) -> None:
    model.generate([token_ids], READ_ONLY_PARAMS, prompt_logits_sinks=[sink])


def _compare_rows(
    base_RV: torch.Tensor, cand_RV: torch.Tensor, next_ids_R: torch.Tensor, scratch_3RV: torch.Tensor
) -> Positions:
    """Compare float32 logits row by row in float64, in scratch space that is reused: page faults cost more than this.

    With weights w = exp(base - max base): KL = (w . base - w . cand) / sum w - (logsumexp base - logsumexp cand), which
    is exactly zero for equal logits. It is never negative, so rounding below zero is cut off; not finite stays NaN.
    """
    num_rows = len(base_RV)
    base_f64_RV, cand_f64_RV, work_RV = scratch_3RV[:, :num_rows]
    base_f64_RV.copy_(base_RV)
    cand_f64_RV.copy_(cand_RV)
    base_max_R1, cand_max_R1 = base_f64_RV.amax(-1, keepdim=True), cand_f64_RV.amax(-1, keepdim=True)
    weight_R = torch.sub(cand_f64_RV, cand_max_R1, out=work_RV).exp_().sum(-1)
    cand_lse_R = cand_max_R1.squeeze(1) + weight_R.log()
    weight_R = torch.sub(base_f64_RV, base_max_R1, out=work_RV).exp_().sum(-1)
    base_lse_R = base_max_R1.squeeze(1) + weight_R.log()
    base_mean_R, cand_mean_R = (torch.einsum("rv,rv->r", work_RV, x) / weight_R for x in (base_f64_RV, cand_f64_RV))
    kl_R = (base_mean_R - cand_mean_R) - (base_lse_R - cand_lse_R)
    next_ids_R1 = next_ids_R.unsqueeze(1)
    return Positions(
        base_nll_T=(base_lse_R - base_f64_RV.gather(1, next_ids_R1).squeeze(1)).numpy(),
        cand_nll_T=(cand_lse_R - cand_f64_RV.gather(1, next_ids_R1).squeeze(1)).numpy(),
        kl_T=kl_R.clamp(min=0).numpy(),
        agrees_T=(base_RV.argmax(-1) == cand_RV.argmax(-1)).numpy(),
    )


def _require_finite(values_T: FloatArray, where: str) -> None:
    bad = np.flatnonzero(~np.isfinite(values_T))
    if len(bad):
        raise DataError(
            f"{where}: {len(bad)} of {len(values_T)} positions have no finite value, the first at position {bad[0]}; "
            "the model's logits are NaN or infinite"
        )

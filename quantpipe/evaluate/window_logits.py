"""One window of text read by two models: their predictions compared position by position, in float64.

Shapes: T positions of the window that predict a token, R rows of one chunk, V vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from quantpipe.errors import DataError
from quantpipe.evaluate.fidelity.in_step import READ_ONLY_PARAMS, LogitsArray, RowsInStep, require_one_row_each
from quantpipe.evaluate.intervals import FloatArray
from quantpipe.evaluate.served import ServedModel

ROWS_AT_ONCE = 16  # float64 copies while comparing: 3 x 16 x 49,152 x 8 bytes = 19 MB


@dataclass(frozen=True)
class Positions:
    """Per position: both models' negative log-likelihood of the next token, KL(base || candidate), agreement."""

    base_nll_T: FloatArray
    cand_nll_T: FloatArray
    kl_T: FloatArray
    agrees_T: npt.NDArray[np.bool_]


# Positions from a first to an end, and the candidate's logits [R, V] there.
CompareRows = Callable[[int, int, torch.Tensor], Positions]


def compare_window(base: ServedModel, cand: ServedModel, window: Sequence[int], where: str) -> Positions:
    """Let both models read the window, one chunk of each in memory at a time, and compare all their predictions.

    DataError, beginning with ``where``, for logits that are not finite or not one row for each position.
    """
    token_ids = tuple(int(token_id) for token_id in window)
    base_rows, next_ids_T = RowsInStep(base, token_ids, f"{where}: baseline"), torch.tensor(token_ids[1:])
    scratch: list[torch.Tensor] = []

    def compare(start: int, stop: int, cand_RV: torch.Tensor) -> Positions:
        base_RV = torch.from_numpy(base_rows.take(stop - start))
        vocab_size = base_RV.shape[1]
        if cand_RV.shape[1] != vocab_size:
            raise DataError(f"{where}: vocabulary of {vocab_size} in the baseline, {cand_RV.shape[1]} in the candidate")
        if not scratch:
            scratch.append(torch.empty(3, ROWS_AT_ONCE, vocab_size, dtype=torch.float64))
        return _compare_rows(base_RV, cand_RV, next_ids_T[start:stop], scratch[0])

    try:
        positions = read_window(cand, token_ids, compare, where)
        base_rows.finish()
        return positions
    finally:
        base_rows.close()


def read_window(model: ServedModel, token_ids: tuple[int, ...], compare: CompareRows, where: str) -> Positions:
    """Let the candidate read a window, and compare its logits a few rows at a time as they come, in order of position.

    DataError, beginning with ``where``, for logits that are not finite or not one row for each position.
    """
    num_positions = len(token_ids) - 1
    num_rows_T = np.zeros(num_positions, dtype=np.int64)
    parts: list[Positions] = []

    def read(first: int, cand_RV: LogitsArray) -> None:
        is_in_order = first == num_rows_T.sum()
        num_rows_T[first : first + len(cand_RV)] += 1
        end = min(first + len(cand_RV), num_positions)
        for start in range(first, end if is_in_order else first, ROWS_AT_ONCE):
            stop = min(start + ROWS_AT_ONCE, end)
            parts.append(compare(start, stop, torch.tensor(cand_RV[start - first : stop - first])))

    model.generate([token_ids], READ_ONLY_PARAMS, prompt_logits_sinks=[read])
    require_one_row_each(num_rows_T, f"{where}: candidate")
    positions = _join(parts)
    for name, values_T in (("baseline", positions.base_nll_T), ("candidate", positions.cand_nll_T)):
        _require_finite(values_T, f"{where}: {name}")
    _require_finite(positions.kl_T, f"{where}: KL")
    return positions


def _join(parts: Sequence[Positions]) -> Positions:
    return Positions(
        base_nll_T=np.concatenate([part.base_nll_T for part in parts]),
        cand_nll_T=np.concatenate([part.cand_nll_T for part in parts]),
        kl_T=np.concatenate([part.kl_T for part in parts]),
        agrees_T=np.concatenate([part.agrees_T for part in parts]),
    )


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

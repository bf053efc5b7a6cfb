"""A baseline's predictions as they are stored: of each position the most likely tokens, and what is left to the others.

Full logits are never kept. KL against it takes all other tokens as one, which by the log-sum inequality can only lower
it; perplexity and top-1 agreement are exact.

Shapes: W windows, T positions of a window that predict a token, R rows of one chunk, K tokens kept, V vocabulary.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from quantpipe.disk import writing
from quantpipe.errors import DataError
from quantpipe.evaluate.fidelity.in_step import READ_ONLY_PARAMS, LogitsArray, require_one_row_each
from quantpipe.evaluate.served import ServedModel
from quantpipe.evaluate.window_logits import ROWS_AT_ONCE, Positions, read_window
from quantpipe.report import Progress, no_progress

SCHEMA = "quantpipe.reference/1"
TOP_K = 128
_PARTS = ("ids", "logprobs", "tail", "nll", "top1")


@dataclass(frozen=True)
class Reference:
    """Of every position: ids and log-probabilities of the K likeliest tokens, the log of the others' probability
    (``tail``), the negative log-likelihood of the next token, and the likeliest token."""

    ids_WTK: npt.NDArray[np.uint32]
    logprobs_WTK: npt.NDArray[np.float32]
    tail_WT: npt.NDArray[np.float64]
    nll_WT: npt.NDArray[np.float64]
    top1_WT: npt.NDArray[np.uint32]
    vocab_size: int
    windows_digest: str

    @property
    def top_k(self) -> int:
        """How many tokens of each position are kept."""
        return int(self.ids_WTK.shape[-1])

    @property
    def mean_tail(self) -> float:
        """The probability that the baseline gives to tokens that are not kept, on average."""
        return float(np.exp(self.tail_WT).mean())

    @property
    def token_bytes(self) -> float:
        """Bytes stored for each position."""
        tensors = self.tensors().values()
        return sum(each.nbytes for each in tensors) / self.nll_WT.size

    def tensors(self) -> dict[str, npt.NDArray[np.generic]]:
        """What is stored, by name; ids in two bytes where the vocabulary fits."""
        id_dtype = np.uint16 if self.vocab_size <= 1 << 16 else np.uint32
        parts = (self.ids_WTK.astype(id_dtype), self.logprobs_WTK, self.tail_WT, self.nll_WT, self.top1_WT)
        return dict(zip(_PARTS, parts, strict=True))

    def check_windows(self, windows: Sequence[Sequence[int]]) -> None:
        """DataError where it was made of other windows."""
        if windows_digest(windows) != self.windows_digest:
            raise DataError("divergence: the stored baseline is of other windows of text; make it again")


def windows_digest(windows: Sequence[Sequence[int]]) -> str:
    """SHA-256 of the token ids of windows."""
    content = json.dumps([[int(token_id) for token_id in window] for window in windows])
    return hashlib.sha256(content.encode()).hexdigest()


def make_reference(
    model: ServedModel, windows: Sequence[Sequence[int]], top_k: int = TOP_K, progress: Progress = no_progress
) -> Reference:
    """Let the baseline read windows of one length. DataError for logits that are not finite or not all there."""
    parts = [
        _read(model, tuple(map(int, window)), top_k, f"window {index}: baseline")
        for index, window in progress(enumerate(windows), total=len(windows), label="baseline windows")
    ]
    ids, logprobs, tail, nll, top1 = (np.stack([part[n] for part in parts]) for n in range(len(_PARTS)))
    vocab_size = parts[0][len(_PARTS)]
    return Reference(
        ids.astype(np.uint32), logprobs, tail, nll, top1.astype(np.uint32), int(vocab_size), windows_digest(windows)
    )


def compare_with_reference(
    reference: Reference, index: int, cand: ServedModel, window: Sequence[int], where: str
) -> Positions:
    """Let the candidate read the ``index``-th window, and compare it with what is stored.

    DataError, beginning with ``where``, for logits that are not finite or not one row for each position.
    """
    next_ids_T = torch.tensor([int(token_id) for token_id in window[1:]])

    def compare(start: int, stop: int, cand_RV: torch.Tensor) -> Positions:
        if cand_RV.shape[1] != reference.vocab_size:
            sizes = f"{reference.vocab_size} in the baseline, {cand_RV.shape[1]} in the candidate"
            raise DataError(f"{where}: vocabulary of {sizes}")
        return _compare_rows(reference, index, slice(start, stop), cand_RV.double(), next_ids_T[start:stop])

    return read_window(cand, tuple(map(int, window)), compare, where)


def save_reference(reference: Reference, path: Path) -> None:
    """Write it, whole or not at all. DataError where the disk refuses."""
    metadata = {
        "schema": SCHEMA,
        "vocab_size": str(reference.vocab_size),
        "windows_digest": reference.windows_digest,
    }
    partial = path.with_name(f".{path.name}.partial")
    with writing(path.parent, "run it again"):
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file(reference.tensors(), partial, metadata)
        partial.replace(path)


def load_reference(path: Path) -> Reference | None:
    """The reference stored there; None where there is none, or none that can be read: it is made again."""
    try:
        with safe_open(path, "numpy") as file:
            metadata = file.metadata() or {}
            if metadata.get("schema") != SCHEMA:
                return None
            ids, logprobs, tail, nll, top1 = (file.get_tensor(name) for name in _PARTS)
        return Reference(
            ids.astype(np.uint32), logprobs, tail, nll, top1, int(metadata["vocab_size"]), metadata["windows_digest"]
        )
    except (OSError, SafetensorError, KeyError, ValueError):
        return None


_Kept = tuple[npt.NDArray[np.generic], ...]


def _read(
    model: ServedModel, token_ids: tuple[int, ...], top_k: int, where: str
) -> tuple[npt.NDArray[np.generic] | int, ...]:
    num_positions = len(token_ids) - 1
    next_ids_T, num_rows_T = torch.tensor(token_ids[1:]), np.zeros(num_positions, dtype=np.int64)
    rows: list[tuple[int, _Kept]] = []
    vocab_sizes: set[int] = set()

    def keep(first: int, logits_RV: LogitsArray) -> None:
        vocab_sizes.add(logits_RV.shape[1])
        num_rows_T[first : first + len(logits_RV)] += 1
        end = min(first + len(logits_RV), num_positions)
        for start in range(first, end, ROWS_AT_ONCE):
            stop = min(start + ROWS_AT_ONCE, end)
            chosen_RV = torch.tensor(logits_RV[start - first : stop - first])
            rows.append((start, _keep_rows(chosen_RV, next_ids_T[start:stop], top_k)))

    model.generate([token_ids], READ_ONLY_PARAMS, prompt_logits_sinks=[keep])
    require_one_row_each(num_rows_T, where)
    kept = [each for _, each in sorted(rows, key=lambda row: row[0])]
    joined = tuple(np.concatenate([each[n] for each in kept]) for n in range(len(_PARTS)))
    bad = np.flatnonzero(~np.isfinite(joined[_PARTS.index("nll")]))
    if len(bad):
        raise DataError(f"{where}: {len(bad)} of {num_positions} positions have no finite value, the first at {bad[0]}")
    return (*joined, vocab_sizes.pop())


def _keep_rows(logits_RV: torch.Tensor, next_ids_R: torch.Tensor, top_k: int) -> _Kept:
    logprobs_RV = logits_RV.double().log_softmax(-1)
    kept = logprobs_RV.topk(min(top_k, logits_RV.shape[1]), dim=-1)
    return (
        kept.indices.numpy(),
        kept.values.float().numpy(),
        _log_mass_of_others(logprobs_RV, kept.indices).numpy(),
        -logprobs_RV.gather(1, next_ids_R.unsqueeze(1)).squeeze(1).numpy(),
        logits_RV.argmax(-1).numpy(),
    )


def _compare_rows(
    reference: Reference, index: int, rows: slice, cand_RV: torch.Tensor, next_ids_R: torch.Tensor
) -> Positions:
    """KL of the kept tokens and of all others as one, in float64; rounding below zero is cut off, NaN stays."""
    ids_RK = torch.from_numpy(reference.ids_WTK[index, rows].astype(np.int64))
    base_RK = torch.from_numpy(reference.logprobs_WTK[index, rows]).double()
    tail_R = torch.from_numpy(reference.tail_WT[index, rows])
    logprobs_RV = cand_RV.log_softmax(-1)
    kl_R = (base_RK.exp() * (base_RK - logprobs_RV.gather(1, ids_RK))).sum(-1)
    cand_tail_R = _log_mass_of_others(logprobs_RV, ids_RK)
    kl_R = kl_R + torch.where(tail_R.isinf(), 0.0, tail_R.exp() * (tail_R - cand_tail_R))
    nll_R = -logprobs_RV.gather(1, next_ids_R.unsqueeze(1)).squeeze(1)
    return Positions(
        base_nll_T=reference.nll_WT[index, rows],
        cand_nll_T=nll_R.numpy(),
        kl_T=kl_R.clamp(min=0).numpy(),
        agrees_T=cand_RV.argmax(-1).numpy() == reference.top1_WT[index, rows],
    )


def _log_mass_of_others(logprobs_RV: torch.Tensor, ids_RK: torch.Tensor) -> torch.Tensor:
    """Log of the probability of every token but these; -inf where there are no others."""
    return logprobs_RV.scatter(1, ids_RK, -torch.inf).logsumexp(-1)

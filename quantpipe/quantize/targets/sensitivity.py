"""How much each set of linears costs when it alone is quantized: measured in KL divergence, not guessed from weights.

Errors of a layer's output are a poor guide to what the model loses, so every set is rounded in turn and the logits are
compared. All of it happens in one pass over the blocks: a set's variant of the hidden states is born at its block, and
from there on the block that is loaded anyway also carries every older variant one step further. Memory holds one block
and one variant; the others wait in files. Measures the model as it is stored: what transforms do to it is not seen.

Shapes: S sequences, L tokens per sequence, D hidden size, T tokens, V vocabulary, N out_features, K in_features.
"""

import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from math import isfinite
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from quantpipe.disk import GO_ON, writing
from quantpipe.errors import DataError
from quantpipe.formats.scheme import WeightScheme
from quantpipe.quantize.model.loading import StreamedModel
from quantpipe.quantize.targets.allocate import LinearSet, joined
from quantpipe.quantize.targets.linear_sets import (
    computing_with,
    expert_names,
    linear_set,
    named_linears,
    reading,
    round_set,
    sets_of,
)
from quantpipe.report import Progress

# Many short stretches show more of the data than one long one, and keep the logits of a sequence small.
TOKENS_PER_SEQUENCE = 128


@dataclass(frozen=True)
class _BlockCall:
    """How the model called a block. The hidden states come first or by name."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def hidden_SLD(self) -> Tensor:
        hidden_SLD: Tensor = self.args[0] if self.args else self.kwargs["hidden_states"]
        return hidden_SLD

    def run(self, block: nn.Module, hidden_SLD: Tensor) -> Any:
        """What ``block`` gives out when called like this on other hidden states."""
        if self.args:
            return block(hidden_SLD, *self.args[1:], **self.kwargs)
        return block(**self.kwargs | {"hidden_states": hidden_SLD})


@dataclass(frozen=True)
class _Variant:
    """One set, and the file of the hidden states [S, L, D] that the model has with only that set rounded."""

    rounded: LinearSet
    path: Path

    def load(self, number: int | None = None) -> Tensor:
        """All sequences, or only sequence ``number`` [1, L, D]."""
        rows = slice(None) if number is None else slice(number, number + 1)
        return torch.from_numpy(np.load(self.path, mmap_mode="r")[rows].copy())

    def keep(self, hidden_SLD: Tensor) -> None:
        with writing(self.path, GO_ON):
            np.save(self.path, hidden_SLD.numpy())


def sample_tokens(token_ids_SL: npt.NDArray[np.int64], num_tokens: int) -> npt.NDArray[np.int64]:
    """About ``num_tokens`` of a calibration set: the beginnings of sequences that are evenly spread over it."""
    length = min(TOKENS_PER_SEQUENCE, num_tokens, token_ids_SL.shape[1])
    num_sequences = min(len(token_ids_SL), -(-num_tokens // length))
    rows = np.linspace(0, len(token_ids_SL) - 1, num_sequences).round().astype(np.int64)
    return token_ids_SL[rows, :length]


@torch.no_grad()
def measure_sensitivity(
    model: StreamedModel,
    schemes: Mapping[str, WeightScheme],
    token_ids_SL: npt.NDArray[np.int64],
    work_folder: Path,
    progress: Progress,
    position_ids_SL: npt.NDArray[np.int64] | None = None,
) -> list[LinearSet]:
    """Each set of the linears in ``schemes`` (full names), with the KL [nats/token] that quantizing it alone costs.

    Sets are the linears of a block that read the same tensor, and all experts of the model, which readers load by one
    scheme (their KL is summed over layers). A linear outside the blocks is a set of its own. Weights are rounded with
    scales weighted by how strongly the tokens use each input. ``position_ids_SL`` start anew at each document; None:
    every sequence is one. Results are in model order. Temporary files go into ``work_folder``. Raises DataError where
    a set has more than one scheme, or leads to logits that are not finite.
    """
    num_blocks = len(model.blocks.blocks)
    input_ids_SL = torch.from_numpy(token_ids_SL)
    positions = {} if position_ids_SL is None else {"position_ids": torch.from_numpy(position_ids_SL)}
    with _empty_folder(work_folder / "sensitivity") as folder:
        carrier = _Carrier(model, schemes, folder, progress(range(num_blocks), num_blocks, "blocks measured"))
        with model.replaced([partial(carrier.run, index) for index in range(num_blocks)]):
            model.module(input_ids=input_ids_SL, use_cache=False, **positions)
        next(carrier.steps, None)
        tail = _Tail(model, carrier.output, input_ids_SL)
        total = _summed_divergences(tail, carrier.variants, progress)
        sets = [variant.rounded for variant in carrier.variants]
    for name in schemes:
        if not name.startswith(f"{model.blocks.path}."):
            outside, summed = _measure_outside(tail, name, schemes)
            sets.append(outside)
            total.append(summed)
    for part, summed in zip(sets, total, strict=True):
        if not isfinite(summed):
            name = next(iter(part.shapes))
            raise DataError(f"{name}: rounding it makes the logits NaN or infinite; check the base model's weights")
    measured = [
        replace(part, kl=max(0.0, summed / token_ids_SL.size)) for part, summed in zip(sets, total, strict=True)
    ]
    return joined(measured, carrier.experts)


class _Carrier:
    """Runs in place of each block: brings every variant one block further, and begins those of the block's own sets."""

    def __init__(
        self, model: StreamedModel, schemes: Mapping[str, WeightScheme], folder: Path, steps: Iterator[int]
    ) -> None:
        self.model, self.schemes, self.folder, self.steps = model, schemes, folder, steps
        self.variants: list[_Variant] = []
        self.experts: set[str] = set()
        self.output: Any = None  # of the block that ran last

    def run(self, index: int, *args: Any, **kwargs: Any) -> Any:
        """What block ``index`` of the unchanged model gives out."""
        next(self.steps)
        call = _BlockCall(args, kwargs)
        path = self.model.blocks.name(index)
        block = self.model.load_block(index)
        linears = named_linears(block, path, self.schemes)
        dtypes = {name: linear.weight.dtype for name, linear in linears.items()}
        block.float()
        with reading(linears) as seen:
            self.output = call.run(block, call.hidden_SLD)
        for variant in self.variants:
            variant.keep(_hidden(call.run(block, variant.load())))
        self.experts |= expert_names(block, path)
        for names in sets_of(linears, seen, self.experts):
            members = {name: linears[name] for name in names}
            variant = _Variant(linear_set(members, self.schemes, dtypes), self.folder / f"{len(self.variants)}.npy")
            with computing_with(members, round_set(members, variant.rounded, seen), variant.rounded.scheme):
                variant.keep(_hidden(call.run(block, call.hidden_SLD)))
            self.variants.append(variant)
        return self.output


class _Tail:
    """What follows the last block, run by the model itself with blocks that hand given hidden states through.

    One sequence at a time: the logits of all may not fit in memory.
    """

    def __init__(self, model: StreamedModel, output: Any, input_ids_SL: Tensor) -> None:
        self.model, self.input_ids_SL = model, input_ids_SL
        self.base_SLD = _hidden(output)
        self._rest = output[1:] if isinstance(output, tuple) else None

    def log_probabilities(self, number: int, hidden_SLD: Tensor) -> Tensor:
        """log p [L, V] of the next token in sequence ``number``, for what the last block gives out [1, L, D]."""

        def hand_through(*_args: Any, **_kwargs: Any) -> Any:
            return hidden_SLD if self._rest is None else (hidden_SLD, *self._rest)

        with self.model.replaced([hand_through] * len(self.model.blocks.blocks)):
            output = self.model.module(input_ids=self.input_ids_SL[number : number + 1], use_cache=False)
        logits_LV: Tensor = output.logits[0].float()
        return logits_LV.log_softmax(-1)

    def base_log_probabilities(self, number: int) -> Tensor:
        return self.log_probabilities(number, self.base_SLD[number : number + 1])


def _summed_divergences(tail: _Tail, variants: Sequence[_Variant], progress: Progress) -> list[float]:
    """For each variant its KL from the unchanged model, summed over all tokens."""
    total = [0.0] * len(variants)
    num_sequences = len(tail.input_ids_SL)
    for number in progress(range(num_sequences), num_sequences, "sequences compared"):
        base_LV = tail.base_log_probabilities(number)
        for index, variant in enumerate(variants):
            total[index] += _summed_kl(base_LV, tail.log_probabilities(number, variant.load(number)))
    return total


def _measure_outside(tail: _Tail, name: str, schemes: Mapping[str, WeightScheme]) -> tuple[LinearSet, float]:
    """A linear outside the blocks as a set of its own, and its KL summed over all tokens."""
    linears = named_linears(tail.model.module, "", [name])
    numbers = range(len(tail.input_ids_SL))
    with reading(linears) as seen:
        for number in numbers:
            tail.base_log_probabilities(number)
    rounded = linear_set(linears, schemes, {name: tail.model.dtype_of(f"{name}.weight")})
    weights = round_set(linears, rounded, seen)
    summed = 0.0
    for number in numbers:
        base_LV = tail.base_log_probabilities(number)
        with computing_with(linears, weights, rounded.scheme):
            summed += _summed_kl(base_LV, tail.base_log_probabilities(number))
    return rounded, summed


def _summed_kl(base_LV: Tensor, found_LV: Tensor) -> float:
    """KL(base || found) summed over tokens, from log probabilities."""
    kl_L = nn.functional.kl_div(found_LV, base_LV, reduction="none", log_target=True).sum(1)
    return float(kl_L.double().sum())


@contextmanager
def _empty_folder(folder: Path) -> Iterator[Path]:
    """A folder without what a killed run may have left in it; gone afterwards."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


def _hidden(output: Any) -> Tensor:
    """The hidden states among what a block gives out."""
    hidden_SLD: Tensor = output[0] if isinstance(output, tuple) else output
    return hidden_SLD

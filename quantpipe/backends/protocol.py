"""What a backend must offer, and the batch it is given. Knows no scheduler, request or sampling rule.

Shapes: T tokens of this step over all sequences, S sequences, B KV blocks, R rows whose logits are wanted,
V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

import torch
from torch import Tensor

from quantpipe.models.description import DecoderDescription

# How activations are held under weight-only integers. Kernels without a choice take them as they are.
Activations = Literal["int8", "int16", "float32"]
ACTIVATION_BITS: dict[Activations, int] = {"int8": 8, "int16": 16, "float32": 32}


@dataclass(frozen=True)
class BatchInput:
    """One step, phase-free: sequence s advances by ``query_lens[s]`` tokens (1 is a decode, more is a prefill chunk).

    ``token_ids_T``, ``positions_T`` and ``slot_mapping_T`` (block_id * block_size + offset: where each token's key and
    value go) are int64 and concatenate the sequences in order. ``context_lens[s]`` counts the tokens of sequence s
    including this step's. ``block_table_SB`` is int64, padded with 0 beyond a sequence's blocks. ``logit_rows_R`` are
    the rows of T whose logits are wanted, ascending.

    **Windows and sinks.** With w = ``layer_window`` of a layer (None: no bound) and s = ``num_sinks``, the query at
    position p sees the keys at positions j <= p with j > p - w or j < s: never more than s + w of them. Sinks are there
    only together with ``window``. They are seen from where they stand in the cache (Xiao et al. 2023, "Efficient
    Streaming Language Models with Attention Sinks", section 3.2): the query whose score with a sink (j < s) is wanted
    is turned as at position min(p, s + w - 1), right behind a window that begins where the sinks end. All else is
    turned by its own position: keys as they are cached, sinks included, and queries for keys that are not sinks.
    Positions may exceed any length the model knows: angles are to be computed so that their differences stay exact.

    **Dropped blocks.** Blocks that no later query can see are taken away: ``dropped_blocks[s]`` of sequence s, those
    that follow its ceil(num_sinks / block_size) sink blocks; () means none of any sequence. So the block of position p
    is at index p // block_size of the table where that is a sink block, else at p // block_size - dropped_blocks[s];
    the table lists ``held_lens`` tokens, and the others are as if they had never been. A sequence that was preempted
    may come back with tokens missing that its next ones should see: what is not held is not seen, and nothing wanted
    depends on it. The rest of a last sink block is held like any other token, and seen while the window reaches it.
    """

    token_ids_T: Tensor
    positions_T: Tensor
    slot_mapping_T: Tensor
    query_lens: tuple[int, ...]
    context_lens: tuple[int, ...]
    block_table_SB: Tensor
    logit_rows_R: Tensor
    num_sinks: int = 0
    window: int | None = None
    dropped_blocks: tuple[int, ...] = ()

    def layer_window(self, own: int | None) -> int | None:
        """How many tokens a query sees, itself included and sinks not, in a layer whose own window is ``own``."""
        return min((window for window in (own, self.window) if window is not None), default=None)

    def held_lens(self, block_size: int) -> tuple[int, ...]:
        """How many tokens of each sequence its blocks hold, this step's included."""
        if not self.dropped_blocks:
            return self.context_lens
        pairs = zip(self.context_lens, self.dropped_blocks, strict=True)
        return tuple(context_len - dropped * block_size for context_len, dropped in pairs)

    def sink_positions_T(self, window: int | None) -> Tensor | None:
        """The positions at which queries are turned to meet the sinks; None where those are their own."""
        if window is None or self.num_sinks == 0 or max(self.context_lens) <= self.num_sinks + window:
            return None
        return self.positions_T.clamp(max=self.num_sinks + window - 1)


@dataclass(frozen=True)
class DecodeLimits:
    """The steps in which sequences decode that an engine may ever ask for, one new token of each sequence.

    ``max_blocks`` are those of one sequence's block table; ``num_sinks`` and ``window`` as in ``BatchInput``.
    """

    max_num_seqs: int
    max_blocks: int
    num_sinks: int = 0
    window: int | None = None


class KVCache(Protocol):
    """Paged key and value storage of one engine, in a layout private to its backend."""

    @property
    def num_blocks(self) -> int: ...

    @property
    def block_size(self) -> int: ...

    @property
    def dtype(self) -> str: ...

    @property
    def num_bytes(self) -> int: ...

    @property
    def notes(self) -> tuple[str, ...]:
        """One line for each choice that makes this cache slower than it could be."""
        ...

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks, (source, destination) each, in every layer.

        All sources are read as they were before the call; no destination occurs twice.
        """
        ...


class Executor(Protocol):
    """A loaded model, ready to execute batches."""

    @property
    def description(self) -> DecoderDescription: ...

    @property
    def device(self) -> torch.device:
        """Where weights and KV blocks lie."""
        ...

    @property
    def weight_bytes(self) -> int: ...

    @property
    def notes(self) -> tuple[str, ...]:
        """One line for each choice a user should know, such as a slower path taken because the CPU lacks VNNI."""
        ...

    @property
    def supports_windows(self) -> bool:
        """Whether batches may ask for windows and sinks of their own, and lack dropped blocks."""
        ...

    @property
    def context_tokens(self) -> tuple[int, int]:
        """How many tokens attention has looked back on since loading: those wanted, and those read with padding."""
        ...

    def allocate_kv_cache(self, num_blocks: int, block_size: int, dtype: str) -> KVCache:
        """An empty cache in a mode of ``KV_MODES``. ArtifactError where it needs scales that the folder lacks."""
        ...

    def kv_bytes_per_block(self, block_size: int, dtype: str) -> int: ...

    def record_decodes(self, kv_cache: KVCache, limits: DecodeLimits) -> None:
        """Get ready to run decode steps over ``kv_cache`` faster, at the cost of time and memory now.

        Tokens stay what they are. A backend that launches nothing one by one has nothing to do.
        """
        ...

    def forward(self, batch: BatchInput, kv_cache: KVCache) -> Tensor:
        """Write this step's keys and values, and return float32 logits [R, V] of ``batch.logit_rows_R``."""
        ...

    def forward_greedy(self, batch: BatchInput, kv_cache: KVCache) -> Tensor:
        """The same, but of each row only its most likely token [R], an integer on any device.

        The lowest id of those equally likely; -1 for a row without a largest logit that is finite.
        """
        ...

    @property
    def step_times_s(self) -> dict[str, float]:
        """Seconds since loading, by part of the step; empty where they are not measured."""
        ...


class Backend(Protocol):
    """One row of the backends table."""

    @property
    def name(self) -> str: ...

    def load(
        self,
        folder: Path,
        activation_divisor: float,
        num_threads: int | None,
        activations: Activations = "int16",
        memory_utilization: float | None = None,
    ) -> Executor:
        """Load a model folder, ordinary or quantized. ArtifactError if damaged, RecipeError or DataError if unable.

        On a GPU the weights may take no more than ``memory_utilization`` of what is free: that is counted beforehand.
        """
        ...

    def check(self, description: DecoderDescription | None = None) -> None:
        """Raise RecipeError where ``load`` would refuse this machine, or a decoder of these sizes. Loads nothing."""
        ...

"""What a backend must offer, and the batch it is given. Knows no scheduler, request or sampling rule.

Shapes: T tokens of this step over all sequences, S sequences, B KV blocks, R rows whose logits are wanted,
V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from quantpipe.models.description import DecoderDescription


@dataclass(frozen=True)
class BatchInput:
    """One step, phase-free: sequence s advances by ``query_lens[s]`` tokens (1 is a decode, more is a prefill chunk).

    ``token_ids_T``, ``positions_T`` and ``slot_mapping_T`` (block_id * block_size + offset: where each token's key and
    value go) are int64 and concatenate the sequences in order. ``context_lens[s]`` counts the tokens of sequence s
    including this step's. ``block_table_SB`` is int64, padded with 0 beyond a sequence's blocks. ``logit_rows_R`` are
    the rows of T whose logits are wanted, ascending.
    """

    token_ids_T: Tensor
    positions_T: Tensor
    slot_mapping_T: Tensor
    query_lens: tuple[int, ...]
    context_lens: tuple[int, ...]
    block_table_SB: Tensor
    logit_rows_R: Tensor


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
    def context_tokens(self) -> tuple[int, int]:
        """How many tokens attention has looked back on since loading: those wanted, and those read with padding."""
        ...

    def allocate_kv_cache(self, num_blocks: int, block_size: int, dtype: str) -> KVCache:
        """An empty cache in a mode of ``KV_MODES``. ArtifactError where it needs scales that the folder lacks."""
        ...

    def kv_bytes_per_block(self, block_size: int, dtype: str) -> int: ...

    def forward(self, batch: BatchInput, kv_cache: KVCache) -> Tensor:
        """Write this step's keys and values, and return float32 logits [R, V] of ``batch.logit_rows_R``."""
        ...


class Backend(Protocol):
    """One row of the backends table."""

    @property
    def name(self) -> str: ...

    def load(self, folder: Path, activation_divisor: float, num_threads: int | None) -> Executor:
        """Load a model folder, ordinary or quantized. ArtifactError if damaged, QuantpipeError if unable."""
        ...

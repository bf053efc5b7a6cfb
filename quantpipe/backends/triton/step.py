"""A step as the device reads it: every number of the batch in one copy, decodes and chunks apart.

Shapes: T tokens of the step, R rows whose logits are wanted, S sequences (that decode, or that read a chunk), B KV
blocks of the longest table, X tiles of chunks.
"""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from quantpipe.backends.protocol import BatchInput
from quantpipe.backends.triton.ops.attention_chunk import Chunks
from quantpipe.backends.triton.ops.attention_decode import Decodes
from quantpipe.backends.triton.ops.attention_tile import FAR


class StepTensors(NamedTuple):
    """Tensors on the device, int64, and what of the batch is the same in every step of an engine.

    Which kernels run, and over how many programs, depends on shapes alone: a step of the same shapes may be replayed
    with other numbers in the same memory. A token whose slot is below 0, and a sequence that holds 0 tokens, fill up.
    """

    token_ids_T: Tensor
    positions_T: Tensor
    slots_T: Tensor
    logit_rows_R: Tensor
    decodes: Decodes | None
    chunks: Chunks | None
    num_sinks: int
    window: int | None

    def layer_window(self, own: int | None) -> int | None:
        """How many tokens a query sees, itself included and sinks not, in a layer whose own window is ``own``."""
        return min((window for window in (own, self.window) if window is not None), default=None)


def to_device(batch: BatchInput, block_size: int, tile_len: int, device: torch.device) -> StepTensors:
    """The tensors of a batch. A tile of a chunk holds ``tile_len`` tokens (``attention_chunk.tokens_per_tile``)."""
    held_lens, num_seqs = batch.held_lens(block_size), len(batch.query_lens)
    starts = list(itertools.accumulate(batch.query_lens, initial=0))[:-1]
    shifts = [min(dropped * block_size, FAR) for dropped in batch.dropped_blocks or (0,) * num_seqs]
    decoding = [s for s in range(num_seqs) if batch.query_lens[s] == 1]
    reading = [s for s in range(num_seqs) if batch.query_lens[s] > 1]

    def of(numbers: Sequence[int], seqs: list[int]) -> Tensor:
        return torch.tensor([numbers[s] for s in seqs], dtype=torch.int64)

    def table_of(seqs: list[int]) -> Tensor:
        return batch.block_table_SB if len(seqs) == num_seqs else batch.block_table_SB[seqs]

    parts = [batch.token_ids_T, batch.positions_T, batch.slot_mapping_T, batch.logit_rows_R]
    if decoding:
        parts += [of(starts, decoding), of(held_lens, decoding), of(shifts, decoding), table_of(decoding)]
    if reading:
        query_lens = [batch.query_lens[s] for s in reading]
        parts += [of(starts, reading), torch.tensor(query_lens), of(held_lens, reading), of(shifts, reading)]
        parts += [table_of(reading), *_tiles(query_lens, tile_len)]
    uploaded = _upload(parts, device)
    num_flat, num_decode = 4, len(Decodes._fields) if decoding else 0
    token_ids_T, positions_T, slots_T, logit_rows_R = uploaded[:num_flat]
    return StepTensors(
        token_ids_T,
        positions_T,
        slots_T,
        logit_rows_R,
        decodes=Decodes(*uploaded[num_flat : num_flat + num_decode]) if decoding else None,
        chunks=Chunks(*uploaded[num_flat + num_decode :]) if reading else None,
        num_sinks=batch.num_sinks,
        window=batch.window,
    )


def _tiles(query_lens: list[int], tile_len: int) -> tuple[Tensor, Tensor]:
    """Sequence and first token of each tile [X], int64."""
    tiles = [(s, first) for s, query_len in enumerate(query_lens) for first in range(0, query_len, tile_len)]
    tile_seq_X, tile_first_X = torch.tensor(tiles, dtype=torch.int64).unbind(1)
    return tile_seq_X, tile_first_X


def _upload(parts: list[Tensor], device: torch.device) -> list[Tensor]:
    """The same int64 tensors on the device, in one copy. Each begins at 16 bytes, as wide loads need it."""
    sizes = [part.numel() + part.numel() % 2 for part in parts]
    staged = torch.zeros(sum(sizes), dtype=torch.int64, pin_memory=device.type == "cuda")
    for part, piece in zip(parts, torch.split(staged, sizes), strict=True):
        piece[: part.numel()] = part.flatten()
    pieces = torch.split(staged.to(device, non_blocking=True), sizes)
    return [piece[: part.numel()].view(part.shape) for part, piece in zip(parts, pieces, strict=True)]


def to_host(logits_RV: Tensor) -> Tensor:
    """The same in float32 on the host, in memory that the device writes to directly; waits until they are there."""
    if logits_RV.device.type != "cuda":
        return logits_RV.float().clone()
    on_host_RV = torch.empty(logits_RV.shape, dtype=torch.float32, pin_memory=True)
    on_host_RV.copy_(logits_RV.float(), non_blocking=True)
    torch.cuda.current_stream(logits_RV.device).synchronize()
    return on_host_RV

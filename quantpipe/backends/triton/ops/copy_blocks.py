"""Copies whole KV blocks of every layer at once.

Shapes: L layers, B blocks, I block ids of one side, w words of a block.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from quantpipe.backends.triton import launch_table


def copy_blocks(pool: Tensor, copies: Sequence[tuple[int, int]]) -> None:
    """Give destination blocks what the sources held before the call; ``pool`` is [L, B, ...], contiguous.

    No destination occurs twice. Where one is a source as well, the sources pass through memory of their own.
    """
    if not copies:
        return
    words_LBw = _as_words(pool)
    # From pinned memory, so that the host does not wait until what was launched before is done.
    ids_I2 = torch.tensor(copies, dtype=torch.int64, pin_memory=pool.is_cuda).to(pool.device, non_blocking=True)
    sources_I, destinations_I = ids_I2.unbind(1)
    sources_I, destinations_I = sources_I.contiguous(), destinations_I.contiguous()
    if {source for source, _ in copies}.isdisjoint(destination for _, destination in copies):
        _copy(words_LBw, words_LBw, sources_I, destinations_I)
        return
    held_LIw = torch.empty(pool.shape[0], len(copies), words_LBw.shape[-1], dtype=words_LBw.dtype, device=pool.device)
    places_I = torch.arange(len(copies), device=pool.device)
    _copy(words_LBw, held_LIw, sources_I, places_I)
    _copy(held_LIw, words_LBw, places_I, destinations_I)


def _as_words(pool: Tensor) -> Tensor:
    """The pool's memory [L, B, w] in the widest words of which a block has a whole number."""
    bytes_LBb = pool.view(torch.uint8).flatten(2) if pool.dtype != torch.uint8 else pool.flatten(2)
    for dtype in (torch.int64, torch.int32, torch.int16):
        if bytes_LBb.shape[-1] % dtype.itemsize == 0:
            return bytes_LBb.view(dtype)
    return bytes_LBb


def _copy(source_LBw: Tensor, target_LBw: Tensor, sources_I: Tensor, targets_I: Tensor) -> None:
    num_words = source_LBw.shape[-1]
    grid = (len(sources_I), source_LBw.shape[0], triton.cdiv(num_words, launch_table.COPY_WORDS))
    copy_blocks_kernel[grid](
        source_LBw,
        target_LBw,
        sources_I,
        targets_I,
        source_LBw.stride(0),
        target_LBw.stride(0),
        num_words,
        WORDS=launch_table.COPY_WORDS,
        num_warps=4,
    )


@triton.jit
def copy_blocks_kernel(
    source_ptr, target_ptr, sources_ptr, targets_ptr, source_stride, target_stride, num_words, WORDS: tl.constexpr
):
    """Program (i, l, c): the c-th part of copy i in layer l."""
    index, layer = tl.program_id(0), tl.program_id(1).to(tl.int64)
    words_w = tl.program_id(2) * WORDS + tl.arange(0, WORDS)
    source = layer * source_stride + tl.load(sources_ptr + index) * num_words
    target = layer * target_stride + tl.load(targets_ptr + index) * num_words
    values_w = tl.load(source_ptr + source + words_w, mask=words_w < num_words)
    tl.store(target_ptr + target + words_w, values_w, mask=words_w < num_words)

"""Chooses tokens among logits on the GPU: the most likely of each row, by the rule of ``Executor.forward_greedy``.

Shapes: R rows, V vocabulary, P parts of a row, v logits of one part.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from quantpipe.backends.triton import launch_table

# Above every token id.
_NO_ID = tl.constexpr(2147483647)


def most_likely(logits_RV: Tensor) -> Tensor:
    """The lowest id of the largest logits of each row [R], int64; -1 where the largest is not finite or one is NaN."""
    num_rows, vocab_size = logits_RV.shape
    token_ids_R = torch.empty(num_rows, dtype=torch.int64, device=logits_RV.device)
    if num_rows == 0:
        return token_ids_R
    num_parts = triton.cdiv(vocab_size, launch_table.GREEDY_LOGITS)
    largest_RP = torch.empty(num_rows, num_parts, dtype=torch.float32, device=logits_RV.device)
    ids_RP = torch.empty(num_rows, num_parts, dtype=torch.int32, device=logits_RV.device)
    largest_of_part_kernel[(num_rows, num_parts)](
        logits_RV,
        largest_RP,
        ids_RP,
        logits_RV.stride(0),
        vocab_size,
        PART=launch_table.GREEDY_LOGITS,
        num_warps=8,
    )
    most_likely_kernel[(num_rows,)](
        largest_RP, ids_RP, token_ids_R, num_parts, PARTS=triton.next_power_of_2(num_parts), num_warps=1
    )
    return token_ids_R


@triton.jit
def largest_of_part_kernel(logits_ptr, largest_ptr, ids_ptr, row_stride, vocab_size, PART: tl.constexpr):
    """Program (r, p): the largest of one part of a row and where it stands; what is NaN counts as infinite."""
    row, part = tl.program_id(0), tl.program_id(1)
    ids_v = part * PART + tl.arange(0, PART)
    logits_ptrs_v = logits_ptr + row.to(tl.int64) * row_stride + ids_v
    logits_v = tl.load(logits_ptrs_v, mask=ids_v < vocab_size, other=-float("inf")).to(tl.float32)
    logits_v = tl.where(logits_v != logits_v, float("inf"), logits_v)
    largest = tl.max(logits_v, 0)
    place = row * tl.num_programs(1) + part
    tl.store(largest_ptr + place, largest)
    tl.store(ids_ptr + place, tl.min(tl.where(logits_v == largest, ids_v, _NO_ID), 0))


@triton.jit
def most_likely_kernel(largest_ptr, ids_ptr, token_ids_ptr, num_parts, PARTS: tl.constexpr):
    """Program r: the lowest id among the parts of a row that hold its largest logit."""
    row = tl.program_id(0)
    parts_P = tl.arange(0, PARTS)
    in_P = parts_P < num_parts
    largest_P = tl.load(largest_ptr + row * num_parts + parts_P, mask=in_P, other=-float("inf"))
    ids_P = tl.load(ids_ptr + row * num_parts + parts_P, mask=in_P, other=_NO_ID)
    largest = tl.max(largest_P, 0)
    best = tl.min(tl.where(largest_P == largest, ids_P, _NO_ID), 0)
    is_finite = tl.abs(largest) < float("inf")
    tl.store(token_ids_ptr + row, tl.where(is_finite, best, -1).to(tl.int64))

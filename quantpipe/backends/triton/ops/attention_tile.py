"""What the attention kernels share: a tile of queries attends to a run of what is held of one sequence.

A sequence is seen by the index of its tokens in its block table, not by position: where blocks were dropped, all tokens
behind the sink blocks stand ``shift`` indices lower than their positions. Queries stand there too, always.

Softmax is kept running (Dao et al. 2022, "FlashAttention", algorithm 1), in powers of two.

Shapes: M queries (a token and a head each, all heads of one KV head), N tokens of the cache, C dimensions of half a
head, padded to a power of two. Layout of queries and outputs: [T, H, D].
"""

from typing import NamedTuple

import triton
import triton.language as tl

from quantpipe.backends.triton.ops.kv_codes import FLOAT, INT4, load_codes, load_scales

LOG2_E = 1.4426950408889634
# Farther back than any context; sums of two still fit into 32 bits.
FAR = 1 << 30


class Sight(NamedTuple):
    """What the queries of a layer see: ``BatchInput`` says how. ``num_sinks`` is 0 where there is no window."""

    window: int | None = None
    num_sinks: int = 0

    def arguments(self, block_size: int) -> tuple[int, int, int]:
        """The window, the sinks, and the tokens of the sink blocks, as kernels take them."""
        window = FAR if self.window is None else min(self.window, FAR)
        return window, self.num_sinks, -(-self.num_sinks // block_size) * block_size


@triton.jit
def first_seen(query_index, window, num_sinks, num_first, shift):
    """The index of the first token, sinks apart, that a query sees."""
    near = query_index - window + 1
    far = near + shift  # the same as a position: what the sink blocks are told by
    return tl.where(far < num_first, tl.maximum(far, num_sinks), tl.maximum(near, num_first))


@triton.jit
def attend_sequence(
    query_ptr,
    sink_query_ptr,
    offsets_M,
    in_M,
    query_index_M,
    begin,
    end,
    sink_end,
    window,
    num_first,
    shift,
    table_ptr,
    key_codes_ptr,
    key_parameters_ptr,
    key_scale_ptr,
    value_codes_ptr,
    value_parameters_ptr,
    value_scale_ptr,
    scale_log2,
    num_kv_heads,
    kv_head,
    BLOCK_SIZE: tl.constexpr,
    HALF: tl.constexpr,
    C: tl.constexpr,
    M: tl.constexpr,
    TILE: tl.constexpr,
    KEY_KIND: tl.constexpr,
    VALUE_KIND: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):
    """The softmax over the sinks with indices [0, sink_end) and the other tokens with indices [begin, end).

    It consists of the largest score (base 2) [M], the sum of weights [M], and the weighted sums of both halves of the
    values [M, C].
    """
    maximum_M = tl.full([M], -float("inf"), tl.float32)
    total_M = tl.zeros([M], tl.float32)
    first_sum_MC = tl.zeros([M, C], tl.float32)
    second_sum_MC = tl.zeros([M, C], tl.float32)
    minimum_sum_M = tl.zeros([M], tl.float32)
    if HAS_SINKS:
        first_query_MC, second_query_MC = _load_queries(sink_query_ptr, offsets_M, in_M, HALF, C)
        maximum_M, total_M, first_sum_MC, second_sum_MC, minimum_sum_M = _attend_run(
            maximum_M,
            total_M,
            first_sum_MC,
            second_sum_MC,
            minimum_sum_M,
            first_query_MC,
            second_query_MC,
            query_index_M,
            0,
            sink_end,
            window,
            num_first,
            shift,
            table_ptr,
            key_codes_ptr,
            key_parameters_ptr,
            key_scale_ptr,
            value_codes_ptr,
            value_parameters_ptr,
            value_scale_ptr,
            scale_log2,
            num_kv_heads,
            kv_head,
            BLOCK_SIZE,
            HALF,
            C,
            TILE,
            KEY_KIND,
            VALUE_KIND,
            True,
        )
    first_query_MC, second_query_MC = _load_queries(query_ptr, offsets_M, in_M, HALF, C)
    maximum_M, total_M, first_sum_MC, second_sum_MC, minimum_sum_M = _attend_run(
        maximum_M,
        total_M,
        first_sum_MC,
        second_sum_MC,
        minimum_sum_M,
        first_query_MC,
        second_query_MC,
        query_index_M,
        begin,
        end,
        window,
        num_first,
        shift,
        table_ptr,
        key_codes_ptr,
        key_parameters_ptr,
        key_scale_ptr,
        value_codes_ptr,
        value_parameters_ptr,
        value_scale_ptr,
        scale_log2,
        num_kv_heads,
        kv_head,
        BLOCK_SIZE,
        HALF,
        C,
        TILE,
        KEY_KIND,
        VALUE_KIND,
        False,
    )
    return maximum_M, total_M, first_sum_MC + minimum_sum_M[:, None], second_sum_MC + minimum_sum_M[:, None]


@triton.jit
def _attend_run(
    maximum_M,
    total_M,
    first_sum_MC,
    second_sum_MC,
    minimum_sum_M,
    first_query_MC,
    second_query_MC,
    query_index_M,
    begin,
    end,
    window,
    num_first,
    shift,
    table_ptr,
    key_codes_ptr,
    key_parameters_ptr,
    key_scale_ptr,
    value_codes_ptr,
    value_parameters_ptr,
    value_scale_ptr,
    scale_log2,
    num_kv_heads,
    kv_head,
    BLOCK_SIZE: tl.constexpr,
    HALF: tl.constexpr,
    C: tl.constexpr,
    TILE: tl.constexpr,
    KEY_KIND: tl.constexpr,
    VALUE_KIND: tl.constexpr,
    ARE_SINKS: tl.constexpr,
):
    """The running softmax after the tokens with indices [begin, end); no window hides sinks.

    The minima of 4-bit values, which every dimension gets, are summed apart from their codes.
    """
    dtype: tl.constexpr = first_query_MC.dtype
    query_sum_M = tl.zeros(query_index_M.shape, tl.float32)
    if KEY_KIND == INT4:
        query_sum_M = tl.sum(first_query_MC.to(tl.float32) + second_query_MC.to(tl.float32), 1)
    for start in range(begin, end, TILE):
        indices_N = start + tl.arange(0, TILE)
        in_N = indices_N < end
        blocks_N = tl.load(table_ptr + indices_N // BLOCK_SIZE, mask=in_N, other=0)
        block_head_N = blocks_N * num_kv_heads + kv_head
        offset_N = indices_N % BLOCK_SIZE
        row_N = block_head_N * BLOCK_SIZE + offset_N

        first_key_NC, second_key_NC = load_codes(key_codes_ptr, row_N, in_N, HALF, C, KEY_KIND, dtype)
        scores_MN = tl.dot(first_query_MC, tl.trans(first_key_NC), input_precision="ieee")
        scores_MN = tl.dot(second_query_MC, tl.trans(second_key_NC), scores_MN, input_precision="ieee")
        if KEY_KIND != FLOAT:
            key_scale_N, key_minimum_N = load_scales(
                key_parameters_ptr, key_scale_ptr, block_head_N, offset_N, in_N, kv_head, BLOCK_SIZE, KEY_KIND
            )
            scores_MN = scores_MN * key_scale_N[None, :]
            if KEY_KIND == INT4:
                scores_MN += query_sum_M[:, None] * key_minimum_N[None, :]

        sees_MN = in_N[None, :] & (indices_N[None, :] <= query_index_M[:, None])
        if not ARE_SINKS:
            seen_as_N = tl.where(indices_N < num_first, indices_N - shift, indices_N)
            sees_MN = sees_MN & (seen_as_N[None, :] > query_index_M[:, None] - window)
        scores_MN = tl.where(sees_MN, scores_MN * scale_log2, -float("inf"))
        new_maximum_M = tl.maximum(maximum_M, tl.max(scores_MN, 1))
        # A query that has seen nothing yet has no largest score to take away.
        origin_M = tl.where(new_maximum_M == -float("inf"), 0.0, new_maximum_M)
        decay_M = tl.exp2(maximum_M - origin_M)
        weights_MN = tl.exp2(scores_MN - origin_M[:, None])
        total_M = total_M * decay_M + tl.sum(weights_MN, 1)

        first_value_NC, second_value_NC = load_codes(value_codes_ptr, row_N, in_N, HALF, C, VALUE_KIND, dtype)
        if VALUE_KIND != FLOAT:
            value_scale_N, value_minimum_N = load_scales(
                value_parameters_ptr, value_scale_ptr, block_head_N, offset_N, in_N, kv_head, BLOCK_SIZE, VALUE_KIND
            )
            if VALUE_KIND == INT4:
                minimum_sum_M = minimum_sum_M * decay_M + tl.sum(weights_MN * value_minimum_N[None, :], 1)
            weights_MN = weights_MN * value_scale_N[None, :]
        weights_MN = weights_MN.to(dtype)
        first_sum_MC = tl.dot(weights_MN, first_value_NC, first_sum_MC * decay_M[:, None], input_precision="ieee")
        second_sum_MC = tl.dot(weights_MN, second_value_NC, second_sum_MC * decay_M[:, None], input_precision="ieee")
        maximum_M = new_maximum_M
    return maximum_M, total_M, first_sum_MC, second_sum_MC, minimum_sum_M


@triton.jit
def _load_queries(query_ptr, offsets_M, in_M, HALF: tl.constexpr, C: tl.constexpr):
    """Both halves [M, C] of queries, zero beyond HALF."""
    dims_C = tl.arange(0, C)
    in_MC = in_M[:, None] & (dims_C < HALF)[None, :]
    ptrs_MC = query_ptr + offsets_M[:, None] + dims_C[None, :]
    return tl.load(ptrs_MC, mask=in_MC, other=0.0), tl.load(ptrs_MC + HALF, mask=in_MC, other=0.0)


@triton.jit
def store_halves(ptr, offsets_M, in_M, first_MC, second_MC, HALF: tl.constexpr, C: tl.constexpr):
    """Both halves of heads, at offsets of their own."""
    dims_C = tl.arange(0, C)
    in_MC = in_M[:, None] & (dims_C < HALF)[None, :]
    ptrs_MC = ptr + offsets_M[:, None] + dims_C[None, :]
    tl.store(ptrs_MC, first_MC.to(ptr.dtype.element_ty), mask=in_MC)
    tl.store(ptrs_MC + HALF, second_MC.to(ptr.dtype.element_ty), mask=in_MC)

"""Both attention kernels against float64 over what the cache holds, read by the rules of ``formats.kv_mode``.

Shapes: T tokens, C held tokens of one sequence, H query heads, J KV heads, D head_dim, B blocks, b block_size.
"""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from quantpipe.backends.protocol import BatchInput
from quantpipe.backends.reference import attend, visible
from quantpipe.backends.triton import launch_table
from quantpipe.backends.triton.kv_cache import LayerStore, TritonKVCache
from quantpipe.backends.triton.ops.attention_chunk import attend_chunks, tokens_per_tile
from quantpipe.backends.triton.ops.attention_decode import attend_decodes, num_splits
from quantpipe.backends.triton.ops.attention_tile import Sight
from quantpipe.backends.triton.step import StepTensors, to_device
from quantpipe.formats.kv_mode import KV_MODES
from quantpipe.formats.kv_rounding import decode_kv, encode_kv
from quantpipe.formats.kv_scales import KVScales
from quantpipe.models.description import AttentionSpec, LinearSpec, RopeSpec

NUM_BLOCKS = 40
CPU = torch.device("cpu")
# Of the largest value: float32 sums in another order; half a step of 11 bits, in queries, weights and results.
BOUNDS = {torch.float32: 2e-6, torch.float16: 2e-3}


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that short contexts fill several of them."""
    small = launch_table.AttentionLaunch(rows=16, tile=16, num_warps=4, num_stages=2)
    monkeypatch.setattr(launch_table, "attention_entry", lambda *of: small)


class Shape(NamedTuple):
    """Of one attention."""

    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 32
    block_size: int = 4

    @property
    def spec(self) -> AttentionSpec:
        linear = LinearSpec("", 1, 1, False, None)
        scale = 0.7 * self.head_dim**-0.5
        return AttentionSpec(
            *(linear,) * 4, self.num_heads, self.num_kv_heads, self.head_dim, scale, RopeSpec(inverse_frequencies=())
        )


class Case(NamedTuple):
    """(new tokens, context, dropped blocks) of each sequence, and what it sees."""

    seqs: Sequence[tuple[int, int, int]]
    window: int | None = None
    num_sinks: int = 0


def batch_of(case: Case, block_size: int, seed: int) -> BatchInput:
    """Over scrambled blocks; token ids, positions and slots play no part here."""
    free = torch.randperm(NUM_BLOCKS, generator=torch.Generator().manual_seed(seed)).tolist()
    tables = [[free.pop() for _ in range(-(-context // block_size) - dropped)] for _, context, dropped in case.seqs]
    widest = max(len(table) for table in tables)
    query_lens = tuple(query_len for query_len, _, _ in case.seqs)
    unused = torch.zeros(sum(query_lens), dtype=torch.int64)
    return BatchInput(
        *(unused,) * 3,
        query_lens,
        tuple(context for _, context, _ in case.seqs),
        torch.tensor([[*table, *[0] * (widest - len(table))] for table in tables]),
        unused[:0],
        case.num_sinks,
        case.window if case.num_sinks else None,
        tuple(dropped for _, _, dropped in case.seqs),
    )


def cache_of(shape: Shape, kv_dtype: str, dtype: torch.dtype, batch: BatchInput, seed: int) -> TritonKVCache:
    """Random keys and values in the slots that sequences hold; all others are poisoned."""
    generator = torch.Generator().manual_seed(seed)
    scales_J = 0.01 + 0.02 * torch.rand(shape.num_kv_heads, generator=generator)
    scales = KVScales((scales_J,), (2 * scales_J,))
    sizes = (1, shape.num_kv_heads, shape.head_dim)
    kv = TritonKVCache.allocate(NUM_BLOCKS, shape.block_size, kv_dtype, sizes, dtype, CPU, scales)
    is_held_Bb = torch.zeros(NUM_BLOCKS, shape.block_size, dtype=torch.bool)
    for blocks_B, held_len in zip(batch.block_table_SB, batch.held_lens(shape.block_size), strict=True):
        for index in range(held_len):
            is_held_Bb[blocks_B[index // shape.block_size], index % shape.block_size] = True
    for store in (kv.keys.layer(0), kv.values.layer(0)):
        x_BbJD = torch.randn(NUM_BLOCKS, shape.block_size, *sizes[1:], generator=generator)
        x_BbJD *= 10 ** (torch.rand(*x_BbJD.shape[:3], 1, generator=generator) - 0.5)
        x_BbJD[~is_held_Bb] = torch.nan
        scale_J1 = None if store.scale_J is None else store.scale_J.unsqueeze(-1)
        codes, parameters = encode_kv(x_BbJD, store.rule, scale_J1)
        store.codes.copy_(codes.transpose(1, 2))
        if store.parameters is not None and parameters is not None:
            store.parameters.copy_(parameters.permute(0, 2, 3, 1))
    return kv


def held(store: LayerStore, blocks_B: Tensor, held_len: int) -> Tensor:
    """What the store means, float64 [C, J, D]."""
    codes = store.codes[blocks_B].transpose(1, 2).flatten(0, 1)[:held_len]
    parameters = None
    if store.parameters is not None:
        parameters = store.parameters[blocks_B].permute(0, 3, 1, 2).flatten(0, 1)[:held_len]
    scale_J1 = None if store.scale_J is None else store.scale_J.unsqueeze(-1)
    return decode_kv(codes, parameters, store.rule, scale_J1).double()


def expected(shape: Shape, case: Case, batch: BatchInput, kv: TritonKVCache, queries: tuple[Tensor, Tensor]) -> Tensor:
    """Attention of every token in float64 [T, H, D]."""
    attended = []
    starts = itertools.accumulate(batch.query_lens, initial=0)
    held_lens = batch.held_lens(shape.block_size)
    for s, (start, query_len) in enumerate(zip(starts, batch.query_lens, strict=False)):
        blocks_B = batch.block_table_SB[s]
        keys_CJD, values_CJD = (held(store.layer(0), blocks_B, held_lens[s]) for store in (kv.keys, kv.values))
        query_tHD, sink_query_tHD = (query[start : start + query_len].double() for query in queries)
        sees_tC = visible(batch, s, case.window, shape.block_size)
        attended.append(attend(shape.spec, query_tHD, keys_CJD, values_CJD, sees_tC, sink_query_tHD, case.num_sinks))
    return torch.cat(attended)


def found(
    shape: Shape, case: Case, step: StepTensors, kv: TritonKVCache, queries: tuple[Tensor, Tensor], splits: int
) -> Tensor:
    """What the kernels give; rows that neither writes stay NaN."""
    query_THD, sink_query_THD = queries[0], queries[1] if case.num_sinks else None
    out_THD = torch.full_like(query_THD, torch.nan)
    sight, scale = Sight(case.window, case.num_sinks), shape.spec.softmax_scale
    stores = (kv.keys.layer(0), kv.values.layer(0))
    if step.decodes is not None:
        attend_decodes(query_THD, sink_query_THD, step.decodes, *stores, sight, scale, splits, out_THD)
    if step.chunks is not None:
        attend_chunks(query_THD, sink_query_THD, step.chunks, *stores, sight, scale, out_THD)
    return out_THD


def check(
    case: Case,
    shape: Shape | None = None,
    kv_dtype: str = "auto",
    dtype: torch.dtype = torch.float32,
    splits: int = 1,
    seed: int = 0,
) -> None:
    shape = shape or Shape()
    batch = batch_of(case, shape.block_size, seed)
    kv = cache_of(shape, kv_dtype, dtype, batch, seed)
    generator = torch.Generator().manual_seed(seed + 1)
    size = (sum(batch.query_lens), shape.num_heads, shape.head_dim)
    query, sink_query = (torch.randn(size, generator=generator).to(dtype) for _ in range(2))
    tile_len = tokens_per_tile(shape.num_heads, shape.num_kv_heads, shape.head_dim, dtype, CPU)
    step = to_device(batch, shape.block_size, tile_len, CPU)
    given = found(shape, case, step, kv, (query, sink_query), splits)
    wanted = expected(shape, case, batch, kv, (query, sink_query))
    error = (given.double() - wanted).abs().max() / wanted.abs().max()
    assert error < BOUNDS[dtype], error


MIXED = Case([(1, 19, 0), (7, 7, 0), (1, 1, 0), (3, 22, 0), (1, 16, 0)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("kv_dtype", KV_MODES)
def test_decodes_and_chunks_attend_in_every_cache_mode(kv_dtype: str, dtype: torch.dtype) -> None:
    check(MIXED, kv_dtype=kv_dtype, dtype=dtype, splits=2)


@pytest.mark.parametrize(
    "shape",
    [
        Shape(num_heads=6, num_kv_heads=2, head_dim=48),
        Shape(num_heads=3, num_kv_heads=1, head_dim=80, block_size=16),
        Shape(num_heads=20, num_kv_heads=1, head_dim=16, block_size=5),
        Shape(num_heads=2, num_kv_heads=2, head_dim=128, block_size=3),
    ],
    ids=str,
)
@pytest.mark.parametrize("kv_dtype", ["auto", "k_int8_v_int4"])
def test_any_grouping_head_size_and_block_size(kv_dtype: str, shape: Shape) -> None:
    check(MIXED, shape, kv_dtype)


@pytest.mark.parametrize("splits", [1, 2, 3, 5])
def test_splits_are_joined_also_where_some_are_empty(splits: int) -> None:
    check(Case([(1, 50, 0), (1, 3, 0), (1, 33, 0)]), kv_dtype="int4_per_token_head", splits=splits)


@pytest.mark.parametrize("window", [1, 4, 9, 100])
def test_window_hides_what_is_far_back(window: int) -> None:
    check(Case([(1, 37, 0), (9, 20, 0), (1, 4, 0), (6, 6, 0)], window), splits=2)


@pytest.mark.parametrize(("num_sinks", "window"), [(5, 9), (4, 12), (6, 3), (1, 1)])
def test_sinks_meet_queries_of_their_own(num_sinks: int, window: int) -> None:
    # before, at and behind the end of sinks + window, with and without the blocks between
    seqs = [(1, 3, 0), (1, 37, 0), (12, 33, 0), (4, 4, 0), (1, 36, 3), (3, 41, 3)]
    check(Case(seqs, window, num_sinks), splits=2, kv_dtype="int8_per_token_head")


def test_blocks_dropped_behind_a_window_are_not_missed() -> None:
    check(Case([(1, 50, 9), (3, 38, 6), (1, 12, 0), (1, 4_000_037, 1_000_005)], 10), splits=3)


def test_what_a_resumed_sequence_does_not_hold_is_not_seen() -> None:
    """The window reaches from behind dropped blocks into the rest of the last sink block."""
    check(Case([(1, 14, 1), (2, 15, 1)], 11, num_sinks=2))


def test_sequence_that_holds_nothing_gets_zeros() -> None:
    shape, case = Shape(), Case([(1, 9, 0), (1, 5, 0)])
    batch = batch_of(case, shape.block_size, 0)
    kv = cache_of(shape, "auto", torch.float32, batch, 0)
    step = to_device(batch, shape.block_size, 16, CPU)
    assert step.decodes is not None
    empty = step._replace(decodes=step.decodes._replace(held_S=torch.tensor([9, 0])))
    query = torch.randn(2, 4, 32, generator=torch.Generator().manual_seed(1))
    for splits in (1, 2):
        whole, given = (found(shape, case, own, kv, (query, query), splits) for own in (step, empty))
        assert torch.equal(given[0], whole[0])
        assert not given[1].any()


def test_splits_fill_the_processors_and_no_more() -> None:
    assert num_splits(num_seqs=1, num_kv_heads=8, max_tokens=4096, num_processors=132) == 32
    assert num_splits(num_seqs=4, num_kv_heads=8, max_tokens=4096, num_processors=132) == 8
    assert num_splits(num_seqs=4, num_kv_heads=8, max_tokens=300, num_processors=132) == 3
    assert num_splits(num_seqs=64, num_kv_heads=8, max_tokens=4096, num_processors=132) == 1


def test_step_reaches_the_device_as_it_was() -> None:
    batch = batch_of(MIXED, 4, 0)
    tokens = torch.arange(sum(batch.query_lens))
    batch = dataclasses.replace(batch, token_ids_T=tokens + 100, positions_T=tokens + 200, slot_mapping_T=tokens + 300)
    step = to_device(batch, 4, 2, CPU)
    assert torch.equal(step.token_ids_T, batch.token_ids_T)
    assert torch.equal(step.positions_T, batch.positions_T)
    assert torch.equal(step.slots_T, batch.slot_mapping_T)
    assert step.decodes is not None
    assert step.chunks is not None
    assert step.decodes.rows_S.tolist() == [0, 8, 12]
    assert step.decodes.held_S.tolist() == [19, 1, 16]
    assert torch.equal(step.decodes.table_SB, batch.block_table_SB[[0, 2, 4]])
    assert step.chunks.start_S.tolist() == [1, 9]
    assert step.chunks.query_len_S.tolist() == [7, 3]
    assert list(zip(step.chunks.tile_seq_X.tolist(), step.chunks.tile_first_X.tolist(), strict=True)) == [
        *((0, first) for first in (0, 2, 4, 6)),
        *((1, first) for first in (0, 2)),
    ]
    assert all(tensor.data_ptr() % 16 == 0 for tensor in (*step[:4], *step.decodes, *step.chunks))

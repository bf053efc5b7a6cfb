"""Attention over the paged cache, of decodes and of chunks, in every mode.

Shapes: T tokens, C held tokens of one sequence, H query heads, J KV heads, D head_dim, B blocks, b block_size.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from quantpipe.backends.protocol import BatchInput
from quantpipe.backends.reference import attend, visible
from quantpipe.backends.triton.kv_cache import TritonKVCache
from quantpipe.backends.triton.ops.attention_chunk import attend_chunks, tokens_per_tile
from quantpipe.backends.triton.ops.attention_decode import attend_decodes
from quantpipe.backends.triton.ops.attention_tile import Sight
from quantpipe.backends.triton.step import to_device
from quantpipe.doctor.cases.cache import BLOCK_SIZE, NUM_HEADS, NUM_KV_HEADS, cache, held_values
from quantpipe.doctor.cases.case import Case, error, generator
from quantpipe.formats.kv_mode import KV_MODES
from quantpipe.formats.kv_rounding import encode_kv
from quantpipe.models.description import AttentionSpec, LinearSpec, RopeSpec

# Of the largest value: queries, keys and weights are rounded to the dtype before they are multiplied.
BOUNDS = {torch.float32: 4e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
NUM_BLOCKS = 24


class Form(NamedTuple):
    """New tokens and context of each sequence, what they see, and over how many programs a decode is split."""

    what: str
    seqs: tuple[tuple[int, int], ...]
    splits: int
    head_dim: int = 64
    window: int | None = None
    num_sinks: int = 0


FORMS = (
    Form("decodes and chunks D=64", ((1, 39), (17, 40), (1, 1), (3, 22)), splits=1),
    Form("split, window and sinks D=128", ((1, 120), (1, 9)), splits=3, head_dim=128, window=40, num_sinks=4),
)


def attention_cases(dtypes: Sequence[torch.dtype]) -> Iterator[Case]:
    """Every mode in every form."""
    for dtype in dtypes:
        for kv_dtype in KV_MODES:
            for form in FORMS:
                yield Case("attention", dtype, f"{kv_dtype} {form.what}", partial(_attend, form, kv_dtype, dtype))


def _attend(form: Form, kv_dtype: str, dtype: torch.dtype, device: torch.device) -> float:
    batch, kv = _batch(form), cache(kv_dtype, form.head_dim, dtype, NUM_BLOCKS, device)
    _fill(kv, batch)
    draws, num_tokens = generator(1), sum(batch.query_lens)
    size = (num_tokens, NUM_HEADS, form.head_dim)
    query_THD, sink_query_THD = (torch.randn(size, generator=draws).to(dtype) for _ in range(2))
    step = to_device(batch, BLOCK_SIZE, tokens_per_tile(*size[1:2], NUM_KV_HEADS, form.head_dim, dtype, device), device)
    stores, sight, scale = (
        (kv.keys.layer(0), kv.values.layer(0)),
        Sight(form.window, form.num_sinks),
        form.head_dim**-0.5,
    )
    queries = (query_THD.to(device), sink_query_THD.to(device) if form.num_sinks else None)
    out_THD = torch.full(size, torch.nan, dtype=dtype, device=device)
    if step.decodes is not None:
        attend_decodes(*queries, step.decodes, *stores, sight, scale, form.splits, out_THD)
    if step.chunks is not None:
        attend_chunks(*queries, step.chunks, *stores, sight, scale, out_THD)
    return error(out_THD, _expected(form, batch, kv, query_THD, sink_query_THD, scale), BOUNDS[dtype])


def _batch(form: Form) -> BatchInput:
    """Over scrambled blocks; token ids, positions and slots play no part."""
    free = torch.randperm(NUM_BLOCKS, generator=generator()).tolist()
    tables = [[free.pop() for _ in range(-(-context // BLOCK_SIZE))] for _, context in form.seqs]
    widest = max(map(len, tables))
    query_lens = tuple(query_len for query_len, _ in form.seqs)
    unused_T = torch.zeros(sum(query_lens), dtype=torch.int64)
    table_SB = torch.tensor([[*table, *[0] * (widest - len(table))] for table in tables])
    contexts, window = tuple(context for _, context in form.seqs), form.window if form.num_sinks else None
    return BatchInput(
        unused_T, unused_T, unused_T, query_lens, contexts, table_SB, unused_T[:0], form.num_sinks, window
    )


def _places(batch: BatchInput, s: int) -> tuple[Tensor, Tensor]:
    """Block and offset of each held token of a sequence."""
    tokens_C = torch.arange(batch.context_lens[s])
    return batch.block_table_SB[s][tokens_C // BLOCK_SIZE], tokens_C % BLOCK_SIZE


def _fill(kv: TritonKVCache, batch: BatchInput) -> None:
    """Random keys and values where sequences hold some; everything else is NaN, which nothing may read."""
    draws = generator(2)
    is_held_Bb = torch.zeros(NUM_BLOCKS, BLOCK_SIZE, dtype=torch.bool)
    for s in range(len(batch.query_lens)):
        is_held_Bb[_places(batch, s)] = True
    for store in (kv.keys.layer(0), kv.values.layer(0)):
        head_dim = store.codes.shape[-1] * (2 if store.rule.bits == 4 else 1)
        x_BbJD = torch.randn(NUM_BLOCKS, BLOCK_SIZE, NUM_KV_HEADS, head_dim, generator=draws)
        x_BbJD[~is_held_Bb] = torch.nan
        scale_J1 = None if store.scale_J is None else store.scale_J.cpu().unsqueeze(-1)
        codes, parameters = encode_kv(x_BbJD, store.rule, scale_J1)
        store.codes.copy_(codes.transpose(1, 2))
        if store.parameters is not None and parameters is not None:
            store.parameters.copy_(parameters.permute(0, 2, 3, 1))


def _expected(
    form: Form, batch: BatchInput, kv: TritonKVCache, query_THD: Tensor, sink_query_THD: Tensor, scale: float
) -> Tensor:
    linear = LinearSpec("", 1, 1, False, None)
    rope = RopeSpec(inverse_frequencies=())
    spec = AttentionSpec(*(linear,) * 4, NUM_HEADS, NUM_KV_HEADS, form.head_dim, scale, rope)
    attended = []
    for s, start in enumerate(list(accumulate(batch.query_lens, initial=0))[:-1]):
        keys_CJD, values_CJD = (held_values(store.layer(0), *_places(batch, s))[0] for store in (kv.keys, kv.values))
        rows = slice(start, start + batch.query_lens[s])
        sees_tC = visible(batch, s, form.window, BLOCK_SIZE)
        sinks = sink_query_THD[rows].double() if form.num_sinks else None
        own = attend(spec, query_THD[rows].double(), keys_CJD, values_CJD, sees_tC, sinks, form.num_sinks)
        attended.append(own)
    return torch.cat(attended)

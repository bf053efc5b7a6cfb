"""Attention over the paged cache: one call per group of alike sequences, decodes and prefill chunks by the same path.

Shapes: T tokens of the step, S sequences of a group, n new tokens of each, C tokens held of its context (padded to the
longest), H query heads, J KV heads, G query heads of each of them, D head_dim.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quantpipe.backends.cpu.kv_cache import CpuKVCache
from quantpipe.backends.protocol import BatchInput
from quantpipe.models.description import AttentionSpec

# Sequences share a call while padding at most doubles the work, or while it is too little to matter.
MAX_PADDING_RATIO = 2
MAX_FREE_BLOCKS = 8


@dataclass(frozen=True)
class AttentionGroup:
    """Sequences that advance by the same number of tokens.

    ``rows_Sn`` are their rows in the step, None where they are the whole step in order. ``mask_S1nC`` is added to the
    scores (0 or -inf); None where nothing is hidden, or where ``is_causal`` says it all (context = new tokens).
    The first ``num_sinks`` keys are met by queries that are turned for them; 0 where all keys are met by the same.
    """

    rows_Sn: Tensor | None
    block_ids: Tensor
    num_sequences: int
    query_len: int
    context_len: int
    mask_S1nC: Tensor | None
    is_causal: bool
    num_sinks: int = 0


def plan_groups(batch: BatchInput, kv: CpuKVCache, window: int | None = None) -> list[AttentionGroup]:
    """Divide a step into groups; done once per step, used by every layer that looks back over this ``window``."""
    starts = [0]
    for query_len in batch.query_lens:
        starts.append(starts[-1] + query_len)
    held_lens = batch.held_lens(kv.block_size)
    members = [[s] for s in range(len(held_lens))] if kv.has_nonfinite else _alike(batch, held_lens, kv.block_size)
    is_whole = len(members) == 1
    return [_plan_group(batch, held_lens, kv.block_size, group, starts, is_whole, window) for group in members]


def attend(
    spec: AttentionSpec,
    groups: list[AttentionGroup],
    layer: int,
    query_THD: Tensor,
    sink_query_THD: Tensor | None,
    kv: CpuKVCache,
) -> Tensor:
    """Attention output [T, H * D] of every row of the step; this step's keys and values are already in the cache.

    ``sink_query_THD`` are the queries as turned for sinks, wanted where any group has some.
    """
    if groups[0].rows_Sn is None:
        return _attend_group(spec, groups[0], layer, query_THD, sink_query_THD, kv)
    out_TK = torch.empty(query_THD.shape[0], spec.num_heads * spec.head_dim)
    for group in groups:
        assert group.rows_Sn is not None, "only a group that is the whole step goes without rows"
        sink_query = None if sink_query_THD is None else sink_query_THD.index_select(0, group.rows_Sn)
        query = query_THD.index_select(0, group.rows_Sn)
        out_TK[group.rows_Sn] = _attend_group(spec, group, layer, query, sink_query, kv)
    return out_TK


def _attend_group(
    spec: AttentionSpec,
    group: AttentionGroup,
    layer: int,
    query_THD: Tensor,
    sink_query_THD: Tensor | None,
    kv: CpuKVCache,
) -> Tensor:
    cached = kv.read(layer, group.block_ids, group.num_sequences)
    key_SJCD, value_SJCD = (part_JSCD[:, :, : group.context_len].transpose(0, 1) for part_JSCD in cached)
    if group.num_sinks:
        assert sink_query_THD is not None, "queries were not turned for sinks"
        return _attend_sinks(spec, group, query_THD, sink_query_THD, key_SJCD, value_SJCD)
    query_SHnD = query_THD.view(group.num_sequences, group.query_len, spec.num_heads, -1).transpose(1, 2)
    out_SHnD = torch.nn.functional.scaled_dot_product_attention(
        query_SHnD,
        key_SJCD,
        value_SJCD,
        attn_mask=group.mask_S1nC,
        is_causal=group.is_causal,
        scale=spec.softmax_scale,
        enable_gqa=True,
    )
    return out_SHnD.transpose(1, 2).reshape(query_THD.shape[0], -1)


def _attend_sinks(
    spec: AttentionSpec,
    group: AttentionGroup,
    query_THD: Tensor,
    sink_query_THD: Tensor,
    key_SJCD: Tensor,
    value_SJCD: Tensor,
) -> Tensor:
    """The same with the scores written out: those of the sinks come from queries of their own."""
    assert group.mask_S1nC is not None, "sinks are far only where a window hides what lies between"

    num_sequences, query_len = group.num_sequences, group.query_len

    def by_kv_head(x_THD: Tensor) -> Tensor:
        """[S, J, G * n, D]"""
        heads_SnJGD = x_THD.view(num_sequences, query_len, spec.num_kv_heads, -1, spec.head_dim)
        return heads_SnJGD.permute(0, 2, 3, 1, 4).flatten(2, 3)

    key_SJDC = key_SJCD.transpose(2, 3)
    scores = by_kv_head(query_THD) @ key_SJDC
    scores[..., : group.num_sinks] = by_kv_head(sink_query_THD) @ key_SJDC[..., : group.num_sinks]
    scores_SJGnC = scores.mul_(spec.softmax_scale).view(
        num_sequences, spec.num_kv_heads, -1, query_len, scores.shape[3]
    )
    weights = scores_SJGnC.add_(group.mask_S1nC.unsqueeze(1)).softmax(-1).flatten(2, 3)
    out_SJGnD = (weights @ value_SJCD).view(num_sequences, spec.num_kv_heads, -1, query_len, spec.head_dim)
    return out_SJGnD.permute(0, 3, 1, 2, 4).reshape(query_THD.shape[0], -1)


def _alike(batch: BatchInput, held_lens: tuple[int, ...], block_size: int) -> list[list[int]]:
    """Sequence numbers by query length, then by context held, cut where padding would cost too much."""
    order = sorted(range(len(held_lens)), key=lambda s: (batch.query_lens[s], held_lens[s], s))
    groups: list[list[int]] = []
    for s in order:
        shortest = groups[-1][0] if groups else s
        limit = max(MAX_PADDING_RATIO * held_lens[shortest], MAX_FREE_BLOCKS * block_size)
        fits = batch.query_lens[s] == batch.query_lens[shortest] and held_lens[s] <= limit
        if groups and fits:
            groups[-1].append(s)
        else:
            groups.append([s])
    return [sorted(group) for group in groups]


def _plan_group(
    batch: BatchInput,
    held_lens: tuple[int, ...],
    block_size: int,
    members: Sequence[int],
    starts: list[int],
    is_whole: bool,
    window: int | None,
) -> AttentionGroup:
    query_len, held = batch.query_lens[members[0]], [held_lens[s] for s in members]
    contexts, context_len = [batch.context_lens[s] for s in members], max(held)
    rows = torch.cat([torch.arange(starts[s], starts[s + 1]) for s in members]) if not is_whole else None
    is_windowed = window is not None and batch.num_sinks + window < max(contexts)
    is_causal = query_len > 1 and min(held) == query_len == context_len and not is_windowed
    needs_mask = not is_causal and (query_len > 1 or min(held) < context_len or is_windowed)
    return AttentionGroup(
        rows_Sn=rows,
        block_ids=_block_ids(batch.block_table_SB[list(members)], held, block_size),
        num_sequences=len(members),
        query_len=query_len,
        context_len=context_len,
        mask_S1nC=_mask(batch, contexts, held, query_len, window, block_size) if needs_mask else None,
        is_causal=is_causal,
        num_sinks=min(batch.num_sinks, context_len) if is_windowed else 0,
    )


def _block_ids(block_table_SB: Tensor, held: list[int], block_size: int) -> Tensor:
    """The blocks to read, as many for each sequence as the longest needs: short ones repeat their own last block."""
    last_S1 = (torch.tensor(held).unsqueeze(1) - 1) // block_size
    wanted_SB = torch.arange(int(last_S1.max()) + 1).minimum(last_S1)
    return block_table_SB.gather(1, wanted_SB).flatten()


def _mask(
    batch: BatchInput, contexts: list[int], held: list[int], query_len: int, window: int | None, block_size: int
) -> Tensor:
    """-inf where a token may not look: new token i of a sequence sees its first context - n + i + 1 tokens, and of
    those the sinks and the last ``window``."""
    contexts_S1, indices_C = torch.tensor(contexts).unsqueeze(1), torch.arange(max(held))
    first_hidden_Sn1 = (contexts_S1 - query_len + 1 + torch.arange(query_len)).unsqueeze(-1)
    num_dropped_S1 = contexts_S1 - torch.tensor(held).unsqueeze(1)
    num_first = -(-batch.num_sinks // block_size) * block_size  # tokens of the sink blocks
    positions_S1C = (indices_C + (indices_C >= num_first) * num_dropped_S1).unsqueeze(1)
    is_hidden_SnC = positions_S1C >= first_hidden_Sn1
    if window is not None:
        is_hidden_SnC |= (positions_S1C < first_hidden_Sn1 - window) & (positions_S1C >= batch.num_sinks)
    return torch.zeros(is_hidden_SnC.shape).masked_fill_(is_hidden_SnC, -torch.inf).unsqueeze(1)

"""Attention over the paged cache: one call per group of alike sequences, decodes and prefill chunks by the same path.

Shapes: T tokens of the step, S sequences of a group, n new tokens of each, C context tokens (padded to the longest),
H query heads, J KV heads, D head_dim.
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
    """

    rows_Sn: Tensor | None
    block_ids: Tensor
    num_sequences: int
    query_len: int
    context_len: int
    mask_S1nC: Tensor | None
    is_causal: bool


def plan_groups(batch: BatchInput, kv: CpuKVCache, window: int | None = None) -> list[AttentionGroup]:
    """Divide a step into groups; done once per step, used by every layer that looks back over this ``window``."""
    starts = [0]
    for query_len in batch.query_lens:
        starts.append(starts[-1] + query_len)
    members = [[s] for s in range(len(batch.query_lens))] if kv.has_nonfinite else _alike(batch, kv.block_size)
    is_whole = len(members) == 1
    return [_plan_group(batch, kv.block_size, group, starts, is_whole, window) for group in members]


def attend(spec: AttentionSpec, groups: list[AttentionGroup], layer: int, query_THD: Tensor, kv: CpuKVCache) -> Tensor:
    """Attention output [T, H * D] of every row of the step; this step's keys and values are already in the cache."""
    if groups[0].rows_Sn is None:
        return _attend_group(spec, groups[0], layer, query_THD, kv)
    out_TK = torch.empty(query_THD.shape[0], spec.num_heads * spec.head_dim)
    for group in groups:
        assert group.rows_Sn is not None, "only a group that is the whole step goes without rows"
        out_TK[group.rows_Sn] = _attend_group(spec, group, layer, query_THD.index_select(0, group.rows_Sn), kv)
    return out_TK


def _attend_group(spec: AttentionSpec, group: AttentionGroup, layer: int, query_THD: Tensor, kv: CpuKVCache) -> Tensor:
    cached = kv.read(layer, group.block_ids, group.num_sequences)
    key_SJCD, value_SJCD = (part_JSCD[:, :, : group.context_len].transpose(0, 1) for part_JSCD in cached)
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


def _alike(batch: BatchInput, block_size: int) -> list[list[int]]:
    """Sequence numbers by query length, then by context, cut where padding would cost too much."""
    order = sorted(range(len(batch.query_lens)), key=lambda s: (batch.query_lens[s], batch.context_lens[s], s))
    groups: list[list[int]] = []
    for s in order:
        shortest = groups[-1][0] if groups else s
        limit = max(MAX_PADDING_RATIO * batch.context_lens[shortest], MAX_FREE_BLOCKS * block_size)
        fits = batch.query_lens[s] == batch.query_lens[shortest] and batch.context_lens[s] <= limit
        if groups and fits:
            groups[-1].append(s)
        else:
            groups.append([s])
    return [sorted(group) for group in groups]


def _plan_group(
    batch: BatchInput, block_size: int, members: Sequence[int], starts: list[int], is_whole: bool, window: int | None
) -> AttentionGroup:
    query_len = batch.query_lens[members[0]]
    contexts = [batch.context_lens[s] for s in members]
    context_len = max(contexts)
    rows = torch.cat([torch.arange(starts[s], starts[s + 1]) for s in members]) if not is_whole else None
    is_windowed = window is not None and window < context_len
    is_causal = query_len > 1 and min(contexts) == query_len == context_len and not is_windowed
    needs_mask = not is_causal and (query_len > 1 or min(contexts) < context_len or is_windowed)
    return AttentionGroup(
        rows_Sn=rows,
        block_ids=_block_ids(batch.block_table_SB[list(members)], contexts, block_size),
        num_sequences=len(members),
        query_len=query_len,
        context_len=context_len,
        mask_S1nC=_mask(contexts, query_len, context_len, window) if needs_mask else None,
        is_causal=is_causal,
    )


def _block_ids(block_table_SB: Tensor, contexts: list[int], block_size: int) -> Tensor:
    """The blocks to read, as many for each sequence as the longest needs: short ones repeat their own last block."""
    last_S1 = (torch.tensor(contexts).unsqueeze(1) - 1) // block_size
    wanted_SB = torch.arange(int(last_S1.max()) + 1).minimum(last_S1)
    return block_table_SB.gather(1, wanted_SB).flatten()


def _mask(contexts: list[int], query_len: int, context_len: int, window: int | None) -> Tensor:
    """-inf where a token may not look: new token i of a sequence sees its first context - n + i + 1 tokens, and of
    those the last ``window``."""
    first_hidden_Sn1 = (torch.tensor(contexts).unsqueeze(1) - query_len + 1 + torch.arange(query_len)).unsqueeze(-1)
    positions_C = torch.arange(context_len)
    is_hidden_SnC = positions_C >= first_hidden_Sn1
    if window is not None:
        is_hidden_SnC |= positions_C < first_hidden_Sn1 - window
    return torch.zeros(is_hidden_SnC.shape).masked_fill_(is_hidden_SnC, -torch.inf).unsqueeze(1)

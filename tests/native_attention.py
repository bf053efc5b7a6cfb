"""Attention by the compiled kernels and by the reference, over sequences that arrive in two parts.

Shapes: T tokens of a step, C tokens of one sequence, H query heads, J KV heads, D head_dim, A = H + 2J.
"""

import itertools
from collections.abc import Sequence
from ctypes import byref
from dataclasses import dataclass

import torch
from torch import Tensor

from quantpipe.backends.cpu.native.kv_cache import NativeKVCache
from quantpipe.backends.cpu.native.library import Library
from quantpipe.backends.cpu.native.structures import Batch, Layer
from quantpipe.backends.reference import attend, rotate
from quantpipe.formats.kv_mode import KV_MODES, KVRule
from quantpipe.formats.kv_rounding import round_kv
from quantpipe.formats.kv_scales import KVScales
from quantpipe.models.description import AttentionSpec, LinearSpec, RopeSpec


@dataclass(frozen=True)
class Heads:
    """The shape of a layer's attention."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    window: int | None = None
    num_pairs: int | None = None

    @property
    def spec(self) -> AttentionSpec:
        linear = LinearSpec("", 1, 1, False, None)
        pairs = self.head_dim // 2 if self.num_pairs is None else self.num_pairs
        rope = RopeSpec(tuple(100.0 ** (-pair / max(pairs, 1)) for pair in range(pairs)), 1.1)
        sizes = (self.num_heads, self.num_kv_heads, self.head_dim)
        scale = self.head_dim**-0.5
        return AttentionSpec(linear, linear, linear, linear, *sizes, softmax_scale=scale, rope=rope, window=self.window)


@dataclass(frozen=True)
class Part:
    """A sequence: tokens already in the cache, tokens of this step, and its blocks."""

    num_before: int
    num_new: int
    blocks: tuple[int, ...]


def lay_out(lens: Sequence[tuple[int, int]], block_size: int, seed: int) -> list[Part]:
    """Sequences of (tokens before, new tokens) over shuffled blocks."""
    counts = [-(-(before + new) // block_size) for before, new in lens]
    ids = torch.randperm(sum(counts) + 1, generator=torch.Generator().manual_seed(seed)).tolist()
    ends = list(itertools.accumulate(counts))
    return [
        Part(before, new, tuple(ids[end - count : end]))
        for (before, new), count, end in zip(lens, counts, ends, strict=True)
    ]


class NativeAttention:
    """One layer over a cache of its own."""

    def __init__(
        self, library: Library, heads: Heads, num_blocks: int, block_size: int, kv_dtype: str, num_threads: int = 1
    ) -> None:
        self._library, self._heads, self._block_size, self._num_threads = library, heads, block_size, num_threads
        self.scales = KVScales(
            (torch.linspace(0.02, 0.03, heads.num_kv_heads),), (torch.linspace(0.03, 0.02, heads.num_kv_heads),)
        )
        sizes = (1, heads.num_kv_heads, heads.head_dim)
        scales = self.scales if KV_MODES[kv_dtype].needs_scales else None
        self.cache = NativeKVCache(library, num_blocks, block_size, kv_dtype, *sizes, scales)

    def run(self, parts: Sequence[Part], qkv_TAD: Tensor) -> Tensor:
        """Attended [T, H, D] of all new tokens of the parts, in order."""
        spec = self._heads.spec
        layer = Layer(
            num_heads=spec.num_heads,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            window=spec.window or 0,
            softmax_scale=spec.softmax_scale,
        )
        frequencies_P = torch.tensor(spec.rope.inverse_frequencies, dtype=torch.float64)
        arrays = _arrays(parts, self._block_size)
        num_tokens = qkv_TAD.shape[0]
        batch = Batch(
            num_tokens=num_tokens,
            num_sequences=len(parts),
            table_width=arrays["block_table"].shape[1],
            **{name: array.data_ptr() for name, array in arrays.items()},
        )
        out_THD = torch.full((num_tokens, spec.num_heads, spec.head_dim), torch.nan)
        self._library.check(
            "qp_attention_apply",
            byref(layer),
            len(frequencies_P),
            frequencies_P.data_ptr(),
            spec.rope.attention_scale,
            byref(batch),
            byref(self.cache.structure),
            qkv_TAD.contiguous().data_ptr(),
            out_THD.data_ptr(),
            self._num_threads,
        )
        return out_THD


def _arrays(parts: Sequence[Part], block_size: int) -> dict[str, Tensor]:
    positions = [range(part.num_before, part.num_before + part.num_new) for part in parts]
    slots = [
        part.blocks[p // block_size] * block_size + p % block_size
        for part, ps in zip(parts, positions, strict=True)
        for p in ps
    ]
    width = max((len(part.blocks) for part in parts), default=0)
    return {
        "token_ids": torch.zeros(len(slots), dtype=torch.int64),
        "positions": torch.tensor(list(itertools.chain(*positions)), dtype=torch.int64),
        "slots": torch.tensor(slots, dtype=torch.int64),
        "query_lens": torch.tensor([part.num_new for part in parts], dtype=torch.int64),
        "context_lens": torch.tensor([part.num_before + part.num_new for part in parts], dtype=torch.int64),
        "block_table": torch.tensor([[*part.blocks, *[0] * (width - len(part.blocks))] for part in parts]).long(),
    }


def in_two_steps(attention: NativeAttention, parts: Sequence[Part], qkv: Sequence[Tensor]) -> Tensor:
    """What comes before is written by a step of its own; ``qkv`` [C, A, D] of each whole sequence."""
    before = [Part(0, part.num_before, part.blocks) for part in parts]
    attention.run(before, torch.cat([own[: part.num_before] for own, part in zip(qkv, parts, strict=True)]))
    return attention.run(parts, torch.cat([own[part.num_before :] for own, part in zip(qkv, parts, strict=True)]))


def by_reference(heads: Heads, kv_dtype: str, scales: KVScales, parts: Sequence[Part], qkv: Sequence[Tensor]) -> Tensor:
    """The same by the reference backend's functions, sequence by sequence."""
    spec, mode = heads.spec, KV_MODES[kv_dtype]

    def kept(x_CJD: Tensor, rule: KVRule, scale_J: Tensor) -> Tensor:
        return round_kv(x_CJD, rule, scale_J.unsqueeze(-1) if rule.is_static else None)

    attended = []
    for part, own_CAD in zip(parts, qkv, strict=True):
        query, key, value = own_CAD.split((spec.num_heads, spec.num_kv_heads, spec.num_kv_heads), dim=1)
        positions_C = torch.arange(own_CAD.shape[0])
        sees_CC = positions_C <= positions_C[:, None]
        if spec.window is not None:
            sees_CC &= positions_C > positions_C[:, None] - spec.window
        query, key = rotate(query, spec.rope, positions_C), rotate(key, spec.rope, positions_C)
        keys, values = kept(key, mode.key, scales.key[0]), kept(value, mode.value, scales.value[0])
        attended.append(attend(spec, query[part.num_before :], keys, values, sees_CC[part.num_before :]))
    return torch.cat(attended)


def random_qkv(heads: Heads, parts: Sequence[Part], seed: int) -> list[Tensor]:
    """[C, A, D] of each sequence."""
    generator = torch.Generator().manual_seed(seed)
    num = heads.num_heads + 2 * heads.num_kv_heads
    return [torch.randn(part.num_before + part.num_new, num, heads.head_dim, generator=generator) for part in parts]

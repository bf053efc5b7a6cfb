"""Paged keys and values on the CPU. Heads come first, so that a gather of blocks is already laid out for attention.

Shapes: T tokens, J KV heads, h heads of one store (J, or 2J where keys and values lie together), D head_dim, B blocks,
b block_size, W elements that hold one head's codes, P parameters beside them, S sequences of a group, M blocks of each,
C = M * b context tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quantpipe.backends.memory import lazy_zeros
from quantpipe.formats.kv_mode import KV_MODES, KVRule
from quantpipe.formats.kv_rounding import decode_kv, encode_kv
from quantpipe.formats.kv_scales import KVScales


@dataclass(frozen=True)
class CpuKVStore:
    """One layer's keys, its values, or both, under one rule: codes [h, B, b * W] and parameters [h, B, b * P]."""

    rule: KVRule
    block_size: int
    codes: Tensor
    parameters: Tensor | None
    scale_h1: Tensor | None

    @classmethod
    def allocate(
        cls, num_heads: int, num_blocks: int, block_size: int, head_dim: int, rule: KVRule, scale_h: Tensor | None
    ) -> "CpuKVStore":
        """Zeroed, so that the padding of a batch reads finite numbers."""
        codes = lazy_zeros((num_heads, num_blocks, block_size * rule.code_width(head_dim)), rule.code_dtype)
        parameters = None
        if rule.num_parameters:
            parameters = lazy_zeros((num_heads, num_blocks, block_size * rule.num_parameters), rule.parameter_dtype)
        return cls(rule, block_size, codes, parameters, None if scale_h is None else scale_h.unsqueeze(-1))

    @property
    def num_bytes(self) -> int:
        return self.codes.nbytes + (0 if self.parameters is None else self.parameters.nbytes)

    def write(self, new_ThD: Tensor, slots_T: Tensor) -> None:
        """Store the tokens of this step in their slots."""
        codes_ThW, parameters_ThP = encode_kv(new_ThD, self.rule, self.scale_h1)
        _scatter(self.codes, codes_ThW, slots_T)
        if self.parameters is not None and parameters_ThP is not None:
            _scatter(self.parameters, parameters_ThP, slots_T)

    def read(self, block_ids: Tensor, num_sequences: int) -> Tensor:
        """Float32 [h, S, C, D] of ``block_ids`` [S * M], sequence by sequence."""
        codes_hSCW = self._gather(self.codes, block_ids, num_sequences)
        parameters_hSCP = None
        if self.parameters is not None:
            parameters_hSCP = self._gather(self.parameters, block_ids, num_sequences)
        scale_h111 = None if self.scale_h1 is None else self.scale_h1.view(-1, 1, 1, 1)
        return decode_kv(codes_hSCW, parameters_hSCP, self.rule, scale_h111)

    def copy_blocks(self, sources: Tensor, destinations: Tensor) -> None:
        """Give destination blocks what the sources hold."""
        for stored in (self.codes, self.parameters):
            if stored is not None:
                stored.index_copy_(1, destinations, stored.index_select(1, sources))

    def _gather(self, stored: Tensor, block_ids: Tensor, num_sequences: int) -> Tensor:
        width = stored.shape[2] // self.block_size
        return stored.index_select(1, block_ids).view(stored.shape[0], num_sequences, -1, width)


@dataclass
class CpuKVCache:
    """Of each layer one store that holds keys' heads, then values', or one of each where their rules differ.

    ``has_nonfinite`` is set once a step overflowed: from then on nothing may read beyond a sequence's own tokens, since
    a hidden NaN still spreads through a mask.
    """

    num_blocks: int
    block_size: int
    dtype: str
    layers: tuple[tuple[CpuKVStore, ...], ...]
    has_nonfinite: bool = False

    @classmethod
    def allocate(
        cls,
        num_blocks: int,
        block_size: int,
        dtype: str,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        scales: KVScales | None = None,
    ) -> "CpuKVCache":
        """Zeroed; ``scales`` belong to the modes that need them."""
        mode = KV_MODES[dtype]

        def stores(layer: int) -> tuple[CpuKVStore, ...]:
            parts = [] if scales is None else [scales.key[layer], scales.value[layer]]
            if mode.key == mode.value:
                scale_h = torch.cat(parts) if parts else None
                rules = [(2 * num_kv_heads, mode.key, scale_h)]
            else:
                key_J, value_J = parts or (None, None)
                rules = [(num_kv_heads, mode.key, key_J), (num_kv_heads, mode.value, value_J)]
            return tuple(
                CpuKVStore.allocate(num_heads, num_blocks, block_size, head_dim, rule, scale)
                for num_heads, rule, scale in rules
            )

        return cls(num_blocks, block_size, dtype, tuple(stores(layer) for layer in range(num_layers)))

    @property
    def num_bytes(self) -> int:
        return sum(store.num_bytes for stores in self.layers for store in stores)

    @property
    def notes(self) -> tuple[str, ...]:
        return ()

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks, (source, destination) each, in every layer."""
        sources, destinations = torch.tensor(copies, dtype=torch.int64).view(-1, 2).unbind(1)
        for stores in self.layers:
            for store in stores:
                store.copy_blocks(sources, destinations)

    def write(self, layer: int, new_THD: Tensor, slots_T: Tensor) -> None:
        """Store this step's keys, then values, [T, 2J, D]."""
        stores = self.layers[layer]
        for store, part_ThD in zip(stores, new_THD.chunk(len(stores), dim=1), strict=True):
            store.write(part_ThD, slots_T)

    def read(self, layer: int, block_ids: Tensor, num_sequences: int) -> tuple[Tensor, Tensor]:
        """Keys and values [J, S, C, D] in float32 of ``block_ids`` [S * M], sequence by sequence."""
        parts = [store.read(block_ids, num_sequences) for store in self.layers[layer]]
        key_JSCD, value_JSCD = parts if len(parts) == 2 else parts[0].chunk(2)
        return key_JSCD, value_JSCD


def _scatter(stored: Tensor, new_ThW: Tensor, slots_T: Tensor) -> None:
    stored.view(stored.shape[0], -1, new_ThW.shape[-1]).index_copy_(1, slots_T, new_ThW.transpose(0, 1))

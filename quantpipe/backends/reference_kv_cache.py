"""Paged keys and values of the reference backend: the rules of ``formats.kv_mode``, applied token by token.

Shapes: T tokens of a step, C context tokens of one sequence, J KV heads, D head_dim, B blocks, b block_size, W elements
that hold one head's codes, P parameters beside them.
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
class ReferenceKVStore:
    """Keys, or values, of one layer: codes [B, b, J, W], parameters [B, b, J, P], and what a static rule needs."""

    rule: KVRule
    codes: Tensor
    parameters: Tensor | None
    scale_J1: Tensor | None

    @classmethod
    def allocate(
        cls, shape: tuple[int, int, int], head_dim: int, rule: KVRule, scale_J: Tensor | None
    ) -> "ReferenceKVStore":
        """Zeroed; ``shape`` is [B, b, J]."""
        codes = lazy_zeros((*shape, rule.code_width(head_dim)), rule.code_dtype)
        parameters = None
        if rule.num_parameters:
            parameters = lazy_zeros((*shape, rule.num_parameters), rule.parameter_dtype)
        return cls(rule, codes, parameters, None if scale_J is None else scale_J.unsqueeze(-1))

    @property
    def num_bytes(self) -> int:
        return self.codes.nbytes + (0 if self.parameters is None else self.parameters.nbytes)

    def write(self, new_TJD: Tensor, slots_T: Tensor) -> None:
        """Store the tokens of this step in their slots."""
        codes_TJW, parameters_TJP = encode_kv(new_TJD, self.rule, self.scale_J1)
        self.codes.flatten(0, 1)[slots_T] = codes_TJW
        if self.parameters is not None and parameters_TJP is not None:
            self.parameters.flatten(0, 1)[slots_T] = parameters_TJP

    def read(self, blocks_B: Tensor, context_len: int) -> Tensor:
        """The first ``context_len`` tokens [C, J, D] of a sequence that owns ``blocks_B``, float32."""
        block_size = self.codes.shape[1]
        blocks = blocks_B[: -(-context_len // block_size)]
        codes_CJW = self.codes[blocks].flatten(0, 1)[:context_len]
        parameters_CJP = None
        if self.parameters is not None:
            parameters_CJP = self.parameters[blocks].flatten(0, 1)[:context_len]
        return decode_kv(codes_CJW, parameters_CJP, self.rule, self.scale_J1)

    def copy_blocks(self, sources: Tensor, destinations: Tensor) -> None:
        """Give destination blocks what the sources hold."""
        for stored in (self.codes, self.parameters):
            if stored is not None:
                stored[destinations] = stored[sources]


@dataclass(frozen=True)
class ReferenceKVCache:
    """Keys and values of every layer."""

    num_blocks: int
    block_size: int
    dtype: str
    keys: tuple[ReferenceKVStore, ...]
    values: tuple[ReferenceKVStore, ...]

    @classmethod
    def allocate(
        cls,
        num_blocks: int,
        block_size: int,
        dtype: str,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        scales: KVScales | None,
    ) -> "ReferenceKVCache":
        """Zeroed; ``scales`` belong to the modes that need them."""
        mode, shape = KV_MODES[dtype], (num_blocks, block_size, num_kv_heads)

        def per_layer(rule: KVRule, scales: tuple[Tensor | None, ...]) -> tuple[ReferenceKVStore, ...]:
            return tuple(ReferenceKVStore.allocate(shape, head_dim, rule, scale_J) for scale_J in scales)

        none = (None,) * num_layers
        keys = per_layer(mode.key, none if scales is None else scales.key)
        values = per_layer(mode.value, none if scales is None else scales.value)
        return cls(num_blocks, block_size, dtype, keys, values)

    @property
    def num_bytes(self) -> int:
        return sum(store.num_bytes for store in (*self.keys, *self.values))

    @property
    def notes(self) -> tuple[str, ...]:
        return ()

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks, (source, destination) each, in every layer."""
        sources, destinations = torch.tensor(copies, dtype=torch.int64).view(-1, 2).unbind(1)
        for store in (*self.keys, *self.values):
            store.copy_blocks(sources, destinations)

"""Paged keys and values on the GPU: one allocation for all layers, in the layout that the attention kernels read.

Shapes: L layers, B blocks, J KV heads, b block_size, W elements that hold one head's codes, P parameters beside them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from quantpipe.backends.triton.ops.copy_blocks import copy_blocks
from quantpipe.formats.kv_mode import KV_MODES, KVRule
from quantpipe.formats.kv_scales import KVScales


class LayerStore(NamedTuple):
    """Keys, or values, of one layer: codes [B, J, b, W], parameters [B, J, P, b], static scales float32 [J]."""

    rule: KVRule
    codes: Tensor
    parameters: Tensor | None
    scale_J: Tensor | None

    @property
    def num_kv_heads(self) -> int:
        return self.codes.shape[1]

    @property
    def block_size(self) -> int:
        return self.codes.shape[2]


@dataclass(frozen=True)
class TritonKVStore:
    """Keys, or values, of all layers: codes [L, B, J, b, W], parameters [L, B, J, P, b], static scales [L, J]."""

    rule: KVRule
    codes: Tensor
    parameters: Tensor | None
    scale_LJ: Tensor | None

    @classmethod
    def allocate(
        cls,
        shape: tuple[int, int, int, int],
        head_dim: int,
        rule: KVRule,
        dtype: torch.dtype,
        device: torch.device,
        scales: tuple[Tensor, ...] | None,
    ) -> "TritonKVStore":
        """Zeroed; ``shape`` is [L, B, J, b]."""
        code_dtype = dtype if rule.bits is None else rule.code_dtype
        codes = torch.zeros(*shape, rule.code_width(head_dim), dtype=code_dtype, device=device)
        parameters = None
        if rule.num_parameters:
            per_head = (*shape[:3], rule.num_parameters, shape[3])
            parameters = torch.zeros(per_head, dtype=rule.parameter_dtype, device=device)
        scale_LJ = torch.stack(scales).to(device) if scales is not None and rule.is_static else None
        return cls(rule, codes, parameters, scale_LJ)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """What blocks consist of."""
        return (self.codes,) if self.parameters is None else (self.codes, self.parameters)

    def layer(self, index: int) -> LayerStore:
        """The part of one layer; shares memory."""
        parameters = None if self.parameters is None else self.parameters[index]
        scale_J = None if self.scale_LJ is None else self.scale_LJ[index]
        return LayerStore(self.rule, self.codes[index], parameters, scale_J)


@dataclass(frozen=True)
class TritonKVCache:
    """Keys and values of every layer."""

    num_blocks: int
    block_size: int
    dtype: str
    keys: TritonKVStore
    values: TritonKVStore

    @classmethod
    def allocate(
        cls,
        num_blocks: int,
        block_size: int,
        dtype: str,
        sizes: tuple[int, int, int],
        compute_dtype: torch.dtype,
        device: torch.device,
        scales: KVScales | None,
    ) -> "TritonKVCache":
        """Zeroed, for ``sizes`` (layers, KV heads, head_dim); ``scales`` belong to the modes that need them."""
        mode = KV_MODES[dtype]
        num_layers, num_kv_heads, head_dim = sizes
        shape = (num_layers, num_blocks, num_kv_heads, block_size)

        def store(rule: KVRule, scales: tuple[Tensor, ...] | None) -> TritonKVStore:
            return TritonKVStore.allocate(shape, head_dim, rule, compute_dtype, device, scales)

        keys = store(mode.key, None if scales is None else scales.key)
        values = store(mode.value, None if scales is None else scales.value)
        return cls(num_blocks, block_size, dtype, keys, values)

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for store in (self.keys, self.values) for tensor in store.tensors)

    @property
    def notes(self) -> tuple[str, ...]:
        return ()

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks, (source, destination) each, in every layer."""
        for store in (self.keys, self.values):
            for pool in store.tensors:
                copy_blocks(pool, copies)

"""Paged keys and values as the compiled kernels read them: of each layer one buffer, in which a block is one run.

Shapes: L layers, J KV heads, D head_dim, B blocks, b block_size.
"""

import ctypes
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quantpipe.backends.cpu.native.library import Library
from quantpipe.backends.cpu.native.linears import address
from quantpipe.backends.cpu.native.structures import KV, KV_FLOAT32, KV_INT4, KV_INT8, KV_INT8_STATIC, KVKind
from quantpipe.formats.kv_mode import KV_MODES, KVRule
from quantpipe.formats.kv_scales import KVScales

# Where a buffer may begin: a cache line.
ALIGNMENT = 64

Bytes = npt.NDArray[np.uint8]


class NativeKVCache:
    """The pool of KV blocks of one engine. ``structure`` is what the kernels are given."""

    def __init__(
        self,
        library: Library,
        num_blocks: int,
        block_size: int,
        dtype: str,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        scales: KVScales | None = None,
    ) -> None:
        """Empty; ``scales`` belong to the modes that need them."""
        self.num_blocks, self.block_size, self.dtype = num_blocks, block_size, dtype
        mode = KV_MODES[dtype]
        self._block_bytes = block_bytes(library, num_kv_heads, head_dim, block_size, dtype)
        self._layers = [_aligned_zeros(num_blocks, self._block_bytes) for _ in range(num_layers)]
        self._addresses = (ctypes.c_void_p * num_layers)(*(layer.ctypes.data for layer in self._layers))
        self._scales: list[Tensor] = []
        if scales is not None:
            self._scales = [torch.stack(list(part)).float().contiguous() for part in (scales.key, scales.value)]
        self._tile = int(library.call("qp_kv_tile"))
        key_scales, value_scales = map(address, self._scales or (None, None))
        self.structure = KV(
            block_size=block_size,
            num_blocks=num_blocks,
            key_kind=kv_kind(mode.key),
            value_kind=kv_kind(mode.value),
            layers=self._addresses,
            key_scales=key_scales,
            value_scales=value_scales,
        )

    @property
    def num_bytes(self) -> int:
        return len(self._layers) * self.num_blocks * self._block_bytes

    @property
    def notes(self) -> tuple[str, ...]:
        if self.block_size % self._tile == 0:
            return ()
        return (
            f"KV blocks of {self.block_size} tokens are read one token at a time, slower; engine.block_size: a "
            f"multiple of {self._tile} is faster",
        )

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks, (source, destination) each, in every layer."""
        if not copies:
            return
        sources, destinations = (list(ids) for ids in zip(*copies, strict=True))
        for layer in self._layers:
            layer[destinations] = layer[sources]  # numpy gathers all sources before it writes


def kv_kind(rule: KVRule) -> KVKind:
    """The number by which the kernels know a rule."""
    if rule.bits is None:
        return KV_FLOAT32
    if rule.bits == 4:
        return KV_INT4
    return KV_INT8_STATIC if rule.is_static else KV_INT8


def block_bytes(library: Library, num_kv_heads: int, head_dim: int, block_size: int, dtype: str) -> int:
    """Bytes of one block of one layer. NativeError where the kernels have no such layout."""
    mode = KV_MODES[dtype]
    return library.check(
        "qp_kv_block_bytes", num_kv_heads, head_dim, block_size, kv_kind(mode.key), kv_kind(mode.value)
    )


def _aligned_zeros(num_blocks: int, block_bytes: int) -> Bytes:
    """Zeros [B, bytes] that take memory only once they are written."""
    num_bytes = num_blocks * block_bytes
    memory: Bytes = np.zeros(num_bytes + ALIGNMENT, dtype=np.uint8)
    first = -memory.ctypes.data % ALIGNMENT
    return memory[first : first + num_bytes].reshape(num_blocks, block_bytes)

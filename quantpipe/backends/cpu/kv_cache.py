"""Paged keys and values on the CPU. Heads come first, so that a gather of blocks is already laid out for attention.

Shapes: T tokens, J KV heads (keys' then values', 2J together), D head_dim, B blocks, b block_size, S sequences of a
group, M blocks of each, C = M * b context tokens.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from quantpipe.backends.memory import lazy_zeros
from quantpipe.formats.layout import quantize_activations

INT8_DIVISOR = 127.0
SCALE_BYTES = 4


@dataclass
class CpuKVCache:
    """Per layer [2J, B, b * D]: float32, or int8 with float32 scales [2J, B, b] beside it.

    ``has_nonfinite`` is set once a step overflowed: from then on nothing may read beyond a sequence's own tokens, since
    a hidden NaN still spreads through a mask.
    """

    num_blocks: int
    block_size: int
    dtype: str
    layers: tuple[Tensor, ...]
    scales: tuple[Tensor, ...]
    has_nonfinite: bool = False

    @classmethod
    def allocate(
        cls, num_blocks: int, block_size: int, dtype: str, num_layers: int, num_kv_heads: int, head_dim: int
    ) -> "CpuKVCache":
        """Zeroed, so that the padding of a batch reads finite numbers."""
        shape = (2 * num_kv_heads, num_blocks, block_size)
        stored = torch.float32 if dtype == "auto" else torch.int8
        layers = (lazy_zeros((*shape[:2], block_size * head_dim), stored) for _ in range(num_layers))
        scales = (lazy_zeros(shape, torch.float32) for _ in range(0 if dtype == "auto" else num_layers))
        return cls(num_blocks, block_size, dtype, tuple(layers), tuple(scales))

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in (*self.layers, *self.scales))

    def write(self, layer: int, new_TJD: Tensor, slots_T: Tensor) -> None:
        """Store keys and values [T, 2J, D] of this step; int8 quantizes each token and head by itself."""
        stored = self.layers[layer]
        slots_JcD = stored.view(stored.shape[0], -1, new_TJD.shape[-1])
        if self.dtype == "auto":
            slots_JcD.index_copy_(1, slots_T, new_TJD.transpose(0, 1))
            return
        q_TJD, scale_TJ1 = quantize_activations(new_TJD, INT8_DIVISOR)
        slots_JcD.index_copy_(1, slots_T, q_TJD.transpose(0, 1))
        self.scales[layer].view(stored.shape[0], -1).index_copy_(1, slots_T, scale_TJ1.squeeze(-1).T)

    def read(self, layer: int, block_ids: Tensor, num_sequences: int) -> Tensor:
        """Keys and values [2J, S, C, D] in float32 of ``block_ids`` [S * M], sequence by sequence."""
        stored = self.layers[layer]
        num_heads, num_columns = stored.shape[0], stored.shape[2]
        head_dim = num_columns // self.block_size
        gathered = stored.index_select(1, block_ids).view(num_heads, num_sequences, -1, head_dim)
        if self.dtype == "auto":
            return gathered
        scale = self.scales[layer].index_select(1, block_ids).view(num_heads, num_sequences, -1, 1)
        return gathered.float().mul_(scale)


def bytes_per_block(block_size: int, dtype: str, num_layers: int, num_kv_heads: int, head_dim: int) -> int:
    """Bytes of one block over all layers, keys and values."""
    head_bytes = 4 * head_dim if dtype == "auto" else head_dim + SCALE_BYTES
    return 2 * num_layers * block_size * num_kv_heads * head_bytes

"""Executes a step on the CPU: a loop over layers of torch calls, as few per layer as the arithmetic allows.

Shapes: T tokens, R rows whose logits are wanted, V vocabulary, H hidden_size (in heads: query heads), J KV heads,
D head_dim, I intermediate size.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from quantpipe.backends.cpu.attention import attend, plan_groups
from quantpipe.backends.cpu.kernel_check import CpuLinear
from quantpipe.backends.cpu.kv_cache import CpuKVCache
from quantpipe.backends.protocol import BatchInput, KVCache
from quantpipe.formats.kv_mode import KV_MODES
from quantpipe.formats.kv_scales import read_kv_scales
from quantpipe.models.description import AttentionSpec, DecoderDescription, RopeSpec


@dataclass(frozen=True)
class CpuNorm:
    """RMS norm."""

    weight_H: Tensor
    eps: float

    def __call__(self, x_TH: Tensor) -> Tensor:
        return torch.nn.functional.rms_norm(x_TH, self.weight_H.shape, self.weight_H, self.eps)


@dataclass(frozen=True)
class CpuLayer:
    """One layer, its query, key and value linears joined into one, and its gate and up linears as well."""

    attention_norm: CpuNorm
    query_key_value: CpuLinear
    output: CpuLinear
    mlp_norm: CpuNorm
    gate_up: CpuLinear
    down: CpuLinear


@dataclass(frozen=True)
class Rotation:
    """This step's rope angles: x * cos + (x, its halves swapped) * sin, the sign of the first half in ``sin_T1D``."""

    cos_T1D: Tensor
    sin_T1D: Tensor

    @classmethod
    def of(cls, rope: RopeSpec, positions_T: Tensor) -> "Rotation":
        angles_TP = positions_T.float().unsqueeze(-1) * torch.tensor(rope.inverse_frequencies)
        cos_TP, sin_TP = angles_TP.cos(), angles_TP.sin()
        return cls(torch.cat((cos_TP, cos_TP), -1).unsqueeze(1), torch.cat((-sin_TP, sin_TP), -1).unsqueeze(1))

    def apply_(self, x_THD: Tensor) -> None:
        """Rotate in place."""
        swapped_THD = x_THD.roll(x_THD.shape[-1] // 2, -1)
        x_THD.mul_(self.cos_T1D).addcmul_(swapped_THD, self.sin_T1D)


@dataclass(frozen=True)
class CpuExecutor:
    """A loaded model."""

    folder: Path
    description: DecoderDescription
    embedding_VH: Tensor
    layers: tuple[CpuLayer, ...]
    final_norm: CpuNorm
    lm_head: CpuLinear
    weight_bytes: int
    notes: tuple[str, ...]

    def kv_bytes_per_block(self, block_size: int, dtype: str) -> int:
        shape = self.description
        return shape.num_layers * block_size * KV_MODES[dtype].token_bytes(shape.num_kv_heads, shape.head_dim)

    def allocate_kv_cache(self, num_blocks: int, block_size: int, dtype: str) -> CpuKVCache:
        shape = self.description
        sizes = (shape.num_layers, shape.num_kv_heads, shape.head_dim)
        scales = read_kv_scales(self.folder, *sizes[:2]) if KV_MODES[dtype].needs_scales else None
        return CpuKVCache.allocate(num_blocks, block_size, dtype, *sizes, scales)

    @torch.no_grad()
    def forward(self, batch: BatchInput, kv_cache: KVCache) -> Tensor:
        """Write this step's keys and values, and return float32 logits [R, V]."""
        if not isinstance(kv_cache, CpuKVCache):
            raise TypeError(f"the cpu backend was given a {type(kv_cache).__name__}")
        x_TH = self._run_layers(batch, kv_cache)
        kv_cache.has_nonfinite = kv_cache.has_nonfinite or not bool(x_TH.isfinite().all())
        if batch.logit_rows_R.numel() == 0:
            return torch.empty(0, self.description.vocab_size)
        return self.lm_head(self.final_norm(x_TH.index_select(0, batch.logit_rows_R)))

    @torch.inference_mode()  # cheaper per call than no_grad; logits are made outside, so that callers may change them
    def _run_layers(self, batch: BatchInput, kv_cache: CpuKVCache) -> Tensor:
        groups = plan_groups(batch, kv_cache)
        rotation = Rotation.of(self.description.rope, batch.positions_T)
        x_TH = self.embedding_VH.index_select(0, batch.token_ids_T).float()
        for index, layer in enumerate(self.layers):
            query_THD = self._project(index, layer, x_TH, rotation, batch.slot_mapping_T, kv_cache)
            attended_TK = attend(self.description.layers[index].attention, groups, index, query_THD, kv_cache)
            x_TH.add_(layer.output(attended_TK))
            gate_TI, up_TI = layer.gate_up(layer.mlp_norm(x_TH)).chunk(2, dim=-1)
            x_TH.add_(layer.down(torch.nn.functional.silu(gate_TI).mul_(up_TI)))
        return x_TH

    def _project(
        self, index: int, layer: CpuLayer, x_TH: Tensor, rotation: Rotation, slots_T: Tensor, kv: CpuKVCache
    ) -> Tensor:
        """Queries [T, H, D]; keys and values go to the cache."""
        spec: AttentionSpec = self.description.layers[index].attention
        heads_THD = layer.query_key_value(layer.attention_norm(x_TH)).view(x_TH.shape[0], -1, spec.head_dim)
        rotation.apply_(heads_THD[:, : spec.num_heads + spec.num_kv_heads])
        kv.write(index, heads_THD[:, spec.num_heads :], slots_T)
        return heads_THD[:, : spec.num_heads]

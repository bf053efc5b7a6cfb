"""Executes a step on the CPU: a loop over layers of torch calls, as few per layer as the arithmetic allows.

Shapes: T tokens, R rows whose logits are wanted, V vocabulary, H hidden_size (in heads: query heads), J KV heads,
D head_dim, I intermediate size.
"""

from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from quantpipe.backends.activations import ACTIVATIONS
from quantpipe.backends.cpu.attention import AttentionGroup, attend, plan_groups
from quantpipe.backends.cpu.kernel_check import CpuLinear
from quantpipe.backends.cpu.kv_cache import CpuKVCache
from quantpipe.backends.cpu.rotation import Rotation
from quantpipe.backends.most_likely import most_likely
from quantpipe.backends.protocol import BatchInput, DecodeLimits, KVCache
from quantpipe.formats.kv_mode import KV_MODES
from quantpipe.formats.kv_scales import read_kv_scales
from quantpipe.models.description import DecoderDescription, RopeSpec


@dataclass(frozen=True)
class CpuNorm:
    """RMS norm over the last dimension."""

    weight: Tensor
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        return torch.nn.functional.rms_norm(x, self.weight.shape, self.weight, self.eps)


@dataclass(frozen=True)
class CpuLayer:
    """One layer, its query, key and value linears joined into one, and its gate and up linears as well.

    ``kind`` is the number of its attention kind in ``CpuExecutor.kinds``.
    """

    kind: int
    attention_norm: CpuNorm
    query_key_value: CpuLinear
    query_norm: CpuNorm | None
    key_norm: CpuNorm | None
    output: CpuLinear
    post_attention_norm: CpuNorm | None
    mlp_norm: CpuNorm
    gate_up: CpuLinear
    down: CpuLinear
    post_mlp_norm: CpuNorm | None


@dataclass(frozen=True)
class KindPlan:
    """What a step does alike in all layers of one kind."""

    rotation: Rotation
    sink_rotation: Rotation | None
    groups: list[AttentionGroup]

    @classmethod
    def of(cls, rope: RopeSpec, batch: BatchInput, kv: CpuKVCache, window: int | None) -> "KindPlan":
        """``window`` is that of the layers in this batch."""
        sink_positions_T = batch.sink_positions_T(window)
        sink_rotation = None if sink_positions_T is None else Rotation.of(rope, sink_positions_T)
        return cls(Rotation.of(rope, batch.positions_T), sink_rotation, plan_groups(batch, kv, window))


@dataclass
class ContextCount:
    """Tokens that attention looked back on: those wanted, and those read to make a group's contexts equally long."""

    num_wanted: int = 0
    num_read: int = 0


@dataclass(frozen=True)
class CpuExecutor:
    """A loaded model. ``kinds``: the ropes and windows of its layers, each pair once."""

    folder: Path
    description: DecoderDescription
    embedding_VH: Tensor
    kinds: tuple[tuple[RopeSpec, int | None], ...]
    layers: tuple[CpuLayer, ...]
    final_norm: CpuNorm
    lm_head: CpuLinear
    weight_bytes: int
    notes: tuple[str, ...]
    _context_count: ContextCount = field(default_factory=ContextCount)

    @property
    def device(self) -> torch.device:
        return self.embedding_VH.device

    @property
    def supports_windows(self) -> bool:
        return True

    @property
    def context_tokens(self) -> tuple[int, int]:
        return self._context_count.num_wanted, self._context_count.num_read

    def kv_bytes_per_block(self, block_size: int, dtype: str) -> int:
        shape = self.description
        return shape.num_layers * block_size * KV_MODES[dtype].token_bytes(shape.num_kv_heads, shape.head_dim)

    def allocate_kv_cache(self, num_blocks: int, block_size: int, dtype: str) -> CpuKVCache:
        shape = self.description
        sizes = (shape.num_layers, shape.num_kv_heads, shape.head_dim)
        scales = read_kv_scales(self.folder, *sizes[:2]) if KV_MODES[dtype].needs_scales else None
        return CpuKVCache.allocate(num_blocks, block_size, dtype, *sizes, scales)

    def record_decodes(self, kv_cache: KVCache, limits: DecodeLimits) -> None:
        """Nothing: there is no launch to save."""

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

    def forward_greedy(self, batch: BatchInput, kv_cache: KVCache) -> Tensor:
        """Write this step's keys and values, and return the most likely token of each row [R]."""
        return most_likely(self.forward(batch, kv_cache))

    @property
    def step_times_s(self) -> dict[str, float]:
        return {}

    @torch.inference_mode()  # cheaper per call than no_grad; logits are made outside, so that callers may change them
    def _run_layers(self, batch: BatchInput, kv_cache: CpuKVCache) -> Tensor:
        x_TH = self.embedding_VH.index_select(0, batch.token_ids_T).float()
        if self.description.embedding_scale != 1:
            x_TH.mul_(self.description.embedding_scale)
        plans = [KindPlan.of(rope, batch, kv_cache, batch.layer_window(window)) for rope, window in self.kinds]
        self._context_count.num_wanted += sum(batch.held_lens(kv_cache.block_size))
        self._context_count.num_read += sum(group.num_sequences * group.context_len for group in plans[0].groups)
        for index, (layer, described) in enumerate(zip(self.layers, self.description.layers, strict=True)):
            plan = plans[layer.kind]
            query_THD, sink_query_THD = self._project(index, layer, x_TH, plan, batch.slot_mapping_T, kv_cache)
            attended = attend(described.attention, plan.groups, index, query_THD, sink_query_THD, kv_cache)
            attended_TH = layer.output(attended)
            x_TH.add_(_normed(layer.post_attention_norm, attended_TH))
            gate_TI, up_TI = layer.gate_up(layer.mlp_norm(x_TH)).chunk(2, dim=-1)
            down_TH = layer.down(ACTIVATIONS[described.mlp.activation](gate_TI).mul_(up_TI))
            x_TH.add_(_normed(layer.post_mlp_norm, down_TH))
        return x_TH

    def _project(
        self, index: int, layer: CpuLayer, x_TH: Tensor, plan: KindPlan, slots_T: Tensor, kv: CpuKVCache
    ) -> tuple[Tensor, Tensor | None]:
        """Queries [T, H, D], and those turned to meet sinks, if there are any; keys and values go to the cache."""
        spec = self.description.layers[index].attention
        heads_THD = layer.query_key_value(layer.attention_norm(x_TH)).view(x_TH.shape[0], -1, spec.head_dim)
        num_turned = spec.num_heads + spec.num_kv_heads
        query_THD, key_TJD = heads_THD[:, : spec.num_heads], heads_THD[:, spec.num_heads : num_turned]
        for norm, part in ((layer.query_norm, query_THD), (layer.key_norm, key_TJD)):
            if norm is not None:
                part.copy_(norm(part))
        sink_query_THD = None
        if plan.sink_rotation is not None:
            sink_query_THD = query_THD.clone()
            plan.sink_rotation.apply_(sink_query_THD)
        plan.rotation.apply_(heads_THD[:, :num_turned])
        kv.write(index, heads_THD[:, spec.num_heads :], slots_T)
        return query_THD, sink_query_THD


def _normed(norm: CpuNorm | None, x_TH: Tensor) -> Tensor:
    return x_TH if norm is None else norm(x_TH)

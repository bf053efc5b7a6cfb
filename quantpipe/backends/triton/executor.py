"""Executes a step on the GPU: kernels in a row, without a word from the device to the host in between.

Everything that differs from step to step is read from the memory of ``StepTensors``: ``run`` of the same shapes may be
recorded once and replayed.

Shapes: T tokens, R rows whose logits are wanted, V vocabulary, H hidden_size (in heads: query heads), J KV heads,
D head_dim, I intermediate size, P pairs of dimensions that rope turns.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from quantpipe.backends.protocol import BatchInput, DecodeLimits, KVCache
from quantpipe.backends.triton.graphs import RecordedDecodes, Replayed, recorder_for
from quantpipe.backends.triton.kv_cache import TritonKVCache
from quantpipe.backends.triton.linear import TritonLinear
from quantpipe.backends.triton.ops.activation import gated, gated_quantized
from quantpipe.backends.triton.ops.attention_chunk import attend_chunks, tokens_per_tile
from quantpipe.backends.triton.ops.attention_decode import attend_decodes, num_splits
from quantpipe.backends.triton.ops.attention_tile import Sight
from quantpipe.backends.triton.ops.norm import rms_norm, rms_norm_quantized
from quantpipe.backends.triton.ops.rope_kv import HeadNorm, Turns, rope_and_write
from quantpipe.backends.triton.ops.sampling import most_likely
from quantpipe.backends.triton.requirements import no_room_for_graphs, no_room_for_kv
from quantpipe.backends.triton.step import StepTensors, to_device, to_host
from quantpipe.formats.kv_mode import KV_MODES
from quantpipe.formats.kv_scales import read_kv_scales
from quantpipe.models.description import Activation, AttentionSpec, DecoderDescription, RopeSpec


class Norm(NamedTuple):
    """RMS norm over the last dimension."""

    weight_H: Tensor
    eps: float


@dataclass(frozen=True)
class TritonLayer:
    """One layer, its query, key and value linears joined into one, and its gate and up linears as well."""

    attention: AttentionSpec
    activation: Activation
    attention_norm: Norm
    query_key_value: TritonLinear
    query_norm: HeadNorm | None
    key_norm: HeadNorm | None
    output: TritonLinear
    post_attention_norm: Norm | None
    mlp_norm: Norm
    gate_up: TritonLinear
    down: TritonLinear
    post_mlp_norm: Norm | None


class LayerTurns(NamedTuple):
    """How layers of one rope and window turn queries and keys in a step, and what they see."""

    own: Turns
    sinks: Turns | None
    sight: Sight


@dataclass(frozen=True)
class TritonExecutor:
    """A loaded model. ``dtype`` is that of hidden states, and of keys and values where those are not rounded.

    ``frequencies`` are the ropes' inverse frequencies, float64 [P]. ``num_processors`` of the GPU have to be kept busy.
    """

    folder: Path
    description: DecoderDescription
    dtype: torch.dtype
    embedding_VH: Tensor
    layers: tuple[TritonLayer, ...]
    final_norm: Norm
    lm_head: TritonLinear
    frequencies: dict[RopeSpec, Tensor]
    num_processors: int
    activation_divisor: float
    weight_bytes: int
    notes: tuple[str, ...]
    recorded: list[RecordedDecodes] = field(default_factory=list)

    @property
    def device(self) -> torch.device:
        return self.embedding_VH.device

    @property
    def supports_windows(self) -> bool:
        return True

    @property
    def context_tokens(self) -> tuple[int, int]:
        """Not counted: each sequence's own tokens are read, so that nothing is padded."""
        return 0, 0

    @property
    def step_times_s(self) -> dict[str, float]:
        return {}

    def kv_bytes_per_block(self, block_size: int, dtype: str) -> int:
        shape = self.description
        per_token = KV_MODES[dtype].token_bytes(shape.num_kv_heads, shape.head_dim, self.dtype.itemsize)
        return shape.num_layers * block_size * per_token

    def allocate_kv_cache(self, num_blocks: int, block_size: int, dtype: str) -> TritonKVCache:
        shape = self.description
        sizes = (shape.num_layers, shape.num_kv_heads, shape.head_dim)
        scales = read_kv_scales(self.folder, *sizes[:2]) if KV_MODES[dtype].needs_scales else None
        try:
            return TritonKVCache.allocate(num_blocks, block_size, dtype, sizes, self.dtype, self.device, scales)
        except torch.OutOfMemoryError:
            needed_bytes = num_blocks * self.kv_bytes_per_block(block_size, dtype)
            free_bytes, total_bytes = torch.cuda.mem_get_info(self.device)
        raise no_room_for_kv(num_blocks, needed_bytes, free_bytes, total_bytes)

    def record_decodes(self, kv_cache: KVCache, limits: DecodeLimits) -> None:
        """Record decode steps over ``kv_cache``, in place of those that were recorded before."""
        self.recorded.clear()
        shape, kv = self.description, _own(kv_cache)
        try:
            recorder = recorder_for(self.device)
            self.recorded.append(RecordedDecodes(limits, kv, self.run, shape.vocab_size, self.device, recorder))
        except torch.OutOfMemoryError as error:
            raise no_room_for_graphs(limits.max_num_seqs, error) from None

    def forward(self, batch: BatchInput, kv_cache: KVCache) -> Tensor:
        """Write this step's keys and values, and return float32 logits [R, V] on the host."""
        replayed = self._replay(batch, kv_cache)
        return to_host(self._logits(batch, kv_cache) if replayed is None else replayed.logits_nV)

    def forward_greedy(self, batch: BatchInput, kv_cache: KVCache) -> Tensor:
        """Write this step's keys and values, and return the most likely token of each row [R] on the device."""
        replayed = self._replay(batch, kv_cache)
        return most_likely(self._logits(batch, kv_cache)) if replayed is None else replayed.token_ids_n.clone()

    def _replay(self, batch: BatchInput, kv_cache: KVCache) -> Replayed | None:
        """What a recorded step gives; None where there is none for this batch."""
        for recorded in self.recorded:
            return recorded.replay(batch, _own(kv_cache))
        return None

    @torch.no_grad()
    def run(self, step: StepTensors, kv: TritonKVCache) -> Tensor:
        """Float32 logits [R, V], from tensors on the device alone."""
        # Gathered once for each rope and window, not for each layer.
        kinds = {(layer.attention.rope, layer.attention.window): layer.attention for layer in self.layers}
        turns_of = {kind: self._turns(step, attention) for kind, attention in kinds.items()}
        residual_TH = self.embedding_VH.index_select(0, step.token_ids_T).to(self.dtype)
        if self.description.embedding_scale != 1:
            residual_TH = residual_TH * self.description.embedding_scale
        branch_TH: Tensor | None = None  # what the last part computed, not yet added to the residual
        for index, layer in enumerate(self.layers):
            heads_TX = self._normed_into(layer.query_key_value, layer.attention_norm, residual_TH, branch_TH)
            turns = turns_of[layer.attention.rope, layer.attention.window]
            attended_TX = self._attend(index, layer, heads_TX, turns, step, kv)
            branch_TH = _normed(layer.post_attention_norm, layer.output(attended_TX))
            gate_up_T2I = self._normed_into(layer.gate_up, layer.mlp_norm, residual_TH, branch_TH)
            branch_TH = _normed(layer.post_mlp_norm, self._down(layer, gate_up_T2I))
        rows_R = step.logit_rows_R
        last_RH = None if branch_TH is None else branch_TH.index_select(0, rows_R)
        residual_RH = residual_TH.index_select(0, rows_R)
        return self._normed_into(self.lm_head, self.final_norm, residual_RH, last_RH, torch.float32)

    def _logits(self, batch: BatchInput, kv_cache: KVCache) -> Tensor:
        shape, kv = self.description, _own(kv_cache)
        tile_len = tokens_per_tile(shape.num_heads, shape.num_kv_heads, shape.head_dim, self.dtype, self.device)
        return self.run(to_device(batch, kv.block_size, tile_len, self.device), kv)

    def _turns(self, step: StepTensors, spec: AttentionSpec) -> LayerTurns:
        window, frequencies_P = step.layer_window(spec.window), self.frequencies[spec.rope]
        own = Turns.of(frequencies_P, spec.rope.attention_scale, step.positions_T)
        if window is None or step.num_sinks == 0:
            return LayerTurns(own, None, Sight(window))
        sink_positions_T = step.positions_T.clamp(max=step.num_sinks + window - 1)
        sinks = Turns.of(frequencies_P, spec.rope.attention_scale, sink_positions_T)
        return LayerTurns(own, sinks, Sight(window, step.num_sinks))

    def _normed_into(
        self,
        linear: TritonLinear,
        norm: Norm,
        residual_TH: Tensor,
        branch_TH: Tensor | None,
        out_dtype: torch.dtype | None = None,
    ) -> Tensor:
        """What ``linear`` makes of the normed sum of residual and branch. The residual becomes that sum, in place."""
        x_TH, added_to_TH = (residual_TH, None) if branch_TH is None else (branch_TH, residual_TH)
        if linear.accepts_quantized:
            codes = rms_norm_quantized(x_TH, norm.weight_H, norm.eps, added_to_TH, self.activation_divisor)
            return linear.from_quantized(*codes, out_dtype or self.dtype)
        return linear(rms_norm(x_TH, norm.weight_H, norm.eps, added_to_TH), out_dtype)

    def _down(self, layer: TritonLayer, gate_up_T2I: Tensor) -> Tensor:
        if layer.down.accepts_quantized:
            codes = gated_quantized(gate_up_T2I, layer.activation, self.activation_divisor)
            return layer.down.from_quantized(*codes, self.dtype)
        return layer.down(gated(gate_up_T2I, layer.activation))

    def _attend(
        self,
        index: int,
        layer: TritonLayer,
        heads_TX: Tensor,
        turns: LayerTurns,
        step: StepTensors,
        kv: TritonKVCache,
    ) -> Tensor:
        """Attention [T, H * D] over the cache, after this layer's keys and values are written into it."""
        spec, keys, values = layer.attention, kv.keys.layer(index), kv.values.layer(index)
        query_THD, sink_query_THD = rope_and_write(
            heads_TX,
            turns.own,
            turns.sinks,
            layer.query_norm,
            layer.key_norm,
            step.slots_T,
            keys,
            values,
            spec.head_dim,
        )
        out_THD = torch.empty_like(query_THD)
        scale = spec.softmax_scale
        if step.decodes is not None:
            num_seqs, num_blocks = step.decodes.table_SB.shape
            splits = num_splits(num_seqs, spec.num_kv_heads, num_blocks * kv.block_size, self.num_processors)
            attend_decodes(query_THD, sink_query_THD, step.decodes, keys, values, turns.sight, scale, splits, out_THD)
        if step.chunks is not None:
            attend_chunks(query_THD, sink_query_THD, step.chunks, keys, values, turns.sight, scale, out_THD)
        return out_THD.flatten(1)


def _own(kv_cache: KVCache) -> TritonKVCache:
    if not isinstance(kv_cache, TritonKVCache):
        raise TypeError(f"the triton backend was given a {type(kv_cache).__name__}")
    return kv_cache


def _normed(norm: Norm | None, x_TH: Tensor) -> Tensor:
    return x_TH if norm is None else rms_norm(x_TH, norm.weight_H, norm.eps)

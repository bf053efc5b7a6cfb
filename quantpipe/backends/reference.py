"""The specification: a decoder executed operator by operator, in plain float32 torch. Clear before fast.

Every other backend is tested against this one. Quantized weights are decoded at load; w8a8 products are summed
exactly over integers.

Shapes: T tokens over all sequences, t tokens of one sequence, C what is held of its context, R rows whose logits are
wanted, N out_features, K in_features, H hidden_size (in heads: query heads), J KV heads, D head_dim, P pairs of
dimensions that rope turns.
"""

import itertools
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from quantpipe.backends.activations import ACTIVATIONS
from quantpipe.backends.most_likely import most_likely
from quantpipe.backends.protocol import Activations, BatchInput, DecodeLimits, KVCache
from quantpipe.backends.reference_kv_cache import ReferenceKVCache
from quantpipe.formats.artifact import Artifact
from quantpipe.formats.kv_mode import KV_MODES
from quantpipe.formats.kv_scales import read_kv_scales
from quantpipe.formats.layout import quantize_activations
from quantpipe.models import describe
from quantpipe.models.description import (
    AttentionSpec,
    DecoderDescription,
    LayerDescription,
    LinearSpec,
    NormSpec,
    RopeSpec,
)
from quantpipe.models.weights import LinearWeights, check_tensors, load_embedding, load_linear, load_norm, num_bytes


@dataclass(frozen=True)
class ReferenceExecutor:
    """A loaded model. Linears that share a stored tensor have weights of their own here."""

    folder: Path
    description: DecoderDescription
    embedding_VH: Tensor
    linears: dict[LinearSpec, LinearWeights]
    norms: dict[NormSpec, Tensor]
    activation_divisor: float

    @property
    def notes(self) -> tuple[str, ...]:
        return self.description.notes

    @property
    def device(self) -> torch.device:
        return self.embedding_VH.device

    @property
    def supports_windows(self) -> bool:
        return True

    @property
    def context_tokens(self) -> tuple[int, int]:
        """Not counted: sequences are attended to one by one, so that nothing is padded."""
        return 0, 0

    @property
    def weight_bytes(self) -> int:
        weights = [tensor for linear in self.linears.values() for tensor in (linear.weight_NK, linear.scale_NG)]
        return num_bytes([self.embedding_VH, *self.norms.values(), *(w for w in weights if w is not None)])

    def kv_bytes_per_block(self, block_size: int, dtype: str) -> int:
        shape = self.description
        return shape.num_layers * block_size * KV_MODES[dtype].token_bytes(shape.num_kv_heads, shape.head_dim)

    def allocate_kv_cache(self, num_blocks: int, block_size: int, dtype: str) -> ReferenceKVCache:
        shape = self.description
        sizes = (shape.num_layers, shape.num_kv_heads, shape.head_dim)
        scales = read_kv_scales(self.folder, *sizes[:2]) if KV_MODES[dtype].needs_scales else None
        return ReferenceKVCache.allocate(num_blocks, block_size, dtype, *sizes, scales)

    def record_decodes(self, kv_cache: KVCache, limits: DecodeLimits) -> None:
        """Nothing: there is no launch to save."""

    @torch.no_grad()
    def forward(self, batch: BatchInput, kv_cache: KVCache) -> Tensor:
        """Write this step's keys and values, and return float32 logits [R, V]."""
        if not isinstance(kv_cache, ReferenceKVCache):
            raise TypeError(f"the reference backend was given a {type(kv_cache).__name__}")
        x_TH = self.embedding_VH[batch.token_ids_T].float() * self.description.embedding_scale
        for index, layer in enumerate(self.description.layers):
            x_TH = x_TH + self._norm(layer.post_attention_norm, self._attention(index, x_TH, batch, kv_cache))
            x_TH = x_TH + self._norm(layer.post_mlp_norm, self._mlp(layer, x_TH))
        return self.linear(self.description.lm_head, self._norm(self.description.final_norm, x_TH[batch.logit_rows_R]))

    def forward_greedy(self, batch: BatchInput, kv_cache: KVCache) -> Tensor:
        """Write this step's keys and values, and return the most likely token of each row [R]."""
        return most_likely(self.forward(batch, kv_cache))

    @property
    def step_times_s(self) -> dict[str, float]:
        return {}

    def linear(self, spec: LinearSpec, x_TK: Tensor) -> Tensor:
        """x @ weight.T + bias [T, N]; with 8-bit activations the sum over K is one of integers, exact in float64."""
        weights = self.linears[spec]
        if weights.scheme is None or weights.scheme.activation_bits is None or weights.scale_NG is None:
            y_TN = x_TK @ weights.dequantized().T
        else:
            xq_TK, scale_T1 = quantize_activations(x_TK, self.activation_divisor)
            sums_TN = (xq_TK.double() @ weights.weight_NK.double().T).float()
            y_TN = sums_TN * weights.scale_NG.float().T * scale_T1
        return y_TN if weights.bias_N is None else y_TN + weights.bias_N

    def _norm(self, spec: NormSpec | None, x: Tensor) -> Tensor:
        if spec is None:
            return x
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + spec.eps) * self.norms[spec]

    def _mlp(self, layer: LayerDescription, x_TH: Tensor) -> Tensor:
        normed_TH = self._norm(layer.mlp_norm, x_TH)
        gate_TK, up_TK = self.linear(layer.mlp.gate, normed_TH), self.linear(layer.mlp.up, normed_TH)
        return self.linear(layer.mlp.down, ACTIVATIONS[layer.mlp.activation](gate_TK) * up_TK)

    def _attention(self, index: int, x_TH: Tensor, batch: BatchInput, kv: ReferenceKVCache) -> Tensor:
        layer = self.description.layers[index]
        spec = layer.attention
        normed_TH = self._norm(layer.attention_norm, x_TH)
        query_THD, key_TJD, value_TJD = (
            self.linear(linear, normed_TH).view(len(normed_TH), -1, spec.head_dim)
            for linear in (spec.query, spec.key, spec.value)
        )
        window = batch.layer_window(spec.window)
        query_THD = self._norm(spec.query_norm, query_THD)
        sink_positions_T = batch.sink_positions_T(window)
        sink_query_THD = None if sink_positions_T is None else rotate(query_THD, spec.rope, sink_positions_T)
        query_THD = rotate(query_THD, spec.rope, batch.positions_T)
        key_TJD = rotate(self._norm(spec.key_norm, key_TJD), spec.rope, batch.positions_T)
        kv.keys[index].write(key_TJD, batch.slot_mapping_T)
        kv.values[index].write(value_TJD, batch.slot_mapping_T)
        attended, held_lens = [], batch.held_lens(kv.block_size)
        starts = [0, *itertools.accumulate(batch.query_lens)]
        for s, (start, end) in enumerate(itertools.pairwise(starts)):
            blocks_B, held_len = batch.block_table_SB[s], held_lens[s]
            keys_CJD, values_CJD = (store[index].read(blocks_B, held_len) for store in (kv.keys, kv.values))
            sees_tC = visible(batch, s, window, kv.block_size)
            sink_query_tHD = None if sink_query_THD is None else sink_query_THD[start:end]
            attended.append(
                attend(spec, query_THD[start:end], keys_CJD, values_CJD, sees_tC, sink_query_tHD, batch.num_sinks)
            )
        return self.linear(spec.output, torch.cat(attended).flatten(1))


def rotate(x_THD: Tensor, rope: RopeSpec, positions_T: Tensor) -> Tensor:
    """Turn and stretch each pair of dimensions (i, i + P); dimensions from 2P on stay."""
    # In float64: a text without end turns far, and distances between far positions must stay what they are.
    angles_T1P = positions_T.double().view(-1, 1, 1) * torch.tensor(rope.inverse_frequencies, dtype=torch.float64)
    cos_T1P, sin_T1P = (turned.float() * rope.attention_scale for turned in (angles_T1P.cos(), angles_T1P.sin()))
    num_pairs = len(rope.inverse_frequencies)
    first_THP, second_THP, rest = x_THD.tensor_split((num_pairs, 2 * num_pairs), dim=-1)
    turned = (first_THP * cos_T1P - second_THP * sin_T1P, second_THP * cos_T1P + first_THP * sin_T1P)
    return torch.cat((*turned, rest), dim=-1)


def visible(batch: BatchInput, s: int, window: int | None, block_size: int) -> Tensor:
    """Which of the held tokens of sequence ``s`` each of its new ones sees, sinks always: bool [t, C]."""
    num_dropped = batch.context_lens[s] - batch.held_lens(block_size)[s]
    num_first = -(-batch.num_sinks // block_size) * block_size  # those of the sink blocks
    indices_C = torch.arange(batch.context_lens[s] - num_dropped)
    positions_C = indices_C + (indices_C >= num_first) * num_dropped
    positions_t1 = torch.arange(batch.context_lens[s] - batch.query_lens[s], batch.context_lens[s])[:, None]
    sees_tC = positions_C <= positions_t1
    if window is not None:
        sees_tC &= (positions_C > positions_t1 - window) | (positions_C < batch.num_sinks)
    return sees_tC


def attend(
    spec: AttentionSpec,
    query_tHD: Tensor,
    keys_CJD: Tensor,
    values_CJD: Tensor,
    sees_tC: Tensor,
    sink_query_tHD: Tensor | None = None,
    num_sinks: int = 0,
) -> Tensor:
    """Softmax attention [t, H, D] of a sequence's last t tokens over what of its context each of them ``sees``.

    The first ``num_sinks`` keys meet ``sink_query_tHD`` where there is one.
    """
    heads_per_kv = spec.num_heads // spec.num_kv_heads
    keys_HDC = keys_CJD.permute(1, 2, 0).repeat_interleave(heads_per_kv, dim=0)
    values_HCD = values_CJD.transpose(0, 1).repeat_interleave(heads_per_kv, dim=0)
    scores_HtC = query_tHD.transpose(0, 1) @ keys_HDC
    if sink_query_tHD is not None:
        scores_HtC[..., :num_sinks] = sink_query_tHD.transpose(0, 1) @ keys_HDC[..., :num_sinks]
    weights_HtC = (scores_HtC * spec.softmax_scale).masked_fill(~sees_tC, -torch.inf).softmax(-1)
    return (weights_HtC @ values_HCD).transpose(0, 1)


class ReferenceBackend:
    """Loads any model folder of a known family."""

    name = "reference"

    def load(
        self,
        folder: Path,
        activation_divisor: float,
        num_threads: int | None,
        activations: Activations = "float32",
        memory_utilization: float | None = None,
    ) -> ReferenceExecutor:
        """Read every weight. ArtifactError where the folder is damaged or of an unknown family.

        ``activations`` has no bearing: under weight-only schemes they stay in float32; nor has ``memory_utilization``.
        """
        if num_threads is not None:
            torch.set_num_threads(num_threads)
        artifact = Artifact.open(folder)
        description = describe(artifact)
        check_tensors(description, artifact)
        embedding_VH = load_embedding(description, artifact).float()
        linears: dict[LinearSpec, LinearWeights] = {}
        for spec in description.linears():
            if spec is description.lm_head and description.is_head_tied:
                linears[spec] = LinearWeights(embedding_VH, None, None, None)
            else:
                linears[spec] = _decode_once(load_linear(artifact, spec))
        norms = {spec: load_norm(artifact, spec) for spec in description.norms()}
        return ReferenceExecutor(folder, description, embedding_VH, linears, norms, activation_divisor)

    def check(self, description: DecoderDescription | None = None) -> None:
        """Nothing is asked of the machine, nor of a decoder."""


def _decode_once(weights: LinearWeights) -> LinearWeights:
    """Float32 weights, except where integer activations need the integers."""
    if weights.scheme is not None and weights.scheme.activation_bits is not None:
        return weights
    return LinearWeights(weights.dequantized(), None, weights.bias_N, weights.scheme)

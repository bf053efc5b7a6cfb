"""Turns a decoder's description and its stored weights into a plan that one call executes. Reads tensor by tensor.

Shapes: V vocabulary, H hidden_size, T tokens of a step, S sequences, R rows whose logits are wanted.
"""

import ctypes
import weakref
from ctypes import byref
from dataclasses import dataclass, field

import torch
from torch import Tensor

from quantpipe.backends.cpu.native.library import Library, NativeError
from quantpipe.backends.cpu.native.linears import LinearSettings, address, joined, make_linear
from quantpipe.backends.cpu.native.structures import (
    ACTIVATIONS,
    EMBEDDING_DTYPES,
    KV,
    TIMED_PARTS,
    Batch,
    Layer,
    Norm,
    Shape,
)
from quantpipe.formats.artifact import Artifact
from quantpipe.models.description import DecoderDescription, LayerDescription, LinearSpec, NormSpec, RopeSpec
from quantpipe.models.weights import LinearWeights, load_embedding, load_linear, load_norm


@dataclass
class _Owned:
    """What a plan's memory is freed by."""

    library: Library
    linears: list[int] = field(default_factory=list)
    plan: int | None = None

    def free(self) -> None:
        if self.plan is not None:
            self.library.call("qp_plan_free", self.plan)
        for linear in self.linears:
            self.library.call("qp_linear_free", linear)
        self.plan, self.linears = None, []


class NativePlan:
    """A decoder ready to run. Frees what it holds when it is collected; one call at a time."""

    def __init__(self, owned: _Owned, embedding_VH: Tensor, norm_bytes: int) -> None:
        assert owned.plan is not None, "a plan is made before it is run"
        self._library, self._plan, self._owned = owned.library, owned.plan, owned
        self._embedding_VH = embedding_VH  # borrowed by the plan
        linear_bytes = sum(int(owned.library.call("qp_linear_bytes", linear)) for linear in owned.linears)
        self.weight_bytes = linear_bytes + embedding_VH.nbytes + norm_bytes
        weakref.finalize(self, owned.free)

    def forward(self, batch: Batch, kv: KV, logits_RV: Tensor | None, token_ids_R: Tensor | None) -> None:
        """Write keys and values, fill what is not None. NativeError where the batch reaches beyond the cache."""
        self._library.check(
            "qp_plan_forward", self._plan, byref(batch), byref(kv), address(logits_RV), address(token_ids_R)
        )

    def times_s(self) -> dict[str, float]:
        """Seconds spent in each part of the steps so far."""
        seconds = (ctypes.c_double * len(TIMED_PARTS))()
        self._library.call("qp_plan_times", self._plan, seconds)
        return dict(zip(TIMED_PARTS, seconds, strict=True))


def build_plan(
    library: Library, artifact: Artifact, description: DecoderDescription, settings: LinearSettings, num_threads: int
) -> NativePlan:
    """Pack every weight. NativeError where the kernels cannot run this decoder."""
    owned = _Owned(library)
    try:
        builder = _Builder(library, artifact, description, settings, owned)
        return builder.build(num_threads)
    except BaseException:
        owned.free()
        raise


class _Builder:
    """Adds layer after layer; a layer's tensors are dropped once the plan has its own copies."""

    def __init__(
        self,
        library: Library,
        artifact: Artifact,
        description: DecoderDescription,
        settings: LinearSettings,
        owned: _Owned,
    ) -> None:
        self._library, self._artifact, self._description = library, artifact, description
        self._settings, self._owned = settings, owned
        self._ropes: dict[RopeSpec, int] = {}
        self._norms: list[Tensor] = []  # of the structure in the making

    def build(self, num_threads: int) -> NativePlan:
        description = self._description
        embedding_VH = load_embedding(description, self._artifact).contiguous()
        if _name(embedding_VH.dtype) not in EMBEDDING_DTYPES:
            embedding_VH = embedding_VH.float()
        head = (
            LinearWeights(embedding_VH, None, None, None)
            if description.is_head_tied
            else load_linear(self._artifact, description.lm_head)
        )
        shape = Shape(
            hidden_size=description.hidden_size,
            vocab_size=description.vocab_size,
            num_threads=num_threads,
            embedding_dtype=EMBEDDING_DTYPES[_name(embedding_VH.dtype)],
            embedding=address(embedding_VH),
            embedding_scale=description.embedding_scale,
            final_norm=self._norm(description.final_norm),
            head=self._pack(head),
        )
        self._owned.plan = self._library.make("qp_plan_new", byref(shape))
        for layer in description.layers:
            self._add_layer(layer)
        return NativePlan(self._owned, embedding_VH, sum(4 * norm.size for norm in description.norms()))

    def _add_layer(self, layer: LayerDescription) -> None:
        attention, mlp = layer.attention, layer.mlp
        query, key, value = self._linears(attention.query, attention.key, attention.value)
        gate, up = self._linears(mlp.gate, mlp.up)
        self._norms.clear()
        structure = Layer(
            attention_norm=self._norm(layer.attention_norm),
            query_norm=self._norm(attention.query_norm),
            key_norm=self._norm(attention.key_norm),
            post_attention_norm=self._norm(layer.post_attention_norm),
            mlp_norm=self._norm(layer.mlp_norm),
            post_mlp_norm=self._norm(layer.post_mlp_norm),
            query=query,
            key=key,
            value=value,
            output=self._linears(attention.output)[0],
            gate=gate,
            up=up,
            down=self._linears(mlp.down)[0],
            num_heads=attention.num_heads,
            num_kv_heads=attention.num_kv_heads,
            head_dim=attention.head_dim,
            intermediate_size=mlp.gate.out_features,
            rope=self._rope(attention.rope),
            window=attention.window or 0,
            activation=ACTIVATIONS[mlp.activation],
            softmax_scale=attention.softmax_scale,
        )
        self._library.check("qp_plan_add_layer", self._owned.plan, byref(structure))

    def _linears(self, *specs: LinearSpec) -> list[int | None]:
        """Handles of these linears; of the first alone where it holds them all."""
        parts = joined([load_linear(self._artifact, spec) for spec in specs])
        handles = [self._pack(part) for part in parts]
        return [*handles, *[None] * (len(specs) - len(handles))]

    def _pack(self, weights: LinearWeights) -> int:
        self._owned.linears.append(make_linear(self._library, weights, self._settings))
        return self._owned.linears[-1]

    def _norm(self, spec: NormSpec | None) -> Norm:
        if spec is None:
            return Norm(None, 0.0)
        self._norms.append(load_norm(self._artifact, spec).contiguous())
        return Norm(address(self._norms[-1]), spec.eps)

    def _rope(self, rope: RopeSpec) -> int:
        if rope not in self._ropes:
            frequencies_P = torch.tensor(rope.inverse_frequencies, dtype=torch.float64)
            self._ropes[rope] = self._library.check(
                "qp_plan_add_rope", self._owned.plan, len(frequencies_P), address(frequencies_P), rope.attention_scale
            )
        return self._ropes[rope]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


__all__ = ["NativeError", "NativePlan", "build_plan"]

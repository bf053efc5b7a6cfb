"""Turns a decoder's description and its stored weights into a plan that one call executes. Reads tensor by tensor.

Shapes: V vocabulary, H hidden_size, T tokens of a step, S sequences, R rows whose logits are wanted.
"""

import ctypes
import weakref
from concurrent.futures import ThreadPoolExecutor
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

# Each holds the stored tensors of a layer at a time.
MAX_PACKING_THREADS = 4


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

    def __init__(self, owned: _Owned, embedding_VH: Tensor | None, norm_bytes: int) -> None:
        assert owned.plan is not None, "a plan is made before it is run"
        self._library, self._plan, self._owned = owned.library, owned.plan, owned
        self._embedding_VH = embedding_VH  # borrowed by the plan; None: the head's rows are read
        linear_bytes = sum(int(owned.library.call("qp_linear_bytes", linear)) for linear in owned.linears)
        self.weight_bytes = linear_bytes + (0 if embedding_VH is None else embedding_VH.nbytes) + norm_bytes
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
    """Packs layers in several threads; the tensors of each are dropped once it is packed."""

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

    def build(self, num_threads: int) -> NativePlan:
        layers = self._description.layers
        with ThreadPoolExecutor(min(num_threads, MAX_PACKING_THREADS)) as pool:
            packed = pool.map(self._pack_layer, layers)  # begins, while the head is packed here
            embedding_VH = self._start_plan(num_threads)
            for layer, (structure, _norms) in zip(layers, packed, strict=True):
                structure.rope = self._rope(layer.attention.rope)
                self._library.check("qp_plan_add_layer", self._owned.plan, byref(structure))
        return NativePlan(self._owned, embedding_VH, sum(4 * norm.size for norm in self._description.norms()))

    def _start_plan(self, num_threads: int) -> Tensor | None:
        """A plan without layers, and the embedding that it borrows: none where the head holds the same numbers."""
        description = self._description
        embedding_VH: Tensor | None = load_embedding(description, self._artifact).contiguous()
        assert embedding_VH is not None, "read just now"
        if _name(embedding_VH.dtype) not in EMBEDDING_DTYPES:
            embedding_VH = embedding_VH.float()
        dtype = EMBEDDING_DTYPES[_name(embedding_VH.dtype)]
        if description.is_head_tied:
            head = self._pack(LinearWeights(embedding_VH, None, None, None))
            embedding_VH = None
        else:
            head = self._pack(load_linear(self._artifact, description.lm_head))
        final_norm_H = load_norm(self._artifact, description.final_norm).contiguous()
        shape = Shape(
            hidden_size=description.hidden_size,
            vocab_size=description.vocab_size,
            num_threads=num_threads,
            embedding_dtype=dtype,
            embedding=address(embedding_VH),
            embedding_scale=description.embedding_scale,
            final_norm=Norm(address(final_norm_H), description.final_norm.eps),
            head=head,
        )
        self._owned.plan = self._library.make("qp_plan_new", byref(shape))
        return embedding_VH

    def _pack_layer(self, layer: LayerDescription) -> tuple[Layer, list[Tensor]]:
        """The layer but for its rope, and the norms that it borrows."""
        attention, mlp = layer.attention, layer.mlp
        query, key, value = self._linears(attention.query, attention.key, attention.value)
        gate, up = self._linears(mlp.gate, mlp.up)
        norms: list[Tensor] = []

        def norm(spec: NormSpec | None) -> Norm:
            if spec is None:
                return Norm(None, 0.0)
            norms.append(load_norm(self._artifact, spec).contiguous())
            return Norm(address(norms[-1]), spec.eps)

        structure = Layer(
            attention_norm=norm(layer.attention_norm),
            query_norm=norm(attention.query_norm),
            key_norm=norm(attention.key_norm),
            post_attention_norm=norm(layer.post_attention_norm),
            mlp_norm=norm(layer.mlp_norm),
            post_mlp_norm=norm(layer.post_mlp_norm),
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
            window=attention.window or 0,
            activation=ACTIVATIONS[mlp.activation],
            softmax_scale=attention.softmax_scale,
        )
        return structure, norms

    def _linears(self, *specs: LinearSpec) -> list[int | None]:
        """Handles of these linears; of the first alone where it holds them all."""
        parts = joined([load_linear(self._artifact, spec) for spec in specs])
        handles = [self._pack(part) for part in parts]
        return [*handles, *[None] * (len(specs) - len(handles))]

    def _pack(self, weights: LinearWeights) -> int:
        linear = make_linear(self._library, weights, self._settings)
        self._owned.linears.append(linear)
        return linear

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

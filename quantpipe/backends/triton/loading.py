"""Loads a model folder onto the GPU, tensor by tensor, and refuses at once what no kernel runs.

Shapes: V vocabulary, H hidden_size, P pairs of dimensions that rope turns.
"""

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from quantpipe.backends.triton.executor import Norm, TritonExecutor, TritonLayer
from quantpipe.backends.triton.linear import TritonLinear, build_linear, check_kernels
from quantpipe.backends.triton.ops.rope_kv import HeadNorm
from quantpipe.backends.triton.requirements import (
    INTERPRETED,
    check_decoder,
    check_room,
    compute_dtype,
    num_processors,
    usable_device,
)
from quantpipe.backends.triton.weight_bytes import weight_bytes
from quantpipe.errors import DataError
from quantpipe.formats.artifact import Artifact
from quantpipe.models import describe
from quantpipe.models.description import DecoderDescription, LayerDescription, LinearSpec, NormSpec, RopeSpec
from quantpipe.models.weights import LinearWeights, check_tensors, load_embedding, load_linear, load_norm


def load(folder: Path, activation_divisor: float, memory_utilization: float | None = None) -> TritonExecutor:
    """Every weight in its kernel's layout, after a check of all tensors. Refusals are as ``TritonBackend`` says."""
    device = usable_device()
    artifact = Artifact.open(folder)
    description = describe(artifact)
    check_tensors(description, artifact)
    check_decoder(description)
    for spec in description.linears():
        check_kernels(spec.scheme)
    dtype = compute_dtype(artifact.stored[description.embedding_name].spec.dtype, device)
    check_room(folder, weight_bytes(description, artifact, dtype), device, memory_utilization)
    try:
        return load_weights(artifact, description, device, dtype, activation_divisor)
    except torch.OutOfMemoryError as error:
        reason = str(error).split("\n", maxsplit=1)[0]
        raise DataError(f"{folder}: the weights do not fit into the GPU's memory: {reason}") from None


def load_weights(
    artifact: Artifact,
    description: DecoderDescription,
    device: torch.device,
    dtype: torch.dtype,
    activation_divisor: float,
) -> TritonExecutor:
    """Every weight in its kernel's layout, hidden states in ``dtype``; nothing is checked beforehand."""
    return _Loader(artifact, description, device, dtype, activation_divisor).load()


class _Loader:
    """What all parts of a model are loaded with."""

    def __init__(
        self,
        artifact: Artifact,
        description: DecoderDescription,
        device: torch.device,
        dtype: torch.dtype,
        activation_divisor: float,
    ) -> None:
        self.artifact, self.description, self.device, self.dtype = artifact, description, device, dtype
        self.activation_divisor = activation_divisor

    def load(self) -> TritonExecutor:
        description = self.description
        embedding_VH = load_embedding(description, self.artifact).to(self.device, self.dtype)
        layers = tuple(self._layer(layer) for layer in description.layers)
        final_norm = self._norm(description.final_norm)
        tied = LinearWeights(embedding_VH, None, None, None)
        lm_head = self._build([tied]) if description.is_head_tied else self._linear(description.lm_head)
        return TritonExecutor(
            folder=self.artifact.folder,
            description=description,
            dtype=self.dtype,
            embedding_VH=embedding_VH,
            layers=layers,
            final_norm=final_norm,
            lm_head=lm_head,
            frequencies={layer.attention.rope: self._frequencies(layer.attention.rope) for layer in description.layers},
            num_processors=num_processors(self.device),
            activation_divisor=self.activation_divisor,
            weight_bytes=_weight_bytes(description, embedding_VH, layers, lm_head),
            notes=(*description.notes, *([INTERPRETED] if self.device.type == "cpu" else [])),
        )

    def _layer(self, layer: LayerDescription) -> TritonLayer:
        attention, mlp = layer.attention, layer.mlp
        return TritonLayer(
            attention=attention,
            activation=mlp.activation,
            attention_norm=self._norm(layer.attention_norm),
            query_key_value=self._linear(attention.query, attention.key, attention.value),
            query_norm=self._head_norm(attention.query_norm),
            key_norm=self._head_norm(attention.key_norm),
            output=self._linear(attention.output),
            post_attention_norm=self._optional_norm(layer.post_attention_norm),
            mlp_norm=self._norm(layer.mlp_norm),
            gate_up=self._linear(mlp.gate, mlp.up),
            down=self._linear(mlp.down),
            post_mlp_norm=self._optional_norm(layer.post_mlp_norm),
        )

    def _linear(self, *specs: LinearSpec) -> TritonLinear:
        """One linear of those that read the same input, their outputs side by side."""
        return self._build([load_linear(self.artifact, spec) for spec in specs])

    def _build(self, parts: list[LinearWeights]) -> TritonLinear:
        return build_linear(parts, self.device, self.dtype, self.activation_divisor)

    def _norm(self, spec: NormSpec) -> Norm:
        return Norm(load_norm(self.artifact, spec).to(self.device), spec.eps)

    def _optional_norm(self, spec: NormSpec | None) -> Norm | None:
        return None if spec is None else self._norm(spec)

    def _head_norm(self, spec: NormSpec | None) -> HeadNorm | None:
        return None if spec is None else HeadNorm(*self._norm(spec))

    def _frequencies(self, rope: RopeSpec) -> Tensor:
        return torch.tensor(rope.inverse_frequencies, dtype=torch.float64, device=self.device)


def _weight_bytes(
    description: DecoderDescription, embedding_VH: Tensor, layers: tuple[TritonLayer, ...], lm_head: TritonLinear
) -> int:
    """A tied lm_head is the embedding, so it counts once. Norms are held in float32."""

    def linears() -> Iterator[TritonLinear]:
        for layer in layers:
            yield from (layer.query_key_value, layer.output, layer.gate_up, layer.down)

    norms = sum(4 * norm.size for norm in description.norms())
    head = 0 if description.is_head_tied else lm_head.weight_bytes
    return sum(linear.weight_bytes for linear in linears()) + norms + head + embedding_VH.nbytes

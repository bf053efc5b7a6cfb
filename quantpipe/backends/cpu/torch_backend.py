"""Loads a model folder for torch's operators, tensor by tensor; no weight is held twice in floating point."""

from pathlib import Path

import torch
from torch import Tensor

from quantpipe.backends.cpu.executor import CpuExecutor, CpuLayer, CpuNorm
from quantpipe.backends.cpu.linear import DenseLinear, LinearBuilder
from quantpipe.backends.protocol import Activations
from quantpipe.formats.artifact import Artifact
from quantpipe.models import describe
from quantpipe.models.description import DecoderDescription, LayerDescription, NormSpec
from quantpipe.models.weights import check_tensors, load_embedding, load_linear, load_norm, num_bytes


class TorchBackend:
    """The row ``torch`` of the backends table, and what the row ``cpu`` falls back to."""

    name = "torch"

    def load(
        self,
        folder: Path,
        activation_divisor: float,
        num_threads: int | None,
        activations: Activations = "int16",
        memory_utilization: float | None = None,
    ) -> CpuExecutor:
        """Read every weight into its kernel's layout. ArtifactError where the folder is damaged or not known.

        ``activations`` has no bearing, as they stay in floating point under weight-only schemes; nor has
        ``memory_utilization``.
        """
        if num_threads is not None:
            torch.set_num_threads(num_threads)
        artifact = Artifact.open(folder)
        return load_torch(artifact, describe(artifact), activation_divisor)

    def check(self, description: DecoderDescription | None = None) -> None:
        """Nothing is asked of the machine, nor of a decoder."""


def load_torch(artifact: Artifact, description: DecoderDescription, activation_divisor: float) -> CpuExecutor:
    """Every weight in its kernel's layout, after a check of all tensors."""
    check_tensors(description, artifact)
    builder = LinearBuilder(activation_divisor)
    embedding_VH = load_embedding(description, artifact)
    if description.is_head_tied:
        embedding_VH = embedding_VH.float()
    kinds = tuple(dict.fromkeys((layer.attention.rope, layer.attention.window) for layer in description.layers))
    layers = tuple(
        _load_layer(artifact, layer, kinds.index((layer.attention.rope, layer.attention.window)), builder)
        for layer in description.layers
    )
    lm_head = (
        DenseLinear(embedding_VH)
        if description.is_head_tied
        else builder.build_head(load_linear(artifact, description.lm_head))
    )
    return CpuExecutor(
        folder=artifact.folder,
        description=description,
        embedding_VH=embedding_VH,
        kinds=kinds,
        layers=layers,
        final_norm=_load_norm(artifact, description.final_norm),
        lm_head=lm_head,
        weight_bytes=_weight_bytes(description, embedding_VH, layers, lm_head.weight_bytes),
        notes=(*description.notes, *builder.notes),
    )


def _load_layer(artifact: Artifact, layer: LayerDescription, kind: int, builder: LinearBuilder) -> CpuLayer:
    attention, mlp = layer.attention, layer.mlp

    def norm(spec: NormSpec | None) -> CpuNorm | None:
        return None if spec is None else _load_norm(artifact, spec)

    return CpuLayer(
        kind=kind,
        attention_norm=_load_norm(artifact, layer.attention_norm),
        query_key_value=builder.build(
            [load_linear(artifact, spec) for spec in (attention.query, attention.key, attention.value)]
        ),
        query_norm=norm(attention.query_norm),
        key_norm=norm(attention.key_norm),
        output=builder.build([load_linear(artifact, attention.output)]),
        post_attention_norm=norm(layer.post_attention_norm),
        mlp_norm=_load_norm(artifact, layer.mlp_norm),
        gate_up=builder.build([load_linear(artifact, spec) for spec in (mlp.gate, mlp.up)]),
        down=builder.build([load_linear(artifact, mlp.down)]),
        post_mlp_norm=norm(layer.post_mlp_norm),
    )


def _load_norm(artifact: Artifact, spec: NormSpec) -> CpuNorm:
    return CpuNorm(load_norm(artifact, spec), spec.eps)


def _weight_bytes(
    description: DecoderDescription, embedding_VH: Tensor, layers: tuple[CpuLayer, ...], head_bytes: int
) -> int:
    """A tied lm_head is the embedding, so it counts once."""
    inner = sum(
        linear.weight_bytes
        for layer in layers
        for linear in (layer.query_key_value, layer.output, layer.gate_up, layer.down)
    )
    norms = sum(4 * norm.size for norm in description.norms())
    embedding = 0 if description.is_head_tied else num_bytes([embedding_VH])
    return inner + norms + head_bytes + embedding

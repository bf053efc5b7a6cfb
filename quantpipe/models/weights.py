"""Reads the tensors that a description names, one at a time, and refuses a folder that holds others or lacks some.

Shapes: N out_features, K in_features, G groups along K, V vocabulary, H hidden_size.
"""

import re
from dataclasses import dataclass

from torch import Tensor

from quantpipe.errors import ArtifactError
from quantpipe.formats.artifact import Artifact
from quantpipe.formats.layout import decode, unpack
from quantpipe.formats.scheme import WeightScheme
from quantpipe.models.description import DecoderDescription, LinearSpec, NormSpec

# Written by old versions of transformers; recomputed from config.json, so not read.
_DERIVED = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")


@dataclass(frozen=True)
class LinearWeights:
    """One linear as stored. Quantized: ``weight_NK`` int8 and ``scale_NG``; otherwise floating point and None.

    ``zero_NG`` (int8) are the zero points of an asymmetric scheme.
    """

    weight_NK: Tensor
    scale_NG: Tensor | None
    bias_N: Tensor | None
    scheme: WeightScheme | None
    zero_NG: Tensor | None = None

    def dequantized(self) -> Tensor:
        """What the weight means, float32 [N, K]."""
        return self.weight_NK.float() if self.scale_NG is None else decode(self.weight_NK, self.scale_NG, self.zero_NG)


def check_tensors(description: DecoderDescription, artifact: Artifact) -> None:
    """Raise ArtifactError for the first tensor that is missing, misshapen, or that this decoder would not read."""
    expected = _expected_shapes(description, artifact)
    for name, shape in expected.items():
        found = artifact.stored.get(name)
        if found is None:
            raise ArtifactError(f"{artifact.folder}: tensor {name} is missing; the folder is incomplete, make it again")
        if found.spec.shape != shape:
            raise ArtifactError(
                f"{artifact.folder}: tensor {name} has shape {list(found.spec.shape)}; "
                f"config.json asks for {list(shape)}"
            )
    for name in sorted(artifact.stored.keys() - expected.keys()):
        is_spare_head = description.is_head_tied and name == f"{description.lm_head.name}.weight"
        if not is_spare_head and not _DERIVED.fullmatch(name):
            raise ArtifactError(
                f"{artifact.folder}: tensor {name} has no place in the {description.family} decoder of config.json; "
                "this runtime would ignore it"
            )


def load_linear(artifact: Artifact, spec: LinearSpec) -> LinearWeights:
    """The weight of one linear, its own rows where the tensor holds those of several; int8 where quantized."""

    def rows_of(suffix: str) -> Tensor:
        stored = artifact.tensor(f"{spec.name}.{suffix}")
        return stored if spec.rows is None else stored[slice(*spec.rows)].clone()

    bias_N = rows_of("bias").float() if spec.has_bias else None
    if spec.scheme is None:
        return LinearWeights(rows_of("weight"), None, bias_N, None)
    if spec.scheme.is_packed:
        q_NK = unpack(rows_of("weight_packed"), spec.scheme.bits, spec.in_features)
    else:
        q_NK = rows_of("weight")
    zero_NG = None
    if not spec.scheme.symmetric:
        # Packed along the output features, unlike the weights: several linears may share a word.
        first, end = spec.rows or (0, spec.out_features)
        zero_NG = unpack(artifact.tensor(f"{spec.name}.weight_zero_point").T, spec.scheme.bits, end).T[first:]
    return LinearWeights(q_NK, rows_of("weight_scale"), bias_N, spec.scheme, zero_NG)


def load_norm(artifact: Artifact, spec: NormSpec) -> Tensor:
    """What a norm multiplies by, float32."""
    weight = artifact.tensor(f"{spec.name}.weight").float()
    return weight + spec.offset if spec.offset else weight


def load_embedding(description: DecoderDescription, artifact: Artifact) -> Tensor:
    """Token embeddings [V, H] in the dtype they are stored in."""
    return artifact.tensor(description.embedding_name)


def _expected_shapes(description: DecoderDescription, artifact: Artifact) -> dict[str, tuple[int, ...]]:
    hidden_size = description.hidden_size
    expected: dict[str, tuple[int, ...]] = {description.embedding_name: (description.vocab_size, hidden_size)}
    expected |= {f"{norm.name}.weight": (norm.size,) for norm in description.norms()}
    num_rows = _num_stored_rows(description)
    for spec in description.linears():
        if spec is description.lm_head and description.is_head_tied:
            continue
        shape = (num_rows[spec.name], spec.in_features)
        if spec.scheme is None:
            expected[f"{spec.name}.weight"] = shape
        else:
            stored = spec.scheme.tensors(*shape, scale_dtype="")
            expected |= {f"{spec.name}.{suffix}": tensor.shape for suffix, tensor in stored.items()}
            _check_declared_shape(artifact, spec, shape)
        if spec.has_bias:
            expected[f"{spec.name}.bias"] = shape[:1]
    return expected


def _num_stored_rows(description: DecoderDescription) -> dict[str, int]:
    """Output features of each stored tensor: where linears share one, the last of them ends it."""
    num_rows: dict[str, int] = {}
    for spec in description.linears():
        end = spec.out_features if spec.rows is None else spec.rows[1]
        num_rows[spec.name] = max(end, num_rows.get(spec.name, 0))
    return num_rows


def _check_declared_shape(artifact: Artifact, spec: LinearSpec, shape: tuple[int, int]) -> None:
    """Packed words pad the last one, so the declared shape is compared as well as the stored one."""
    if spec.scheme is None or not spec.scheme.is_packed:
        return
    declared = artifact.tensor(f"{spec.name}.weight_shape").tolist()
    if declared != list(shape):
        raise ArtifactError(
            f"{artifact.folder}: {spec.name}.weight_shape is {declared}; config.json asks for {list(shape)}"
        )


def num_bytes(tensors: list[Tensor]) -> int:
    """Bytes held by distinct tensors; one that appears twice counts once."""
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())

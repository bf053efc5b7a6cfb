"""What a model's weights take on the GPU, from the headers of its files: counted before anything is loaded.

Shapes: N out_features, K in_features, G groups along K.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from quantpipe.backends.triton.ops.int8 import ROW_ALIGNMENT
from quantpipe.backends.triton.ops.weight_panels import WORDS, values_in_word
from quantpipe.formats.artifact import Artifact
from quantpipe.models.description import DecoderDescription, LinearSpec

FLOAT32_BYTES = WORD_BYTES = 4
_SCALE_BYTES = {"F32": 4, "F16": 2, "BF16": 2}
# While integers are repacked, so many copies of theirs, a byte each, lie side by side: the parts that are joined, the
# whole, the whole filled up, and the whole without signs.
_COPIES_IN_REPACKING = 4


@dataclass(frozen=True)
class WeightBytes:
    """``held_bytes`` stay; ``loading_bytes`` come and go while the largest linear is brought into its layout."""

    held_bytes: int
    loading_bytes: int

    @property
    def peak_bytes(self) -> int:
        return self.held_bytes + self.loading_bytes


def weight_bytes(description: DecoderDescription, artifact: Artifact, dtype: torch.dtype) -> WeightBytes:
    """Of a model whose floating-point weights are held in ``dtype``; norms and biases are in float32."""
    held = description.vocab_size * description.hidden_size * dtype.itemsize
    held += sum(FLOAT32_BYTES * norm.size for norm in description.norms())
    loading = 0
    for parts in _joined(description):
        has_bias = any(part.has_bias for part in parts)
        num_weights = sum(part.out_features * part.in_features for part in parts)
        for part in parts:
            held += _linear_bytes(part, artifact, dtype) + has_bias * FLOAT32_BYTES * part.out_features
        copies = dtype.itemsize if parts[0].scheme is None else _COPIES_IN_REPACKING
        loading = max(loading, copies * num_weights)
    return WeightBytes(held, loading)


def _joined(description: DecoderDescription) -> Iterator[Sequence[LinearSpec]]:
    """The linears, those together that read one input. A head that is tied is the embedding."""
    for layer in description.layers:
        attention, mlp = layer.attention, layer.mlp
        yield (attention.query, attention.key, attention.value)
        yield (attention.output,)
        yield (mlp.gate, mlp.up)
        yield (mlp.down,)
    if not description.is_head_tied:
        yield (description.lm_head,)


def _linear_bytes(spec: LinearSpec, artifact: Artifact, dtype: torch.dtype) -> int:
    """Weights, scales and zero points of one linear, as its kernel holds them."""
    num_out, num_in, scheme = spec.out_features, spec.in_features, spec.scheme
    if scheme is None:
        return num_out * num_in * dtype.itemsize
    if scheme.activation_bits is not None:
        return num_out * (num_in + -num_in % ROW_ALIGNMENT + FLOAT32_BYTES)
    values_per_word = values_in_word(scheme)
    num_words = -(-num_in // (values_per_word * WORDS)) * WORDS
    scale_bytes = _SCALE_BYTES[artifact.stored[f"{spec.name}.weight_scale"].spec.dtype]
    per_group = scale_bytes + (0 if scheme.symmetric else 1)
    return num_out * (WORD_BYTES * num_words + scheme.num_groups(num_in) * per_group)

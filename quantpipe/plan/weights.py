"""Bytes of weights: as they are stored on disk, and as a device holds them."""

from dataclasses import replace

from quantpipe.formats.scheme import WeightScheme, w4a16, w8a8, weight_only
from quantpipe.plan.devices import Kind
from quantpipe.plan.shape import LinearShape, ModelShape

FLOAT32_BYTES = 4
# What the table of schemes shows, by label.
SCHEMES: dict[str, WeightScheme | None] = {
    "bf16": None,
    **{scheme.label: scheme for scheme in (w8a8(), w4a16(64), w4a16(128), weight_only(3, 64))},
}


def linear_bits(linear: LinearShape) -> int:
    """Bits that a quantized linear's weights, scales and zero points take on disk, of all copies."""
    assert linear.scheme is not None, "only quantized linears have stored bits"
    return linear.num_copies * linear.scheme.stored_bits(linear.out_features, linear.in_features)


def stored_bytes(shape: ModelShape) -> int:
    """Of all tensors in an artifact, headers apart."""
    linears = [*shape.linears, *([] if shape.is_head_tied else [shape.lm_head])]
    inner = sum(_stored_bytes(each, shape.float_bytes) for each in linears)
    return inner + shape.float_bytes * (shape.vocab_size * shape.hidden_size + shape.num_norm_weights)


def held_bytes(shape: ModelShape, kind: Kind) -> int:
    """Of all weights in the memory of a device."""
    inner = sum(each.num_copies * copy_bytes(each, shape.float_bytes, kind) for each in shape.linears)
    head = copy_bytes(shape.lm_head, shape.float_bytes, kind)
    embedding = 0 if shape.is_head_tied else shape.float_bytes * shape.vocab_size * shape.hidden_size
    return inner + head + embedding + FLOAT32_BYTES * shape.num_norm_weights


def read_bytes(shape: ModelShape, kind: Kind, num_tokens: int) -> float:
    """Of the weights that a step of so many tokens reads: all but the embedding, and of experts those that are used."""
    inner = sum(each.num_read(num_tokens) * copy_bytes(each, shape.float_bytes, kind) for each in shape.linears)
    return inner + copy_bytes(shape.lm_head, shape.float_bytes, kind)


def copy_bytes(linear: LinearShape, float_bytes: int, kind: Kind) -> int:
    """Of one copy of a linear as a device holds it: on a CPU scales in float32, and 3 bits in the space of 4."""
    num_out, num_in, scheme = linear.out_features, linear.in_features, linear.scheme
    bias = FLOAT32_BYTES * num_out if linear.has_bias else 0
    if scheme is None:
        return num_out * num_in * float_bytes + bias
    is_float32_scale = kind == "cpu" or scheme.activation_bits is not None
    held = replace(scheme, bits=max(4, scheme.bits)) if kind == "cpu" else scheme
    return held.stored_bits(num_out, num_in, 32 if is_float32_scale else 16) // 8 + bias


def _stored_bytes(linear: LinearShape, float_bytes: int) -> int:
    bias = linear.num_copies * float_bytes * linear.out_features if linear.has_bias else 0
    if linear.scheme is None:
        return linear.num_weights * float_bytes + bias
    return linear_bits(linear) // 8 + bias

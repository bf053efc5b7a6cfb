"""The structures of ``src/plan.h``, field for field; their meaning and the shapes behind pointers are told there."""

from ctypes import POINTER, Structure, c_float, c_int32, c_void_p
from typing import ClassVar, Literal

# Numbers of plan.h's enums.
EMBEDDING_DTYPES = {"float32": 0, "bfloat16": 1, "float16": 2}
ACTIVATIONS = {"silu": 0, "gelu_tanh": 1}
KVKind = Literal[0, 1, 2, 3]
KV_FLOAT32: KVKind = 0
KV_INT8: KVKind = 1
KV_INT8_STATIC: KVKind = 2
KV_INT4: KVKind = 3
# The parts of a step whose time is kept, in order.
TIMED_PARTS = (
    "embedding",
    "norm",
    "qkv",
    "rope_kv",
    "attention",
    "output",
    "gate_up",
    "activation",
    "down",
    "head",
)


class Norm(Structure):
    """``qp_norm``"""

    _fields_: ClassVar = [("weight", c_void_p), ("eps", c_float)]


class Shape(Structure):
    """``qp_shape``"""

    _fields_: ClassVar = [
        *((name, c_int32) for name in ("hidden_size", "vocab_size", "num_threads", "embedding_dtype")),
        ("embedding", c_void_p),
        ("embedding_scale", c_float),
        ("final_norm", Norm),
        ("head", c_void_p),
    ]


NORM_FIELDS = ("attention_norm", "query_norm", "key_norm", "post_attention_norm", "mlp_norm", "post_mlp_norm")
LINEAR_FIELDS = ("query", "key", "value", "output", "gate", "up", "down")


class Layer(Structure):
    """``qp_layer``"""

    _fields_: ClassVar = [
        *((name, Norm) for name in NORM_FIELDS),
        *((name, c_void_p) for name in LINEAR_FIELDS),
        *((name, c_int32) for name in ("num_heads", "num_kv_heads", "head_dim", "intermediate_size")),
        *((name, c_int32) for name in ("rope", "window", "activation")),
        ("softmax_scale", c_float),
    ]


BATCH_SIZES = ("num_tokens", "num_sequences", "table_width", "num_rows", "num_sinks", "window")
BATCH_ARRAYS = (
    *("token_ids", "positions", "slots", "query_lens", "context_lens", "block_table", "logit_rows"),
    "dropped_blocks",
)


class Batch(Structure):
    """``qp_batch``"""

    _fields_: ClassVar = [
        *((name, c_int32) for name in BATCH_SIZES),
        *((name, c_void_p) for name in BATCH_ARRAYS),
    ]


class KV(Structure):
    """``qp_kv``"""

    _fields_: ClassVar = [
        *((name, c_int32) for name in ("block_size", "num_blocks", "key_kind", "value_kind")),
        ("layers", POINTER(c_void_p)),
        ("key_scales", c_void_p),
        ("value_scales", c_void_p),
    ]

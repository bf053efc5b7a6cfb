"""The KV cache modes: what a cache keeps of each token and KV head. Imports no torch; ``kv_rounding`` rounds.

Quantizer, backends, engine, recipes and planner all read this one list. Keys are stored after rope.

Shapes: C stored codes of one head (D = head_dim, or D / 2 where two share a byte), P parameters that a token and head
carries beside its codes.
Source: `int8_per_token_head` is vLLM's rule of that name. Four bits follow Liu et al. 2024, "KIVI: A Tuning-Free
Asymmetric 2bit Quantization for KV Cache", but per token for values and keys alike; unlike vLLM's mode of the
name `int4_per_token_head` ours rotates nothing.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from quantpipe.errors import RecipeError, suggest
from quantpipe.formats.dtypes import DTYPE_BYTES, torch_dtype

if TYPE_CHECKING:
    import torch

FLOAT32_BYTES = 4


@dataclass(frozen=True)
class KVRule:
    """How keys, or values, are stored.

    ``bits`` None is the compute dtype. 8 is symmetric: one float32 scale per token and head, or, if ``is_static``, one
    scale per layer and head from the artifact's sidecar. 4 is asymmetric: two codes per byte, and one float16 scale and
    minimum per token and head.
    """

    bits: int | None
    is_static: bool = False

    def code_width(self, head_dim: int) -> int:
        """C: how many elements hold the codes of one head."""
        return head_dim // 2 if self.bits == 4 else head_dim

    @property
    def code_type(self) -> str:
        """Of the codes, as safetensors calls it; float32 where they are in the compute dtype of a CPU."""
        return {None: "F32", 8: "I8", 4: "U8"}[self.bits]

    @property
    def code_dtype(self) -> "torch.dtype":
        return torch_dtype(self.code_type)

    @property
    def num_parameters(self) -> int:
        """P."""
        if self.bits is None or self.is_static:
            return 0
        return 1 if self.bits == 8 else 2

    @property
    def parameter_type(self) -> str:
        """Of the parameters, as safetensors calls it."""
        return "F32" if self.bits == 8 else "F16"

    @property
    def parameter_dtype(self) -> "torch.dtype":
        return torch_dtype(self.parameter_type)

    def head_bytes(self, head_dim: int, compute_bytes: int = FLOAT32_BYTES) -> int:
        """Bytes that one token and head takes; ``compute_bytes`` are those of a number in the compute dtype."""
        if self.bits is None:
            return head_dim * compute_bytes
        codes = self.code_width(head_dim) * DTYPE_BYTES[self.code_type]
        return codes + self.num_parameters * DTYPE_BYTES[self.parameter_type]


@dataclass(frozen=True)
class KVMode:
    """The rules of keys and of values."""

    key: KVRule
    value: KVRule

    @property
    def needs_scales(self) -> bool:
        """Whether it reads the artifact's ``kv_scales.safetensors``."""
        return self.key.is_static or self.value.is_static

    def token_bytes(self, num_kv_heads: int, head_dim: int, compute_bytes: int = FLOAT32_BYTES) -> int:
        """Bytes that one token takes in one layer."""
        both = (rule.head_bytes(head_dim, compute_bytes) for rule in (self.key, self.value))
        return num_kv_heads * sum(both)


COMPUTE_DTYPE = KVRule(None)
INT8 = KVRule(8)
INT8_STATIC = KVRule(8, is_static=True)
INT4 = KVRule(4)

KV_MODES: dict[str, KVMode] = {
    "auto": KVMode(COMPUTE_DTYPE, COMPUTE_DTYPE),
    "int8_per_token_head": KVMode(INT8, INT8),
    "int8_static": KVMode(INT8_STATIC, INT8_STATIC),
    "k_int8_v_int4": KVMode(INT8, INT4),
    "int4_per_token_head": KVMode(INT4, INT4),
}


def kv_mode(name: str, where: str) -> KVMode:
    """The mode of that name. RecipeError that names ``where`` it was asked for, and the known ones."""
    if name not in KV_MODES:
        raise RecipeError(f"{where}: unknown '{name}'{suggest(name, KV_MODES)}")
    return KV_MODES[name]

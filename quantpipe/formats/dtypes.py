"""The dtypes of stored tensors by their safetensors names: how many bytes they take, and what torch calls them.

Imports torch only once a torch dtype is asked for.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

DTYPE_BYTES = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2"), 1),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 2),
    **dict.fromkeys(("U32", "I32", "F32"), 4),
    **dict.fromkeys(("U64", "I64", "F64"), 8),
}
_TORCH_NAMES = {
    **{"BOOL": "bool", "U8": "uint8", "I8": "int8", "I16": "int16", "I32": "int32", "I64": "int64"},
    **{"U16": "uint16", "U32": "uint32", "U64": "uint64"},
    **{"F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float64"},
    **{"F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2"},
}


def torch_dtype(name: str) -> "torch.dtype":
    """KeyError where torch has none of that name."""
    import torch

    dtype = getattr(torch, _TORCH_NAMES[name])
    assert isinstance(dtype, torch.dtype), "the table names dtypes"
    return dtype


def num_bytes_of(torch_name: str) -> int | None:
    """Bytes of one number of what torch calls ``torch_name``, such as ``bfloat16``; None where there is none."""
    names = [name for name, own in _TORCH_NAMES.items() if own == torch_name]
    return DTYPE_BYTES[names[0]] if names else None

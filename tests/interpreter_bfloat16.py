"""Makes Triton's interpreter compute in bfloat16 as a GPU does, or refuse to.

The interpreter holds bfloat16 as the 16 bits of an unsigned integer. It converts float32 by cutting bits off, converts
integers to the integer of the same value, and multiplies the bit patterns in a dot product, all without a word. Here
conversions round to nearest even, dot products see the numbers, and arithmetic on bfloat16 raises an error: kernels
convert to float32 first. The repair is checked against torch before it is relied on.
"""

from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle


def repair() -> None:
    """Replace what is wrong, once per process; RuntimeError where that does not suffice for this Triton."""
    cast, dot, binary = InterpreterBuilder.cast_impl, InterpreterBuilder.create_dot, InterpreterBuilder.binary_op

    def convert(builder: Any, source: Any, target: Any, *rounding: Any) -> Any:
        kinds = (source.dtype.scalar, target.scalar)
        if tl.bfloat16 not in kinds or kinds[0] == kinds[1]:
            return cast(builder, source, target)
        values = _decode(source.data) if kinds[0] == tl.bfloat16 else source.data.astype(np.float32)
        if kinds[1] == tl.bfloat16:
            return TensorHandle(_encode(values), tl.bfloat16)
        return TensorHandle(values.astype(interpreter._get_np_dtype(target)), target.scalar)

    def multiply(builder: Any, a: Any, b: Any, *rest: Any) -> Any:
        operands = [
            TensorHandle(_decode(operand.data), tl.float32) if operand.dtype.scalar == tl.bfloat16 else operand
            for operand in (a, b)
        ]
        return dot(builder, *operands, *rest)

    def compute(builder: Any, lhs: Any, rhs: Any, op: Any) -> Any:
        if tl.bfloat16 in (lhs.dtype.scalar, rhs.dtype.scalar):
            raise RuntimeError("a kernel computes in bfloat16, which the interpreter cannot: convert to float32 first")
        return binary(builder, lhs, rhs, op)

    for name in ("create_si_to_fp", "create_ui_to_fp", "create_fp_to_si", "create_fp_to_ui", "create_fp_ext"):
        setattr(InterpreterBuilder, name, convert)
    InterpreterBuilder.create_fp_trunc = InterpreterBuilder.create_fp_to_fp = convert
    InterpreterBuilder.cast_impl, InterpreterBuilder.create_dot = convert, multiply
    InterpreterBuilder.binary_op = compute
    _check()


def _decode(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def _encode(values: np.ndarray) -> np.ndarray:
    rounded = torch.from_numpy(np.ascontiguousarray(values)).to(torch.bfloat16)
    return rounded.view(torch.int16).numpy().view(np.uint16)


def _check() -> None:
    """A conversion each way and a dot product, against torch."""
    import interpreter_bfloat16_kernel as kernels

    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(16, 16, generator=generator).bfloat16() for _ in range(2))
    codes = torch.randint(-128, 128, (16, 16), generator=generator, dtype=torch.int8)
    product, rounded, from_codes = torch.empty(16, 16), torch.empty_like(a), torch.empty_like(a)
    kernels.bfloat16_kernel[(1,)](a, b, codes, product, rounded, from_codes)
    torch.testing.assert_close(product, a.float() @ b.float(), rtol=1e-5, atol=1e-5)
    third = torch.tensor(1 / 3)
    if not torch.equal(rounded, (a.float() * third).bfloat16()) or not torch.equal(from_codes, codes.bfloat16()):
        raise RuntimeError("Triton's interpreter still rounds bfloat16 otherwise than torch: another repair is needed")

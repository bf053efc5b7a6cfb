"""What the check of the interpreter's bfloat16 runs."""

import triton
import triton.language as tl


@triton.jit
def bfloat16_kernel(a_ptr, b_ptr, codes_ptr, product_ptr, rounded_ptr, from_codes_ptr):
    """a @ b, a / 3 rounded to bfloat16, and integers as bfloat16; all [16, 16]."""
    cells = tl.arange(0, 16)[:, None] * 16 + tl.arange(0, 16)[None, :]
    a, b = tl.load(a_ptr + cells), tl.load(b_ptr + cells)
    tl.store(product_ptr + cells, tl.dot(a, b))
    tl.store(rounded_ptr + cells, (a.to(tl.float32) * (1 / 3)).to(tl.bfloat16))
    tl.store(from_codes_ptr + cells, tl.load(codes_ptr + cells).to(tl.bfloat16))

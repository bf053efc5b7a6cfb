"""The rule of ``formats.layout.quantize_activations`` inside kernels, bit for bit.

Divisions are rounded correctly and halves go to even, so that codes and scales are those of every other backend.

Shapes: R rows, K what a row holds.
"""

import triton
import triton.language as tl

# A float32 of this size has no bits behind the point: adding it rounds half to even, and subtracting it is exact.
ROUNDER = tl.constexpr(12582912.0)


@triton.jit
def largest_magnitude(x_RK):
    """max |x| of each row [R], float32; NaN where a row holds one."""
    # As integers, non-negative floats are in the order of their values, with NaN above infinity. The maximum of floats
    # would pass NaN over.
    bits_R = tl.max(tl.abs(x_RK).to(tl.int32, bitcast=True), axis=1)
    return bits_R.to(tl.float32, bitcast=True)


@triton.jit
def larger(a_R, b_R):
    """The larger of two magnitudes, NaN where one is."""
    bits_R = tl.maximum(a_R.to(tl.int32, bitcast=True), b_R.to(tl.int32, bitcast=True))
    return bits_R.to(tl.float32, bitcast=True)


@triton.jit
def row_scale(largest_R, divisor):
    """The scale of rows whose largest magnitudes are given; rows of zeros get 1 / divisor."""
    return tl.div_rn(tl.where(largest_R == 0, 1.0, largest_R), tl.zeros_like(largest_R) + divisor)


@triton.jit
def to_codes(x_RK, scale_R):
    """int8 codes: x / scale, rounded half to even, clamped."""
    quotient_RK = tl.div_rn(x_RK, tl.zeros_like(x_RK) + scale_R[:, None])
    rounded_RK = (quotient_RK + ROUNDER) - ROUNDER
    return tl.minimum(tl.maximum(rounded_RK, -128.0), 127.0).to(tl.int8)

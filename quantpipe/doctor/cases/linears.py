"""Matrix products in every scheme, as the loader builds them.

Shapes: T rows, N out_features, K in_features, G groups along K.
"""

from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from quantpipe.backends.triton.linear import build_linear
from quantpipe.doctor.cases.case import ROUNDING, Case, error, generator, inequality
from quantpipe.formats.layout import decode, quantize_activations
from quantpipe.formats.scheme import WeightScheme, w4a16, w8a8, weight_only
from quantpipe.models.weights import LinearWeights

DIVISOR = 127.0
# Exact products summed in float32, in an order of the kernel's own.
SUM_ERROR = 1e-5
NUM_OUT = 72
# With so many rows: one row, a few, and more than a tile.
ROWS = (1, 5, 70)
WEIGHT_ONLY = (w4a16(128), weight_only(4, 32, symmetric=False), weight_only(3, None), weight_only(8, 64))
# So long that K is split over programs on every GPU.
LONG_K = 2560


def linear_cases(dtypes: Sequence[torch.dtype]) -> Iterator[Case]:
    """Of every scheme that a kernel takes, and of weights in floating point."""
    for dtype in dtypes:
        for rows in ROWS:
            yield Case("dense", dtype, f"M={rows}", partial(_floating, None, rows, 256, dtype))
            for scheme in WEIGHT_ONLY:
                yield Case(
                    "weight only", dtype, f"{scheme.label} M={rows}", partial(_floating, scheme, rows, 256, dtype)
                )
            yield Case("int8", dtype, f"w8a8 M={rows}", partial(_int8, rows, 200, dtype))
        yield Case("weight only", dtype, "w4a16 g128 split K M=5", partial(_floating, w4a16(128), 5, LONG_K, dtype))
        yield Case("int8", dtype, "w8a8 split K M=5", partial(_int8, 5, LONG_K, dtype))


def random_weights(scheme: WeightScheme | None, num_in: int, dtype: torch.dtype) -> LinearWeights:
    """As an artifact holds them, with a bias."""
    draws = generator()
    bias_N = torch.randn(NUM_OUT, generator=draws)
    if scheme is None:
        return LinearWeights(torch.randn(NUM_OUT, num_in, generator=draws).to(dtype), None, bias_N, None)
    num_groups = scheme.num_groups(num_in)

    def integers(*shape: int) -> Tensor:
        return torch.randint(scheme.q_min, scheme.q_max + 1, shape, generator=draws, dtype=torch.int8)

    scale_NG = (torch.rand(NUM_OUT, num_groups, generator=draws) * 0.1 + 0.01).bfloat16()
    zero_NG = None if scheme.symmetric else integers(NUM_OUT, num_groups)
    return LinearWeights(integers(NUM_OUT, num_in), scale_NG, bias_N, scheme, zero_NG)


def _floating(scheme: WeightScheme | None, rows: int, num_in: int, dtype: torch.dtype, device: torch.device) -> float:
    """Under activations in floating point: not rounded, and rounded to their dtype."""
    weights = random_weights(scheme, num_in, dtype)
    x_TK = torch.randn(rows, num_in, generator=generator(1)).to(dtype)
    linear, x_on_device_TK = build_linear([weights], device, dtype, DIVISOR), x_TK.to(device)
    weight_NK = (
        weights.weight_NK if weights.scale_NG is None else decode(weights.weight_NK, weights.scale_NG, weights.zero_NG)
    )
    expected_TN = x_TK.double() @ weight_NK.double().T
    if weights.bias_N is not None:
        expected_TN += weights.bias_N.double()
    return max(
        error(linear(x_on_device_TK, torch.float32), expected_TN, SUM_ERROR),
        error(linear(x_on_device_TK), expected_TN, ROUNDING[dtype] + SUM_ERROR),
    )


def _int8(rows: int, num_in: int, dtype: torch.dtype, device: torch.device) -> float:
    """Under 8-bit activations: codes, scales and results bit for bit."""
    weights = random_weights(w8a8(), num_in, dtype)
    assert weights.scale_NG is not None
    assert weights.bias_N is not None
    x_TK = torch.randn(rows, num_in, generator=generator(1)).to(dtype)
    linear = build_linear([weights], device, dtype, DIVISOR)
    xq_TK, scale_T1 = quantize_activations(x_TK, DIVISOR)
    sums_TN = (xq_TK.double() @ weights.weight_NK.double().T).float()
    expected_TN = (sums_TN * weights.scale_NG.float().T * scale_T1 + weights.bias_N).to(dtype)
    return inequality(linear(x_TK.to(device)), expected_TN)

"""Linears of drawn sizes and numbers, and packed ones to be called.

Shapes: T rows, N out_features, K in_features, G groups along K.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import Tensor

from quantpipe.backends.cpu.native.library import Library
from quantpipe.backends.cpu.native.linears import LinearSettings, make_linear
from quantpipe.formats.scheme import w8a8, weight_only
from quantpipe.models.weights import LinearWeights

# One, some of a tile, several tiles, several blocks of tokens.
ROWS = (1, 2, 5, 6, 7, 13, 31, 121, 250)


@dataclass(frozen=True)
class Case:
    """One linear and its input; hypothesis draws the numbers that make it."""

    num_out: int
    num_in: int
    num_rows: int
    seed: int
    has_bias: bool

    def randn(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=torch.Generator().manual_seed(self.seed + len(shape)))

    def integers(self, low: int, high: int, *shape: int) -> Tensor:
        generator = torch.Generator().manual_seed(self.seed)
        return torch.randint(low, high + 1, shape, generator=generator, dtype=torch.int8)

    @property
    def bias_N(self) -> Tensor | None:
        return self.randn(self.num_out) if self.has_bias else None

    @property
    def x_TK(self) -> Tensor:
        return 3 * self.randn(self.num_rows, self.num_in)


def cases(in_features: st.SearchStrategy[int]) -> st.SearchStrategy[Case]:
    return st.builds(
        Case, st.integers(1, 100), in_features, st.sampled_from(ROWS), st.integers(0, 2**31), st.booleans()
    )


class NativeLinear:
    """One packed linear."""

    def __init__(self, library: Library, weights: LinearWeights, activation_bits: int = 32, divisor: float = 127.0):
        self._library, self._num_out = library, weights.weight_NK.shape[0]
        self._linear = make_linear(library, weights, LinearSettings(divisor, activation_bits))

    def __call__(self, x_TK: Tensor, num_threads: int = 1) -> Tensor:
        x_TK = x_TK.contiguous()
        y_TN = torch.full((x_TK.shape[0], self._num_out), 12345.0)
        arguments = (x_TK.data_ptr(), x_TK.shape[0], y_TN.data_ptr(), num_threads)
        self._library.call("qp_linear_apply", self._linear, *arguments)
        return y_TN

    def __del__(self) -> None:
        if hasattr(self, "_linear"):
            self._library.call("qp_linear_free", self._linear)


def magnitude(x_TK: Tensor, weight_NK: Tensor) -> Tensor:
    """What rounding errors of a product are measured by."""
    return x_TK.double().abs() @ weight_NK.double().abs().T + 1


def plus_bias(y_TN: Tensor, bias_N: Tensor | None) -> Tensor:
    return y_TN if bias_N is None else y_TN + bias_N


def w8a8_weights(case: Case) -> LinearWeights:
    """Scales of both signs."""
    q_NK = case.integers(-128, 127, case.num_out, case.num_in)
    return LinearWeights(q_NK, case.randn(case.num_out, 1).bfloat16(), case.bias_N, w8a8())


def integer_weights(
    case: Case, bits: int, group_size: int | None, symmetric: bool, dtype: torch.dtype
) -> LinearWeights:
    scheme = weight_only(bits, group_size, symmetric)
    num_groups = scheme.num_groups(case.num_in)
    q_NK = case.integers(scheme.q_min, scheme.q_max, case.num_out, case.num_in)
    zero_NG = None if symmetric else case.integers(scheme.q_min, scheme.q_max, case.num_out, num_groups)
    return LinearWeights(q_NK, case.randn(case.num_out, num_groups).to(dtype), case.bias_N, scheme, zero_NG)


def every_kind(case: Case) -> Iterator[tuple[LinearWeights, int]]:
    for dtype in (torch.float32, torch.bfloat16):
        yield LinearWeights(case.randn(case.num_out, case.num_in).to(dtype), None, case.bias_N, None), 32
    yield w8a8_weights(case), 8
    for bits in (4, 8):
        for activation_bits in (8, 16, 32):
            yield integer_weights(case, bits, 64, bits == 8, torch.bfloat16), activation_bits

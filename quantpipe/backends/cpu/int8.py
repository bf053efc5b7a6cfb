"""8-bit weights under 8-bit activations: oneDNN's int8 matmul where it is exact, float32 products of integers else.

On x86 without VNNI oneDNN adds products in saturating 16 bits and is silently wrong; the check at start-up sees it.

Shapes: T rows, N out_features, K in_features.
"""

import functools
from collections.abc import Iterator

import torch
from torch import Tensor

from quantpipe.backends.cpu.kernel_check import CpuLinear, KernelCase, find_fault
from quantpipe.backends.cpu.matmul import matmul
from quantpipe.backends.cpu.scratch import Scratch
from quantpipe.formats.layout import quantize_activations
from quantpipe.formats.scheme import w8a8
from quantpipe.models.weights import LinearWeights, num_bytes

# Every whole number up to this one is a float32.
MAX_EXACT_SUM = 2**24
MAX_ACTIVATION = 128


class OneDnnInt8Linear:
    """``onednn.qlinear_pointwise``; holds the weights in oneDNN's private layout."""

    def __init__(self, weights: LinearWeights, activation_divisor: float) -> None:
        assert weights.scale_NG is not None, "only quantized weights have scales"
        self._packed: Tensor = torch.ops.onednn.qlinear_prepack(weights.weight_NK, None)
        self._scale_N = weights.scale_NG.float().flatten()
        self._zero_point_N = torch.zeros(weights.weight_NK.shape[0], dtype=torch.int32)
        self._divisor = activation_divisor
        self.weight_bytes = weights.weight_NK.numel() + num_bytes([self._scale_N, self._zero_point_N])

    def __call__(self, x_TK: Tensor) -> Tensor:
        xq_TK, scale_T1 = quantize_activations(x_TK, self._divisor)
        # Unsigned activations around 128: signed ones take a path a thousand times slower.
        unsigned_TK = (xq_TK.to(torch.int16) + 128).to(torch.uint8)
        y_TN: Tensor = torch.ops.onednn.qlinear_pointwise(
            unsigned_TK,
            1.0,
            128,
            self._packed,
            self._scale_N,
            self._zero_point_N,
            None,
            1.0,
            0,
            torch.float32,
            "none",
            [],
            "",
        )
        return y_TN.mul_(scale_T1)


class ExactInt8Linear:
    """Integers multiplied as float32, cut along K so that no partial sum can leave the exact range of float32.

    A cut is seldom needed: it takes weights whose row sums of |q| exceed 2^24 / 128. Holds int8 and expands it into the
    scratch buffer for each call, which costs less than reading float32 weights from memory.
    """

    def __init__(self, weights: LinearWeights, activation_divisor: float, scratch: Scratch) -> None:
        assert weights.scale_NG is not None, "only quantized weights have scales"
        self._q_NK = weights.weight_NK
        self._scale_N = weights.scale_NG.float().flatten()
        self._divisor, self._scratch = activation_divisor, scratch
        self._num_parts = exact_parts(weights.weight_NK)
        self.weight_bytes = num_bytes([self._q_NK, self._scale_N])

    def __call__(self, x_TK: Tensor) -> Tensor:
        xq_TK, scale_T1 = quantize_activations(x_TK, self._divisor)
        weight_NK = self._scratch.matrix(*self._q_NK.shape).copy_(self._q_NK)
        x_parts, weight_parts = (m.tensor_split(self._num_parts, dim=1) for m in (xq_TK.float(), weight_NK))
        y_TN = matmul(x_parts[0], weight_parts[0])
        for x_part, weight_part in zip(x_parts[1:], weight_parts[1:], strict=True):
            y_TN += matmul(x_part, weight_part)
        return y_TN.mul_(self._scale_N).mul_(scale_T1)


def exact_parts(q_NK: Tensor) -> int:
    """Into how many parts K must be cut so that no sum over one part can leave float32's exact range."""
    magnitude_NK = q_NK.to(torch.int16).abs()
    num_parts = 1
    while True:
        sums = [part_NK.sum(1).max().item() for part_NK in magnitude_NK.tensor_split(num_parts, dim=1)]
        if MAX_ACTIVATION * max(sums) <= MAX_EXACT_SUM:
            return num_parts
        num_parts += 1


@functools.cache
def kernel_fault() -> str | None:
    """The verdict on oneDNN's int8 matmul on this machine; tried once per process."""
    return find_fault(functools.partial(OneDnnInt8Linear, activation_divisor=127.0), kernel_cases())


def kernel_cases() -> Iterator[KernelCase]:
    """The largest weights and activations of either sign, and random ones; sums are whole numbers, so exact."""
    generator = torch.Generator().manual_seed(0)
    num_out, num_in = 48, 256
    q_NK = torch.randint(-128, 128, (num_out, num_in), generator=generator, dtype=torch.int8)
    q_NK[0], q_NK[1], q_NK[2, ::2], q_NK[2, 1::2] = 127, -128, 127, -128
    weights = LinearWeights(q_NK, torch.ones(num_out, 1), None, w8a8())
    for num_rows in (3, 1, 33):
        x_TK = torch.randint(-127, 128, (num_rows, num_in), generator=generator).float()
        x_TK[0] = 127
        x_TK[-1, ::2] = -127  # with 127 somewhere in each row its scale is exactly 1
        x_TK[:, -1] = 127
        expected_TN = x_TK.double() @ q_NK.double().T
        name = f"oneDNN int8 matmul, {num_rows} rows"
        yield KernelCase(name, weights, x_TK, expected_TN, torch.zeros_like(expected_TN))


def make_int8_linear(weights: LinearWeights, activation_divisor: float, scratch: Scratch) -> tuple[CpuLinear, str]:
    """The fastest exact way to run 8-bit weights on this machine, and what the user should know about it."""
    fault = kernel_fault()
    if fault is None:
        return OneDnnInt8Linear(weights, activation_divisor), "w8a8: oneDNN's int8 matmul"
    note = f"w8a8: oneDNN's int8 matmul is not used ({fault}); integers are multiplied as float32, exact but slower"
    return ExactInt8Linear(weights, activation_divisor, scratch), note

"""8-bit linears add integers exactly on every machine; a kernel that saturates is never used."""

import pytest
import torch
from torch import Tensor

from quantpipe.backends.cpu import int8
from quantpipe.backends.cpu.int8 import ExactInt8Linear, OneDnnInt8Linear, exact_parts
from quantpipe.backends.cpu.scratch import Scratch
from quantpipe.formats.layout import decode, quantize_activations
from quantpipe.formats.scheme import w8a8
from quantpipe.models.weights import LinearWeights


def random_weights(num_out: int, num_in: int) -> LinearWeights:
    generator = torch.Generator().manual_seed(0)
    q_NK = torch.randint(-128, 128, (num_out, num_in), generator=generator, dtype=torch.int8)
    scale_N1 = (torch.rand(num_out, 1, generator=generator) + 0.1).bfloat16()
    return LinearWeights(q_NK, scale_N1, None, w8a8())


def exact_product(x_TK: Tensor, weights: LinearWeights, divisor: float) -> Tensor:
    assert weights.scale_NG is not None
    xq_TK, scale_T1 = quantize_activations(x_TK, divisor)
    return (xq_TK.double() @ weights.weight_NK.double().T) * weights.scale_NG.double().T * scale_T1.double()


@pytest.mark.parametrize("divisor", [127.0, 127.5])
@pytest.mark.parametrize("num_rows", [1, 2, 7, 33, 100])
def test_products_are_exact_but_for_one_scaling(num_rows: int, divisor: float) -> None:
    weights = random_weights(80, 384)
    x_TK = 3 * torch.randn(num_rows, 384, generator=torch.Generator().manual_seed(1))
    linear, note = int8.make_int8_linear(weights, divisor, Scratch())
    # Two float32 multiplications by scales follow the exact sum, each good to 2^-24.
    torch.testing.assert_close(linear(x_TK).double(), exact_product(x_TK, weights, divisor), rtol=2**-22, atol=0)
    assert note.startswith("w8a8: ")


def test_identity_gives_back_the_decoded_weights() -> None:
    weights = random_weights(48, 256)
    assert weights.scale_NG is not None
    linear, _ = int8.make_int8_linear(weights, 127.0, Scratch())
    torch.testing.assert_close(linear(torch.eye(256)).T, decode(weights.weight_NK, weights.scale_NG), rtol=1e-6, atol=0)


def test_rows_do_not_depend_on_what_else_is_in_the_batch() -> None:
    weights = random_weights(48, 256)
    x_TK = torch.randn(40, 256, generator=torch.Generator().manual_seed(1))
    linear, _ = int8.make_int8_linear(weights, 127.0, Scratch())
    assert torch.equal(linear(x_TK), torch.cat([linear(row) for row in x_TK.split(1)]))


def test_sums_beyond_the_exact_range_of_float32_are_cut() -> None:
    num_in = 4096
    q_NK = torch.full((16, num_in), 127, dtype=torch.int8)
    q_NK[:, -1] = 126  # an odd sum: float32 alone would round it away
    weights = LinearWeights(q_NK, torch.ones(16, 1), None, w8a8())
    x_TK = torch.full((3, num_in), 127.0)
    x_TK[:, -1] = 125.0
    assert 127 * 127 * num_in > int8.MAX_EXACT_SUM
    assert exact_parts(q_NK) == 4
    assert exact_parts(q_NK // 8) == 1
    whole = ExactInt8Linear(weights, 127.0, Scratch())(x_TK)
    expected = 127 * 127 * (num_in - 1) + 126 * 125
    assert abs(whole[0, 0].item() - expected) <= 4  # the parts are exact; float32 holds their sum to within 2^26 / 2^24


def test_this_machine_runs_the_kernel_only_if_it_is_exact() -> None:
    linear, note = int8.make_int8_linear(random_weights(48, 256), 127.0, Scratch())
    assert isinstance(linear, OneDnnInt8Linear) == (int8.kernel_fault() is None)
    assert ("is not used" in note) == (int8.kernel_fault() is not None)


def test_check_rejects_a_kernel_that_saturates_at_16_bits() -> None:
    class Saturating(ExactInt8Linear):
        """Adds pairs of products of unsigned activations in 16 bits, as x86 does without VNNI."""

        def __call__(self, x_TK: Tensor) -> Tensor:
            unsigned_TK = x_TK.to(torch.int32) + 128
            products_TNK = unsigned_TK.unsqueeze(1) * self._q_NK.to(torch.int32)
            pairs_TNp = products_TNK.unflatten(-1, (-1, 2)).sum(-1).clamp(-(2**15), 2**15 - 1)
            return (pairs_TNp.sum(-1) - 128 * self._q_NK.to(torch.int32).sum(-1)).float()

    def make(weights: LinearWeights) -> ExactInt8Linear:
        return Saturating(weights, 127.0, Scratch())

    fault = int8.find_fault(make, int8.kernel_cases())
    assert fault is not None and "off by up to" in fault


def test_check_accepts_the_exact_product_and_reports_an_operator_that_is_gone() -> None:
    assert int8.find_fault(lambda weights: ExactInt8Linear(weights, 127.0, Scratch()), int8.kernel_cases()) is None

    def gone(weights: LinearWeights) -> ExactInt8Linear:
        raise AttributeError("no attribute 'qlinear_prepack'")

    assert int8.find_fault(gone, int8.kernel_cases()) == "oneDNN int8 matmul, 3 rows: no attribute 'qlinear_prepack'"

"""The private layout of integer weights."""

import pytest
import torch

from quantpipe.backends.triton.ops.weight_panels import WORDS, check_scheme, pack_weights
from quantpipe.errors import QuantpipeError
from quantpipe.formats.scheme import weight_only


@pytest.mark.parametrize(("bits", "values", "middle"), [(3, 8, 8), (4, 8, 8), (8, 4, 128)])
def test_value_v_of_word_w_is_column_16_v_plus_w_of_its_panel(bits: int, values: int, middle: int) -> None:
    scheme = weight_only(bits, None)
    num_in = 2 * WORDS * values
    integers = torch.Generator().manual_seed(0)
    q_NK = torch.randint(scheme.q_min, scheme.q_max + 1, (5, num_in - 3), generator=integers, dtype=torch.int8)
    weights = pack_weights(q_NK, torch.ones(5, 1), None, scheme)
    assert weights.panels_PNW.shape == (2, 5, WORDS)
    for k in range(num_in - 3):
        panel, column = divmod(k, weights.panel_size)
        value, word = divmod(column, WORDS)
        words_N = weights.panels_PNW[panel, :, word].to(torch.int64) & 0xFFFFFFFF
        width = 32 // values
        assert torch.equal((words_N >> (width * value)) % (1 << width) - middle, q_NK[:, k].to(torch.int64))


def test_zero_points_are_stored_like_the_integers() -> None:
    zero_NG = torch.tensor([[-8, 0], [7, 1]], dtype=torch.int8)
    weights = pack_weights(torch.zeros(2, 64, dtype=torch.int8), torch.ones(2, 2), zero_NG, weight_only(4, 32, False))
    assert torch.equal(weights.zero_GN, torch.tensor([[0, 15], [8, 9]], dtype=torch.uint8))


@pytest.mark.parametrize("group_size", [8, 16, 48])
def test_a_group_that_no_kernel_takes_is_refused_in_one_line(group_size: int) -> None:
    with pytest.raises(
        QuantpipeError, match=rf"w4a16 g{group_size} weights in groups of {group_size}; .* that 32 divides"
    ):
        check_scheme(weight_only(4, group_size))

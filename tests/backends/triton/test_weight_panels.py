"""The private layout of integer weights."""

import pytest
import torch

from quantpipe.backends.triton.ops.weight_panels import pack_weights, panel_size
from quantpipe.errors import QuantpipeError
from quantpipe.formats.layout import pack
from quantpipe.formats.scheme import weight_only


def test_words_of_a_panel_are_those_of_the_artifact() -> None:
    scheme = weight_only(4, 64)
    q_NK = torch.randint(-8, 8, (6, 192), generator=torch.Generator().manual_seed(0), dtype=torch.int8)
    weights = pack_weights(q_NK, torch.ones(6, 3), None, scheme)
    assert torch.equal(weights.panels_PNW, pack(q_NK, 4).view(6, 3, 8).transpose(0, 1))
    assert (weights.panel_size, weights.panels_per_group, weights.out_features) == (64, 1, 6)


@pytest.mark.parametrize(
    ("group_size", "num_in", "expected"),
    [(32, 64, 32), (64, 128, 64), (96, 96, 32), (128, 256, 64), (None, 576, 64), (None, 96, 32), (None, 100, 32)],
)
def test_a_panel_never_straddles_two_groups(group_size: int | None, num_in: int, expected: int) -> None:
    assert panel_size(weight_only(4, group_size), num_in) == expected


@pytest.mark.parametrize("group_size", [8, 16, 48])
def test_a_group_that_no_kernel_takes_is_refused_in_one_line(group_size: int) -> None:
    with pytest.raises(
        QuantpipeError, match=rf"w4a16 g{group_size} weights: no kernel takes groups .* that 32 divides"
    ):
        panel_size(weight_only(4, group_size), 4 * group_size)

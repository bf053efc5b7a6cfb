import pytest
import torch
from torch import Tensor, nn

from quantpipe.quantize.transforms.hadamard import make_rotation
from quantpipe.quantize.transforms.head_values import HeadValues, candidates
from quantpipe.quantize.transforms.stream import users_of, watching

HIDDEN, SIZE = 20, 6
NUM_TOKENS = 9


class Attention(nn.Module):
    """Heads that attend by fixed random shares; ``layout`` gives the first row of each head's values."""

    def __init__(self, layout: tuple[int, ...], num_rows: int) -> None:
        super().__init__()
        self.layout = layout
        self.norm, self.value = nn.RMSNorm(HIDDEN), nn.Linear(HIDDEN, num_rows)
        self.out = nn.Linear(len(layout) * SIZE, HIDDEN)
        mixing = torch.rand(len(layout), NUM_TOKENS, NUM_TOKENS, generator=torch.Generator().manual_seed(3)).tril()
        self.share_HLL = (mixing / mixing.sum(-1, keepdim=True)).double()

    def forward(self, hidden: Tensor) -> Tensor:
        made = self.value(self.norm(hidden))
        heads = [
            share_LL @ made[:, start : start + SIZE]
            for share_LL, start in zip(self.share_HLL, self.layout, strict=True)
        ]
        added: Tensor = self.out(torch.cat(heads, -1))
        return hidden + added


LAYOUTS = {
    "a head of values for each": ((0, 6, 12, 18), 24),
    "two heads share values": ((0, 0, 6, 6), 12),
    "values behind queries and keys": ((36, 36, 42, 42), 48),
    "each head's values behind its query and key": ((12, 30), 36),
}


def drawn(layout: str) -> Attention:
    block = Attention(*LAYOUTS[layout]).double()
    generator = torch.Generator().manual_seed(0)
    for parameter in block.parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return block.requires_grad_(False)


def found_in(block: nn.Module, likely_size: int | None = None) -> list[HeadValues]:
    hidden = hidden_states()
    names = [name for name, _ in block.named_modules() if name]
    with watching(block, names) as trace:
        block(hidden)
    return list(candidates(users_of(block, names, trace, hidden, ""), trace, likely_size))


def hidden_states() -> Tensor:
    return torch.randn(NUM_TOKENS, HIDDEN, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def change(block: nn.Module, values: HeadValues) -> float:
    before = block(hidden_states())
    generator = torch.Generator().manual_seed(2)
    values.rotate(block, {start: make_rotation(values.size, "orthogonal", generator) for start in values.starts})
    return float((block(hidden_states()) - before).norm() / before.norm())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_true_head_size_is_the_largest_that_leaves_the_output(layout: str) -> None:
    found = found_in(drawn(layout))
    true = [values for values in found if change(drawn(layout), values) < 1e-12]
    assert true[0] == HeadValues("value", "out", SIZE, LAYOUTS[layout][0])
    assert all(values.size > SIZE for values in found[: found.index(true[0])])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_likely_size_is_tried_first(layout: str) -> None:
    assert found_in(drawn(layout), SIZE)[0].size == SIZE


def test_values_that_are_always_zero_do_not_hide_where_the_others_lie() -> None:
    block = drawn("two heads share values")
    for channel in (1, 4, 7):
        block.get_parameter("value.weight")[channel] = 0
        block.get_parameter("value.bias")[channel] = 0
    (values,) = [values for values in found_in(block) if values.size == SIZE]
    assert values.head_starts == (0, 0, 6, 6)


def test_rotation_changes_both_matrices() -> None:
    block = drawn("two heads share values")
    before = {name: parameter.clone() for name, parameter in block.named_parameters()}
    values = HeadValues("value", "out", SIZE, (0, 0, 6, 6))
    assert change(block, values) < 1e-12
    for name in ("value.weight", "value.bias", "out.weight"):
        assert not torch.allclose(block.get_parameter(name), before[name], atol=1e-2)
    assert torch.equal(block.get_parameter("out.bias"), before["out.bias"])

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from quantpipe.errors import RecipeError
from quantpipe.quantize.transforms.hadamard import make_rotation
from quantpipe.quantize.transforms.stream import (
    StreamUsers,
    fold_norms,
    rotate_users,
    users_of,
    watching,
    writers_reading_no_norm,
)

SIZE = 12
EXACT = 1e-12  # everything here computes in float64


class OffsetNorm(nn.Module):
    """An RMS norm that multiplies by one plus its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(SIZE))

    def forward(self, x: Tensor) -> Tensor:
        return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * (1 + self.weight)


class StrangeNorm(nn.RMSNorm):
    """A norm whose output is not proportional to its weight."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.weight


class Block(nn.Module):
    """Two readers of a norm, a writer; experts that see some rows of the norm's output, or none."""

    def __init__(self, norm: nn.Module, bias: bool = True) -> None:
        super().__init__()
        self.norm = norm
        self.gate, self.up = nn.Linear(SIZE, 20, bias=bias), nn.Linear(SIZE, 20, bias=bias)
        self.down = nn.Linear(20, SIZE)
        self.experts = nn.ModuleList(nn.ModuleList([nn.Linear(SIZE, 8), nn.Linear(8, SIZE)]) for _ in range(3))

    def forward(self, hidden: Tensor) -> Tensor:
        x = self.norm(hidden)
        added = self.down(self.gate(x).sigmoid() * self.up(x))
        for number, rows in ((0, slice(0, 3)), (1, slice(3, None))):
            enter, leave = (self.get_submodule(f"experts.{number}.{part}") for part in (0, 1))
            added[rows] += leave(enter(x[rows]).tanh())
        output: Tensor = hidden + added
        return output


class LowRank(nn.Module):
    """A norm off the stream between two factors, whose second is as wide as the stream but does not write it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.small_norm = nn.RMSNorm(SIZE), nn.RMSNorm(5)
        self.first, self.second, self.out = nn.Linear(SIZE, 5), nn.Linear(5, SIZE), nn.Linear(SIZE, SIZE)

    def forward(self, hidden: Tensor) -> Tensor:
        output: Tensor = hidden + self.out(self.second(self.small_norm(self.first(self.norm(hidden)))).tanh())
        return output


def drawn(module: nn.Module) -> nn.Module:
    generator = torch.Generator().manual_seed(0)
    for parameter in module.double().parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return module.requires_grad_(False)


def hidden_states() -> Tensor:
    return torch.randn(7, SIZE, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def observed(block: nn.Module, where: str = "") -> StreamUsers:
    names = [name for name, _ in block.named_modules() if name]
    hidden = hidden_states()
    with watching(block, names) as trace:
        block(hidden)
    return users_of(block, names, trace, hidden, where)


NORMS: dict[str, Callable[[], nn.Module]] = {
    "weight": lambda: nn.RMSNorm(SIZE),
    "one plus weight": OffsetNorm,
    "layer norm": lambda: nn.LayerNorm(SIZE),
}


@pytest.mark.parametrize("form", NORMS)
def test_form_of_a_norm_is_seen(form: str) -> None:
    (group,) = observed(drawn(Block(NORMS[form]()))).readers
    assert group.norm is not None
    assert group.norm.offset == (1.0 if form == "one plus weight" else 0.0)
    assert group.norm.is_centred == (form == "layer norm")


@pytest.mark.parametrize("bias", [True, False], ids=["readers with bias", "readers without bias"])
@pytest.mark.parametrize("form", NORMS)
def test_folding_and_rotating_turns_what_the_block_gives_out(form: str, bias: bool) -> None:
    block = drawn(Block(NORMS[form](), bias))
    hidden = hidden_states()
    expected = block(hidden)
    users = observed(block)
    fold_norms(block, users, "")
    torch.testing.assert_close(block(hidden), expected, atol=0, rtol=EXACT)
    rotation = make_rotation(SIZE, "orthogonal", torch.Generator().manual_seed(2), users.subtracts_mean)
    rotate_users(block, users, rotation)
    torch.testing.assert_close(block(rotation.apply(hidden)), rotation.apply(expected), atol=EXACT * 100, rtol=0)


def test_expert_that_no_row_reaches_is_treated_as_the_others() -> None:
    block = drawn(Block(nn.RMSNorm(SIZE)))
    users = observed(block)
    assert users.readers[0].names == ("gate", "up", "experts.0.0", "experts.1.0", "experts.2.0")
    assert users.writers == ("down", "experts.0.1", "experts.1.1", "experts.2.1")


def test_matrix_that_no_row_reaches_and_that_is_like_no_other_is_refused_by_name() -> None:
    block = drawn(Block(nn.RMSNorm(SIZE)))
    block.spare = nn.Linear(SIZE, SIZE)
    with pytest.raises(RecipeError, match=r"no probe token reaches layers\.4\.spare"):
        observed(block, "layers.4")


def test_norm_that_does_not_follow_its_weight_is_refused_by_name() -> None:
    with pytest.raises(RecipeError, match=r"what layers\.4\.norm gives out does not follow its weight"):
        observed(drawn(Block(StrangeNorm(SIZE))), "layers.4")


def test_bias_that_nothing_can_take_is_refused_by_name() -> None:
    block = drawn(Block(nn.LayerNorm(SIZE), bias=False))
    block.get_parameter("norm.weight")[3] = 0
    with pytest.raises(RecipeError, match=r"layers\.4\.norm has a bias where its weight is 0"):
        fold_norms(block, observed(block), "layers.4")


def test_second_factor_behind_a_norm_of_its_own_can_be_left_out() -> None:
    block = drawn(LowRank())
    hidden = hidden_states()
    names = [name for name, _ in block.named_modules() if name]
    with watching(block, names) as trace:
        expected = block(hidden)
    users = users_of(block, names, trace, hidden, "")
    assert users.writers == ("second", "out")
    users = writers_reading_no_norm(users, trace)
    assert users.writers == ("out",)
    rotation = make_rotation(SIZE, "hadamard", torch.Generator().manual_seed(2))
    fold_norms(block, users, "")
    rotate_users(block, users, rotation)
    torch.testing.assert_close(block(rotation.apply(hidden)), rotation.apply(expected), atol=EXACT * 100, rtol=0)


def test_watching_leaves_no_hooks() -> None:
    block = drawn(Block(nn.RMSNorm(SIZE)))
    observed(block)
    assert not any(part._forward_hooks for part in block.modules())

import threading
from collections.abc import Mapping

import pytest
import torch
from torch import Tensor, nn

from quantpipe.errors import DataError
from quantpipe.quantize.model.block_runs import Batch
from quantpipe.quantize.model.suspended import SuspendedRuns

AMPLE = 1 << 30
LEAVES = ("first", "second", "third")


class Block(nn.Module):
    """Three linears in a row; the second only where the input is not negative."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        for leaf in LEAVES:
            linear = nn.Linear(4, 4, bias=False)
            linear.weight.data = torch.randn(4, 4, generator=generator)
            self.add_module(leaf, linear)
        self.num_runs = 0

    def forward(self, hidden_SLD: Tensor, order: str = "forwards") -> Tensor:
        self.num_runs += 1
        leaves = LEAVES if order == "forwards" else LEAVES[::-1]
        x = hidden_SLD
        for leaf in leaves:
            if leaf != "second" or hidden_SLD.sum() >= 0:
                x = self.get_submodule(leaf)(x)
        if order == "twice":
            x = self.get_submodule("first")(x)
        return x


def batches(*signs: float, order: str = "forwards") -> list[Batch]:
    return [Batch(sign * torch.ones(1, 2, 4), {"order": order}) for sign in signs]


def linears(block: Block) -> Mapping[str, nn.Module]:
    return {leaf: block.get_submodule(leaf) for leaf in LEAVES}


def halve(block: Block, leaf: str) -> None:
    with torch.no_grad():
        block.get_parameter(f"{leaf}.weight").div_(2)


@pytest.mark.parametrize("max_bytes", [AMPLE, 1], ids=["kept", "given up"])
def test_weights_change_between_the_steps_of_one_pass(max_bytes: int) -> None:
    block, given = Block(), batches(1, 2)
    plain = [Block()(batch.hidden_SLD) for batch in given]
    seen = []
    with SuspendedRuns(block, linears(block), [[leaf] for leaf in LEAVES], given, max_bytes) as runs:
        for group, leaf in enumerate(LEAVES):
            for number in range(2):
                x = runs.advance(number, group)
                assert x is not None
                seen.append(x.clone())
                runs.release(number, group)
            halve(block, leaf)
        outputs = [runs.finish(number) for number in range(2)]
    # the weights before a stop are halved already when it is reached
    assert torch.equal(seen[2], block.get_submodule("first")(given[0].hidden_SLD))
    for output, before in zip(outputs, plain, strict=True):
        assert torch.allclose(output, before / 8)
    assert block.num_runs == (2 if max_bytes == AMPLE else 8)


def test_batch_that_does_not_reach_a_group_goes_past_it() -> None:
    block, given = Block(), batches(1, -1)
    with SuspendedRuns(block, linears(block), [["first"], ["second"], ["third"]], given, AMPLE) as runs:
        reached = []
        for group in range(3):
            row = []
            for number in range(2):
                row.append(runs.advance(number, group) is not None)
                runs.release(number, group)
            reached.append(row)
        assert [runs.finish(number).shape for number in range(2)] == [(1, 2, 4), (1, 2, 4)]
    assert reached == [[True, True], [True, False], [True, True]]


def test_neither_thread_nor_hook_is_left_behind_whatever_happens() -> None:
    block, before = Block(), threading.active_count()
    with (
        pytest.raises(KeyboardInterrupt),
        SuspendedRuns(block, linears(block), [["second"]], batches(1, 2, 3), AMPLE) as runs,
    ):
        runs.advance(0, 0)
        runs.advance(1, 0)
        raise KeyboardInterrupt
    assert threading.active_count() == before
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in block.modules())


def test_error_in_a_pass_is_raised_where_it_is_advanced() -> None:
    block = Block()
    broken = [Batch(torch.ones(1, 2, 3), {})]
    with (
        pytest.raises(RuntimeError, match="shapes cannot be multiplied"),
        SuspendedRuns(block, linears(block), [["second"]], broken, AMPLE) as runs,
    ):
        runs.advance(0, 0)


def test_passes_do_not_record_gradients() -> None:
    block = Block()
    with SuspendedRuns(block, linears(block), [], batches(1), AMPLE) as runs:
        assert not runs.finish(0).requires_grad
    assert torch.is_grad_enabled()


def test_order_that_differs_between_batches_is_refused() -> None:
    block = Block()
    given = batches(1, order="backwards")
    with (
        pytest.raises(DataError, match="second: runs in an order that differs"),
        SuspendedRuns(block, linears(block), [["first"], ["second"], ["third"]], given, AMPLE) as runs,
    ):
        for group in range(3):
            runs.advance(0, group)
            runs.release(0, group)
        runs.finish(0)


def test_linear_that_runs_twice_in_a_pass_is_refused() -> None:
    block = Block()
    with (
        pytest.raises(DataError, match="first runs twice in one pass"),
        SuspendedRuns(block, linears(block), [["first"]], batches(1, order="twice"), AMPLE) as runs,
    ):
        runs.advance(0, 0)
        runs.release(0, 0)
        runs.finish(0)

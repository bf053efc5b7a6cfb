from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from quantpipe.errors import DataError
from quantpipe.quantize.model.block_runs import Batch
from quantpipe.quantize.model.groups import find_groups
from quantpipe.quantize.model.loading import StreamedModel


class Gated(nn.Module):
    """Two linears that read the input, one that reads their sum, and one for inputs of either sign."""

    def __init__(self) -> None:
        super().__init__()
        for leaf in ("negative", "positive", "left", "right", "last"):
            self.add_module(leaf, nn.Linear(4, 4, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        joined = self.get_submodule("left")(x) + self.get_submodule("right")(x)
        for leaf, sign in (("negative", -1), ("positive", 1)):
            if bool((x * sign > 0).any()):
                joined = joined + self.get_submodule(leaf)(joined + 1)
        output: Tensor = self.get_submodule("last")(joined + 0)
        return output


def linears(block: nn.Module) -> dict[str, nn.Linear]:
    return {name: module for name, module in block.named_modules() if isinstance(module, nn.Linear)}


def batch(*signs: float) -> Batch:
    return Batch(torch.tensor(signs).reshape(-1, 1, 1).expand(-1, 2, 4).clone(), {})


def test_linears_that_read_one_tensor_are_together_in_order_of_execution() -> None:
    block = Gated()
    groups, unreached = find_groups(block, linears(block), [batch(1), batch(1, -1)], "blocks.0")
    assert groups == [["left", "right"], ["negative"], ["positive"], ["last"]]
    assert not unreached
    assert not any(module._forward_pre_hooks for module in block.modules())


def test_linear_that_nothing_reaches_is_named() -> None:
    block = Gated()
    with pytest.raises(DataError, match=r"blocks\.0\.negative: no calibration token reached this layer"):
        find_groups(block, linears(block), [batch(1, 2), batch(3)], "blocks.0")


def test_groups_of_a_real_block(tiny_llama: Path) -> None:
    model = StreamedModel.open(tiny_llama)
    block = model.load_block(0).float()
    hidden_SLD = torch.randn(1, 4, model.module.config.hidden_size)  # type: ignore[union-attr]
    rotary = model.module.get_submodule("model.rotary_emb")
    given = Batch(hidden_SLD, {"position_embeddings": rotary(hidden_SLD, torch.arange(4)[None])})
    with torch.no_grad():
        groups, _ = find_groups(block, linears(block), [given], "model.layers.0")
    assert groups == [
        ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
        ["self_attn.o_proj"],
        ["mlp.gate_proj", "mlp.up_proj"],
        ["mlp.down_proj"],
    ]

import copy
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from quantpipe.quantize.block_runs import Batch, capture_block_inputs, run_block
from quantpipe.quantize.discover import find_blocks
from quantpipe.quantize.loading import load_base_model
from quantpipe.quantize.pairs import ScalePair, find_pairs


def first_block(model: nn.Module) -> tuple[nn.Module, dict[str, nn.Linear], Batch]:
    blocks = find_blocks(model)
    token_ids = np.random.default_rng(0).integers(3, 128, (2, 16))
    with torch.no_grad():
        batch = capture_block_inputs(model, blocks, token_ids)[0]
    block = copy.deepcopy(blocks.blocks[0]).float()
    return block, {name: module for name, module in block.named_modules() if isinstance(module, nn.Linear)}, batch


def found(model: nn.Module) -> tuple[dict[str, ScalePair], list[tuple[tuple[str, ...], str]]]:
    pairs, missing = find_pairs(*first_block(model))
    return {pair.producer: pair for pair in pairs}, missing


@pytest.mark.parametrize("num_kv_heads", [4, 2, 1])
def test_a_llama_has_four_pairs_whatever_its_heads_share(random_llama: Callable[..., Path], num_kv_heads: int) -> None:
    pairs, missing = found(load_base_model(random_llama(num_key_value_heads=num_kv_heads)))
    assert {name: pair.consumers for name, pair in pairs.items()} == {
        "input_layernorm": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "self_attn.v_proj": ("self_attn.o_proj",),
        "post_attention_layernorm": ("mlp.gate_proj", "mlp.up_proj"),
        "mlp.up_proj": ("mlp.down_proj",),
    }
    assert missing == []


def test_columns_of_heads_that_share_values_share_a_channel(random_llama: Callable[..., Path]) -> None:
    pairs, _ = found(load_base_model(random_llama()))  # 4 heads of 16 over 2 KV heads
    expected = torch.arange(32).reshape(2, 1, 16).expand(2, 2, 16).flatten()
    assert torch.equal(pairs["self_attn.v_proj"].channel_of_K, expected)


def test_scales_of_a_proved_pair_leave_the_output_in_float64(random_llama: Callable[..., Path]) -> None:
    block, linears, batch = first_block(load_base_model(random_llama()))
    pairs, _ = find_pairs(block, linears, batch)
    block, probe = block.double(), batch.first_sequence(torch.float64)
    with torch.no_grad():
        expected = run_block(block, probe)
        for pair in pairs:
            pair.apply(block, torch.linspace(0.2, 5.0, pair.num_channels(block), dtype=torch.float64))
        # norms compute in float32 inside
        assert torch.allclose(run_block(block, probe), expected, rtol=1e-5, atol=1e-6)


def test_finding_pairs_changes_neither_the_block_nor_the_random_state(random_llama: Callable[..., Path]) -> None:
    block, linears, batch = first_block(load_base_model(random_llama()))
    before = {name: parameter.clone() for name, parameter in block.named_parameters()}
    state = torch.get_rng_state()
    find_pairs(block, linears, batch)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(parameter, before[name]) for name, parameter in block.named_parameters())


def test_a_norm_with_weight_plus_one_is_refused_and_the_rest_still_found() -> None:
    from transformers import Gemma2Config, Gemma2ForCausalLM

    config = Gemma2Config(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Gemma2ForCausalLM(config).eval()
    pairs, missing = found(model)
    assert set(pairs) == {"self_attn.v_proj", "mlp.up_proj"}
    reasons = {names: reason for names, reason in missing}
    assert (
        "input_layernorm changes the block's output"
        in reasons["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"]
    )


def test_a_tensor_that_something_else_reads_too_is_refused() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(8)
            self.up = nn.Linear(8, 8)
            self.side = nn.Linear(8, 8)

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            x = self.norm(hidden)
            return hidden + self.up(x) * torch.sigmoid(self.side(x))

    with torch.random.fork_rng():
        torch.manual_seed(0)
        block = Block()
        batch = Batch(torch.randn(1, 4, 8), {})
    pairs, missing = find_pairs(block, {"up": block.up}, batch)
    assert pairs == []
    assert missing == [(("up",), "rescaling against norm changes the block's output")]
    pairs, missing = find_pairs(block, {"up": block.up, "side": block.side}, batch)
    assert [(pair.producer, pair.consumers) for pair in pairs] == [("norm", ("up", "side"))]

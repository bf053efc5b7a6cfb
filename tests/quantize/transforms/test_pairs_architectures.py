"""Which pairs are found in each family of decoders, and that their scales leave the function as it was."""

from pathlib import Path

import pytest
import torch
from architectures import MIXTURES, MakeModel
from first_block import given_block

from quantpipe.quantize.model.block_runs import run_block
from quantpipe.quantize.transforms.pairs import find_pairs

QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
GATE_UP = ("mlp.gate_proj", "mlp.up_proj")
LLAMA = {
    "input_layernorm": QKV,
    "self_attn.v_proj": ("self_attn.o_proj",),
    "post_attention_layernorm": GATE_UP,
    "mlp.up_proj": ("mlp.down_proj",),
}
# OPT's ReLU lets positive scales through; GPT-2 is run as OPT, with the GELU that does not.
OPT = {
    "self_attn_layer_norm": QKV,
    "self_attn.v_proj": ("self_attn.out_proj",),
    "final_layer_norm": ("fc1",),
    "fc1": ("fc2",),
}
PAIRS: dict[str, dict[str, tuple[str, ...]]] = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3"), LLAMA),
    "gemma3": {
        **{name: readers for name, readers in LLAMA.items() if name != "post_attention_layernorm"},
        "pre_feedforward_layernorm": GATE_UP,
    },
    "phi3": {
        "input_layernorm": ("self_attn.qkv_proj",),
        "self_attn.qkv_proj": ("self_attn.o_proj",),
        "post_attention_layernorm": ("mlp.gate_up_proj",),
        "mlp.gate_up_proj": ("mlp.down_proj",),
    },
    "opt": OPT,
    "gpt2": {name: readers for name, readers in OPT.items() if name != "fc1"},
    "gpt_neox": {
        "input_layernorm": ("attention.query_key_value",),
        "attention.query_key_value": ("attention.dense",),
        "post_attention_layernorm": ("mlp.dense_h_to_4h",),
    },
}
EXPERTS = [f"mlp.experts.{number}" for number in range(4)]
MIXTURE = {
    "input_layernorm": QKV,
    "self_attn.v_proj": ("self_attn.o_proj",),
    "post_attention_layernorm": tuple(f"{expert}.{leaf}" for expert in EXPERTS for leaf in ("gate_proj", "up_proj")),
    **{f"{expert}.up_proj": (f"{expert}.down_proj",) for expert in EXPERTS},
}
PAIRS |= dict.fromkeys(MIXTURES, MIXTURE)


@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize("family", PAIRS)
def test_pairs_are_these_and_their_scales_leave_the_output(
    tiny_model: MakeModel, tmp_path: Path, family: str, index: int
) -> None:
    given = given_block(tiny_model(family), tmp_path, index=index, shape=(2, 16))
    pairs, _ = find_pairs(given.block, given.linears, given.batches[0])
    assert {pair.producer: pair.consumers for pair in pairs} == PAIRS[family]
    block, probe = given.block.double(), given.batches[1 - len(given.batches)].sequence(1, torch.float64)
    with torch.no_grad():
        expected = run_block(block, probe)
        generator = torch.Generator().manual_seed(7)
        for pair in pairs:
            scale_P = 0.1 + 3 * torch.rand(pair.num_channels, generator=generator, dtype=torch.float64)
            pair.apply(block, scale_P)
        error = (run_block(block, probe) - expected).norm() / (expected - probe.hidden_SLD).norm()
    # the norms of Gemma compute in float32
    assert error < (1e-5 if family == "gemma3" else 1e-12)


@pytest.mark.parametrize("family", ["gpt2", "gpt_neox"])
def test_what_a_gelu_separates_is_refused_with_the_reason(tiny_model: MakeModel, tmp_path: Path, family: str) -> None:
    given = given_block(tiny_model(family), tmp_path)
    _, missing = find_pairs(given.block, given.linears, given.batches[0])
    first, second = ("fc1", "fc2") if family == "gpt2" else ("mlp.dense_h_to_4h", "mlp.dense_4h_to_h")
    assert missing == [((second,), f"rescaling against {first} changes the block's output")]


def test_norms_that_add_one_to_their_weight_are_known_by_what_they_give_out(
    tiny_model: MakeModel, tmp_path: Path
) -> None:
    given = given_block(tiny_model("gemma3"), tmp_path)
    pairs, missing = find_pairs(given.block, given.linears, given.batches[0])
    assert missing == []
    assert {pair.producer for pair in pairs if pair.offset == 1.0} == {"input_layernorm", "pre_feedforward_layernorm"}


@pytest.mark.parametrize(("family", "rows"), [("phi3", range(96, 128)), ("gpt_neox", None)])
def test_values_are_found_inside_a_fused_output(
    tiny_model: MakeModel, tmp_path: Path, family: str, rows: range | None
) -> None:
    given = given_block(tiny_model(family), tmp_path)
    pairs, _ = find_pairs(given.block, given.linears, given.batches[0])
    fused = next(pair for pair in pairs if pair.producer.endswith(("qkv_proj", "query_key_value")))
    # 4 heads of 16; NeoX lays out query, key and value of one head after the other
    expected = rows or [head * 48 + 32 + channel for head in range(4) for channel in range(16)]
    assert fused.rows_P.tolist() == list(expected)


@pytest.mark.parametrize("family", MIXTURES)
def test_the_router_follows_the_norm_of_its_experts(tiny_model: MakeModel, tmp_path: Path, family: str) -> None:
    given = given_block(tiny_model(family), tmp_path)
    pairs, _ = find_pairs(given.block, given.linears, given.batches[0])
    followers = {pair.producer: pair.followers for pair in pairs}
    assert followers["post_attention_layernorm"] == ("mlp.gate",)
    assert followers["input_layernorm"] == ()


def test_an_expert_that_no_token_reaches_is_left_alone_and_so_is_the_norm(
    tiny_model: MakeModel, tmp_path: Path
) -> None:
    given = given_block(tiny_model("mixtral", num_experts_per_tok=1), tmp_path)
    router = given.block.get_parameter("mlp.gate.weight")
    with torch.no_grad():
        # of a number and its negative one is above zero
        router[1], router[3] = -router[0], 0
    pairs, missing = find_pairs(given.block, given.linears, given.batches[0])
    reasons = dict(missing)
    for leaf in ("gate_proj", "up_proj", "down_proj"):
        assert reasons[(f"mlp.experts.3.{leaf}",)] == "no probe token reaches it"
    readers = next(names for names in reasons if "mlp.experts.0.gate_proj" in names)
    assert reasons[readers] == (
        "mlp.experts.3.gate_proj may read post_attention_layernorm too, but no probe token reaches it"
    )
    assert "mlp.experts.0.up_proj" in {pair.producer for pair in pairs}

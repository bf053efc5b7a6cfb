from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from first_block import given_block
from torch import nn

from quantpipe.formats.scheme import w4a16, w8a8
from quantpipe.quantize import TRANSFORMS
from quantpipe.quantize.model.block_runs import Batch, run_block
from quantpipe.quantize.transforms.pairs import PROBE_TOKENS, ScalePair, find_pairs
from quantpipe.quantize.transforms.transform import TransformInput

SCHEMES = {"awq": w4a16(32), "smoothquant": w8a8()}


def random_block(make: Callable[[], nn.Module]) -> tuple[nn.Module, Batch]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return make(), Batch(torch.randn(1, 4, 8), {})


def linears_of(block: nn.Module) -> dict[str, nn.Linear]:
    return {name: module for name, module in block.named_modules() if isinstance(module, nn.Linear)}


def found(given: TransformInput) -> dict[str, ScalePair]:
    pairs, missing = find_pairs(given.block, given.linears, given.batches[0])
    assert missing == []
    return {pair.producer: pair for pair in pairs}


@pytest.mark.parametrize("num_kv_heads", [4, 2, 1])
def test_a_llama_has_four_pairs_whatever_its_heads_share(
    random_llama: Callable[..., Path], tmp_path: Path, num_kv_heads: int
) -> None:
    pairs = found(given_block(random_llama(num_key_value_heads=num_kv_heads), tmp_path))
    assert {name: pair.consumers for name, pair in pairs.items()} == {
        "input_layernorm": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "self_attn.v_proj": ("self_attn.o_proj",),
        "post_attention_layernorm": ("mlp.gate_proj", "mlp.up_proj"),
        "mlp.up_proj": ("mlp.down_proj",),
    }


def test_columns_of_heads_that_share_values_share_a_channel(random_llama: Callable[..., Path], tmp_path: Path) -> None:
    pairs = found(given_block(random_llama(), tmp_path))  # 4 heads of 16 over 2 KV heads
    expected = torch.arange(32).reshape(2, 1, 16).expand(2, 2, 16).flatten()
    assert torch.equal(pairs["self_attn.v_proj"].channel_of_K, expected)


@pytest.mark.parametrize("transform", SCHEMES)
def test_heads_that_share_values_get_one_scale_and_the_output_is_unchanged(
    random_llama: Callable[..., Path], tmp_path: Path, transform: str
) -> None:
    given = given_block(random_llama(), tmp_path, SCHEMES[transform])  # 4 query heads, 2 KV heads
    # values of very different loudness, so that a scale pays
    loudness = torch.logspace(-1, 1, 16).repeat(2)
    given.block.get_parameter("self_attn.v_proj.weight").data.mul_(loudness.unsqueeze(1))
    before = given.block.get_parameter("self_attn.o_proj.weight").clone()
    probe = given.batches[0].first_sequence(torch.float64)
    with torch.no_grad():
        expected = run_block(given.block.double(), probe)
        given.block.float()
        records = TRANSFORMS[transform](None, None)(given)  # type: ignore[arg-type]  # neither reads them
        assert any(record.producer == "self_attn.v_proj" for record in records)
        ratio_NK = given.block.get_parameter("self_attn.o_proj.weight") / before
        found_SLD = run_block(given.block.double(), probe)
    ratio_HD = ratio_NK[0].reshape(2, 2, 16)  # KV head, query head of it, channel
    torch.testing.assert_close(ratio_HD[:, 0], ratio_HD[:, 1], rtol=1e-5, atol=0)
    assert ratio_HD.std() > 0.01
    # weights and scales are float32
    assert (found_SLD - expected).norm() < 1e-6 * (expected - probe.hidden_SLD).norm()


def test_finding_pairs_changes_neither_the_block_nor_the_random_state(
    random_llama: Callable[..., Path], tmp_path: Path
) -> None:
    given = given_block(random_llama(), tmp_path)
    before = {name: parameter.clone() for name, parameter in given.block.named_parameters()}
    state = torch.get_rng_state()
    found(given)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(parameter, before[name]) for name, parameter in given.block.named_parameters())


def test_long_sequences_are_cut_for_the_proof(random_llama: Callable[..., Path], tmp_path: Path) -> None:
    given = given_block(random_llama(), tmp_path, shape=(1, 2 * PROBE_TOKENS))
    lengths: list[int] = []
    given.block.register_forward_pre_hook(lambda _module, args: lengths.append(args[0].shape[1]))
    assert len(found(given)) == 4
    assert set(lengths) == {PROBE_TOKENS}


def test_arguments_that_cannot_be_cut_are_used_whole() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(8)
            self.up = nn.Linear(8, 8)

        def forward(self, hidden: torch.Tensor, length: int) -> torch.Tensor:
            if hidden.shape[1] != length:
                raise ValueError("wrong length")
            return hidden + self.up(self.norm(hidden))

    block, _ = random_block(Block)
    batch = Batch(torch.randn(1, 200, 8, generator=torch.Generator().manual_seed(0)), {"length": 200})
    pairs, _ = find_pairs(block, linears_of(block), batch)
    assert [pair.producer for pair in pairs] == ["norm"]


class Sides(nn.Module):
    """Two linears that read one norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up = nn.Linear(8, 8)
        self.side = nn.Linear(8, 8)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        x = self.norm(hidden)
        return hidden + self.up(x) * torch.sigmoid(self.side(x))


def test_a_linear_that_is_not_quantized_but_reads_the_same_follows() -> None:
    block, batch = random_block(Sides)
    assert isinstance(block, Sides)
    (pair,), missing = find_pairs(block, {"up": block.up}, batch)
    assert (pair.producer, pair.consumers, pair.followers, missing) == ("norm", ("up",), ("side",), [])
    (pair,), _ = find_pairs(block, {"up": block.up, "side": block.side}, batch)
    assert (pair.producer, pair.consumers, pair.followers) == ("norm", ("up", "side"), ())


def test_a_tensor_that_something_without_a_weight_reads_too_is_refused() -> None:
    class Block(Sides):
        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            x = self.norm(hidden)
            return hidden + self.up(x) * torch.sigmoid(self.side(x)) + x

    block, batch = random_block(Block)
    assert isinstance(block, Block)
    pairs, missing = find_pairs(block, {"up": block.up, "side": block.side}, batch)
    assert pairs == []
    assert missing == [(("up", "side"), "rescaling against norm changes the block's output")]


def test_a_norm_that_does_not_follow_its_weight_is_refused() -> None:
    class Squared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.rand(8) + 0.5)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.weight.square()

    class Block(Sides):
        def __init__(self) -> None:
            super().__init__()
            self.norm = Squared()  # type: ignore[assignment]

    block, batch = random_block(Block)
    pairs, missing = find_pairs(block, linears_of(block), batch)
    assert pairs == []
    assert missing == [(("up", "side"), "what norm gives out does not follow its weight")]


def test_what_reads_the_residual_stream_itself_has_no_producer() -> None:
    class Block(Sides):
        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            return hidden + self.norm(self.up(hidden))

    block, batch = random_block(Block)
    assert isinstance(block, Block)
    pairs, missing = find_pairs(block, {"up": block.up}, batch)
    assert pairs == []
    assert missing == [(("up",), "what it reads is not the output of a norm or linear of the block")]


def test_consumers_in_different_modules_share_one_scale() -> None:
    """Attention and MLP side by side behind one norm."""

    class Part(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.tanh(self.inner(x))

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(8)
            self.first = Part()
            self.second = Part()

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            x = self.norm(hidden)
            return hidden + self.first(x) + self.second(x)

    block, batch = random_block(Block)
    (pair,), missing = find_pairs(block, linears_of(block), batch)
    assert (pair.producer, pair.consumers, missing) == ("norm", ("first.inner", "second.inner"), [])


def test_interleaved_halves_of_a_fused_linear_are_told_apart() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fused = nn.Linear(8, 24)
            self.down = nn.Linear(12, 8)

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            x = self.fused(hidden)
            return hidden + self.down(torch.sigmoid(x[..., ::2]) * x[..., 1::2])

    block, batch = random_block(Block)
    pairs, _ = find_pairs(block, linears_of(block), batch)
    assert [(pair.producer, pair.rows_P.tolist()) for pair in pairs] == [("fused", list(range(1, 24, 2)))]


def test_true_pairs_are_found_beside_false_ones() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(8)
            self.up = nn.Linear(8, 8)
            self.down = nn.Linear(8, 8)
            self.last = nn.Linear(8, 8)

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            x = torch.nn.functional.gelu(self.up(self.norm(hidden)))
            return hidden + self.last(torch.relu(self.down(x)))

    block, batch = random_block(Block)
    pairs, missing = find_pairs(block, linears_of(block), batch)
    assert {pair.producer: pair.consumers for pair in pairs} == {"norm": ("up",), "down": ("last",)}
    assert missing == [(("down",), "rescaling against up changes the block's output")]

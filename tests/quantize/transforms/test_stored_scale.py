from pathlib import Path

import pytest
import torch
from architectures import MakeModel
from first_block import given_block

from quantpipe.quantize.model.block_runs import run_block
from quantpipe.quantize.transforms.pairs import find_pairs
from quantpipe.quantize.transforms.stored_scale import Stored, apply_exactly, exact_scale, stored_of

EVERY = torch.arange(64)


def drawn(dtype: torch.dtype, seed: int = 0, width: int = 1) -> torch.Tensor:
    return torch.randn(64, width, generator=torch.Generator().manual_seed(seed)).to(dtype).float()


def wanted() -> torch.Tensor:
    return 0.1 + 9 * torch.rand(64, generator=torch.Generator().manual_seed(9))


@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_scale_is_the_one_that_the_rounded_quotient_amounts_to(dtype: torch.dtype, offset: float) -> None:
    old = drawn(dtype) * 0.5
    old[7] = -offset  # a channel that gives nothing out
    stored = Stored(old, EVERY, dtype, offset=offset)
    scale_P = exact_scale(wanted(), [stored])
    new = ((old[:, 0] + offset) / scale_P - offset).to(dtype).float()
    # float32 products and quotients, no rounding to the stored dtype
    torch.testing.assert_close((new + offset) * scale_P, old[:, 0] + offset, rtol=1e-6, atol=1e-7)
    alive = old[:, 0] != -offset
    if offset == 0.0:
        torch.testing.assert_close(scale_P, wanted(), rtol=2 * torch.finfo(dtype).eps, atol=0)
    else:
        # next to minus one the grid is coarse beside what is left of the weight
        assert (scale_P / wanted() - 1).abs()[alive].median() < 0.02


def test_weight_and_bias_are_divided_exactly_by_powers_of_two() -> None:
    parts = [Stored(drawn(torch.bfloat16, seed), EVERY, torch.bfloat16) for seed in (0, 1)]
    scale_P = exact_scale(wanted(), parts)
    assert torch.equal(scale_P.log2(), wanted().log2().round())
    for part in parts:
        assert torch.equal((part.old_Cn[:, 0] / scale_P).bfloat16().float() * scale_P, part.old_Cn[:, 0])


def test_what_is_multiplied_stays_exact_too() -> None:
    norm = Stored(drawn(torch.bfloat16), EVERY, torch.bfloat16)
    router = Stored(drawn(torch.bfloat16, 1, width=3), EVERY, torch.bfloat16, is_divided=False)
    scale_P = exact_scale(wanted(), [norm, router])
    assert torch.equal(scale_P.log2(), wanted().log2().round())
    product = router.old_Cn * scale_P.unsqueeze(1)
    assert torch.equal(product.bfloat16().float(), product)


def test_channels_of_a_norm_with_weight_plus_one_that_a_router_reads_keep_their_scale_where_it_is_not_exact() -> None:
    norm = Stored(drawn(torch.bfloat16), EVERY, torch.bfloat16, offset=1.0)
    router = Stored(drawn(torch.bfloat16, 1), EVERY, torch.bfloat16, is_divided=False)
    scale_P = exact_scale(torch.full((64,), 2.0), [norm, router])
    halved = (norm.old_Cn[:, 0] + 1) / 2 - 1
    assert torch.equal(scale_P == 2.0, halved.bfloat16().float() == halved)
    assert 0 < (scale_P == 2.0).sum() < 64


def test_a_channel_that_feeds_several_columns_is_exact_in_all_of_them() -> None:
    small = torch.full((4, 1), 2.0)
    small[2] = 2.0**-133  # halved, bfloat16 no longer holds it as a normal number
    router = Stored(small, torch.tensor([0, 1, 0, 1]), torch.bfloat16, is_divided=False)
    assert exact_scale(torch.tensor([0.5, 0.5]), [router]).tolist() == [1.0, 0.5]


def test_quotient_beyond_the_stored_dtype_keeps_its_scale_of_one() -> None:
    stored = Stored(torch.tensor([[6e4], [6e4]]), torch.arange(2), torch.float16)
    scale_P = exact_scale(torch.tensor([1e-3, 2.0]), [stored])
    assert scale_P[0] == 1.0
    # 30,000 on the grid of float16
    assert scale_P[1] == pytest.approx(2.0, rel=1e-3)


def test_nothing_stored_takes_any_scale() -> None:
    assert torch.equal(exact_scale(wanted(), []), wanted())


@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen2", "opt", "mixtral"])
def test_what_is_stored_is_on_its_grid_and_the_output_is_unchanged(
    tiny_model: MakeModel, tmp_path: Path, family: str
) -> None:
    given = given_block(tiny_model(family, torch.bfloat16), tmp_path)
    pairs, _ = find_pairs(given.block, given.linears, given.batches[0])
    probe = given.batches[0].first_sequence(torch.float64)
    with torch.no_grad():
        expected = run_block(given.block.double(), probe)
        given.block.float()
        generator = torch.Generator().manual_seed(0)
        for pair in pairs:
            scale_P = exact_scale(0.2 + 3 * torch.rand(pair.num_channels, generator=generator), stored_of(given, pair))
            assert not torch.equal(scale_P, torch.ones_like(scale_P))
            apply_exactly(given, pair, scale_P)
        for name, parameter in given.block.named_parameters():
            if name.removesuffix(".weight") not in given.linears:
                assert torch.equal(parameter, parameter.bfloat16().float()), name
        found = run_block(given.block.double(), probe)
    # weights and scales are float32, and so is the inside of some norms
    assert (found - expected).norm() < 1e-5 * (expected - probe.hidden_SLD).norm()

import pytest
import torch

from quantpipe.formats.layout import absmax_scale, decode, encode
from quantpipe.formats.scheme import WeightScheme, w4a16, weight_only
from quantpipe.quantize.solvers import scales
from quantpipe.quantize.solvers.scales import round_weight, search_scale


def weighted_error(weight_NK: torch.Tensor, found_NK: torch.Tensor, importance_K: torch.Tensor) -> float:
    return float(((weight_NK - found_NK) ** 2 * importance_K).sum())


@pytest.mark.parametrize("scheme", [weight_only(3, 32), w4a16(32), weight_only(4, None)], ids=lambda s: s.label)
def test_the_search_comes_close_to_trying_every_scale(scheme: WeightScheme) -> None:
    generator = torch.Generator().manual_seed(0)
    weight_NK = torch.randn(16, 64, generator=generator)
    importance_K = torch.rand(64, generator=generator)
    found = round_weight(weight_NK, scheme, torch.float32, importance_K).dequantized()
    absmax_NG = absmax_scale(weight_NK, scheme, torch.float32)
    groups = (16, absmax_NG.shape[1], -1)
    tried = []
    for fraction in torch.linspace(0.3, 1.0, 200):
        rounded_NK = decode(encode(weight_NK, absmax_NG * fraction, scheme), absmax_NG * fraction)
        tried.append((((weight_NK - rounded_NK) ** 2) * importance_K).reshape(groups).sum(-1))
    least = float(torch.stack(tried).amin(0).sum())
    assert weighted_error(weight_NK, found, importance_K) <= 1.1 * least
    plain = decode(encode(weight_NK, absmax_NG, scheme), absmax_NG)
    assert weighted_error(weight_NK, found, importance_K) < 0.95 * weighted_error(weight_NK, plain, importance_K)


@pytest.mark.parametrize("symmetric", [True, False])
def test_rows_taken_a_few_at_a_time_get_the_same_scales(symmetric: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    weight_NK = torch.randn(24, 96, generator=torch.Generator().manual_seed(1))
    scheme = weight_only(4, 32, symmetric)
    whole = search_scale(weight_NK, scheme, torch.bfloat16)
    monkeypatch.setattr(scales, "WEIGHTS_AT_ONCE", 5 * 96)
    parts = search_scale(weight_NK, scheme, torch.bfloat16)
    assert torch.equal(whole[0], parts[0])
    assert (whole[1] is None) == symmetric
    assert whole[1] is None or (parts[1] is not None and torch.equal(whole[1], parts[1]))


def test_no_group_is_worse_than_with_the_scale_that_covers_it() -> None:
    weight_NK = torch.randn(64, 128, generator=torch.Generator().manual_seed(2)) ** 3
    found_NK = round_weight(weight_NK, w4a16(32), torch.bfloat16).dequantized()
    absmax_NG = absmax_scale(weight_NK, w4a16(32), torch.bfloat16)
    plain_NK = decode(encode(weight_NK, absmax_NG, w4a16(32)), absmax_NG)
    errors = [((weight_NK - each) ** 2).reshape(64, 4, 32).sum(-1) for each in (found_NK, plain_NK)]
    assert (errors[0] <= errors[1] * (1 + 1e-5)).all()


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_a_weight_that_outweighs_its_group_is_met_exactly(sign: float) -> None:
    weight_NK = torch.randn(64, 32, generator=torch.Generator().manual_seed(3))
    importance_K = torch.ones(32)
    importance_K[7] = 1e6
    weight_NK[:, 7] = sign * (weight_NK[:, 7].abs() + 0.5)
    for scheme in (w4a16(32), weight_only(4, 32, symmetric=False)):
        found_NK = round_weight(weight_NK, scheme, torch.float32, importance_K).dequantized()
        assert ((found_NK - weight_NK)[:, 7].abs() < 1e-3 * weight_NK[:, 7].abs()).all()


def test_columns_that_nothing_reads_do_not_count() -> None:
    weight_NK = torch.full((1, 32), 0.5)
    weight_NK[0, 3] = 100.0
    importance_K = torch.ones(32)
    importance_K[3] = 0.0
    found_NK = round_weight(weight_NK, w4a16(32), torch.float32, importance_K).dequantized()
    covering_NK = round_weight(weight_NK, w4a16(32), torch.float32).dequantized()
    assert weighted_error(weight_NK, found_NK, importance_K) <= weighted_error(weight_NK, covering_NK, importance_K)


def test_a_group_whose_largest_weight_is_positive_gains_from_a_negative_scale() -> None:
    weight_NK = torch.linspace(-0.2, 0.8, 32).unsqueeze(0)
    scale_NG, _ = search_scale(weight_NK, w4a16(32), torch.float32, None, signed=True)
    assert float(scale_NG) < 0
    errors = [
        float((weight_NK - round_weight(weight_NK, w4a16(32), torch.float32, None, signed).dequantized()).norm())
        for signed in (True, False)
    ]
    assert errors[0] < errors[1]

import pytest
import torch

from quantpipe.quantize.loop.observers import CrossObserver, HessianObserver


# 8: one product; 300: three, the last one narrower
@pytest.mark.parametrize("width", [8, 300])
def test_batches_of_any_length_equal_their_concatenation(width: int) -> None:
    x_TK = torch.randn(31, width, generator=torch.Generator().manual_seed(0))
    whole, parts = HessianObserver(width), HessianObserver(width)
    whole.update(x_TK)
    for part in x_TK.split([5, 9, 17]):
        parts.update(part)
    assert parts.num_tokens == 31
    assert torch.allclose(whole.mean_KK, parts.mean_KK, rtol=1e-5, atol=1e-6)
    assert torch.allclose(whole.mean_KK, x_TK.T @ x_TK / 31, rtol=1e-5, atol=1e-6)


def test_hessian_is_exactly_symmetric_and_may_be_looked_at_in_between() -> None:
    x_TK = torch.randn(64, 300, generator=torch.Generator().manual_seed(0))
    looked_at, unseen = HessianObserver(300), HessianObserver(300)
    for part in x_TK.split(16):
        looked_at.update(part)
        unseen.update(part)
        assert torch.equal(looked_at.mean_KK, looked_at.mean_KK.T)
    assert torch.equal(looked_at.mean_KK, unseen.mean_KK)


def test_leading_dimensions_are_tokens_and_no_tokens_change_nothing() -> None:
    x_STK = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(0))
    flat, batched = HessianObserver(8), HessianObserver(8)
    flat.update(torch.empty(0, 8))
    flat.update(x_STK.reshape(6, 8))
    batched.update(x_STK)
    assert torch.equal(flat.mean_KK, batched.mean_KK)


def test_cross_statistics_are_of_the_difference_by_the_input() -> None:
    generator = torch.Generator().manual_seed(0)
    x_TK, full_TK = torch.randn(31, 8, generator=generator), torch.randn(31, 8, generator=generator)
    observer = CrossObserver(8)
    for rows in torch.arange(31).split([5, 9, 17]):
        observer.update(x_TK[rows], full_TK[rows])
    assert torch.allclose(observer.mean_KK, (full_TK - x_TK).T @ x_TK / 31, rtol=1e-5, atol=1e-6)

import torch

from quantpipe.quantize.observers import HessianObserver


def test_batches_of_any_length_equal_their_concatenation() -> None:
    x_TK = torch.randn(31, 8, generator=torch.Generator().manual_seed(0))
    whole, parts = HessianObserver(8), HessianObserver(8)
    whole.update(x_TK)
    for part in x_TK.split([5, 9, 17]):
        parts.update(part)
    assert parts.num_tokens == 31
    assert torch.allclose(whole.mean_KK, parts.mean_KK, rtol=1e-5, atol=1e-6)
    assert torch.allclose(whole.mean_KK, x_TK.T @ x_TK / 31, rtol=1e-5, atol=1e-6)


def test_leading_dimensions_are_tokens() -> None:
    x_STK = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(0))
    flat, batched = HessianObserver(8), HessianObserver(8)
    flat.update(x_STK.reshape(6, 8))
    batched.update(x_STK)
    assert torch.equal(flat.mean_KK, batched.mean_KK)

"""The most likely token by the rule of the protocol: the lowest id of equals, -1 where the largest is not finite."""

import pytest
import torch

from quantpipe.backends import most_likely as specification
from quantpipe.backends.triton import launch_table
from quantpipe.backends.triton.ops.sampling import most_likely


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("vocab_size", [1, 16, 50])
def test_choice_equals_the_specifications(vocab_size: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch_table, "GREEDY_LOGITS", 16)
    generator = torch.Generator().manual_seed(0)
    logits_RV = torch.randint(-3, 4, (12, vocab_size), generator=generator).to(dtype)  # with many equals
    last = vocab_size - 1
    logits_RV[0, last], logits_RV[1, last], logits_RV[2] = torch.nan, torch.inf, -torch.inf
    logits_RV[3], logits_RV[3, last] = -torch.inf, -5.0
    logits_RV[4, last] = 7.0
    logits_RV[5] = torch.nan
    assert most_likely(logits_RV).tolist() == specification.most_likely(logits_RV).tolist()
    assert most_likely(logits_RV)[:6].tolist() == [-1, -1, -1, last, last, -1]


def test_rows_may_lie_apart() -> None:
    logits_RV = torch.randn(4, 40, generator=torch.Generator().manual_seed(0))[::2]
    assert torch.equal(most_likely(logits_RV), logits_RV.argmax(-1))
    assert most_likely(logits_RV[:0]).shape == (0,)

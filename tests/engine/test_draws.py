"""Random numbers addressed by seed and index."""

import math

import torch

from quantpipe.engine.draws import uniform


def test_uniform_numbers_are_reproducible_even_and_uncorrelated() -> None:
    for numbers in ([uniform(7, index) for index in range(4000)], [uniform(seed, 3) for seed in range(4000)]):
        values = torch.tensor(numbers, dtype=torch.float64)
        assert values.min() >= 0 and values.max() < 1
        counts = torch.histc(values, bins=10, min=0, max=1)
        assert (counts - 400).abs().max() < 4 * math.sqrt(400)
        assert abs(float(torch.corrcoef(torch.stack([values[:-1], values[1:]]))[0, 1])) < 4 / math.sqrt(4000)
    assert uniform(7, 3) == uniform(7, 3) != uniform(-7, 3)
    assert uniform(0, 1) != uniform(1, 0)

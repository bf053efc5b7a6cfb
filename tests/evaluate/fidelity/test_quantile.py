import numpy as np
import pytest

from quantpipe.evaluate.fidelity.quantile import quantile_interval


def clusters(num_clusters: int, size: int) -> np.ndarray:
    return np.repeat(np.arange(num_clusters), size)


def test_ends_are_values_around_the_quantile() -> None:
    values_N = np.random.default_rng(0).lognormal(size=4000)
    low, high = quantile_interval(values_N, clusters(16, 250), 0.99, 0.90)
    assert low < np.quantile(values_N, 0.99) < high
    assert quantile_interval(np.zeros(4000), clusters(16, 250), 0.99, 0.90) == (0.0, 0.0)


@pytest.mark.parametrize(("spread", "at_least"), [(0.0, 0.85), (0.3, 0.82)])
def test_coverage_is_near_what_it_says(spread: float, at_least: float) -> None:
    """16 windows of 255 positions, heavy tails, windows that differ; 300 samples tell 0.90 from 0.85 beyond doubt."""
    generator = np.random.default_rng(5)

    def draw(num_windows: int) -> np.ndarray:
        of_window = spread * generator.normal(size=(num_windows, 1))
        return np.exp(of_window + 1.5 * generator.normal(size=(num_windows, 255))).ravel()

    truth = np.quantile(draw(20_000), 0.99)
    intervals = [quantile_interval(draw(16), clusters(16, 255), 0.99, 0.90) for _ in range(300)]
    assert np.mean([low <= truth <= high for low, high in intervals]) >= at_least

"""How many items a limit needs, against what happens where there are that many."""

import math

import numpy as np
import pytest

from quantpipe.evaluate.intervals import t_quantile, tango_interval
from quantpipe.evaluate.power import drop_power, mean_power


def pass_frac(margin: float, discordance: float, num_items: int, loss: float = 0.0, num_draws: int = 4000) -> float:
    """Share of draws whose Tango interval ends inside the margin, or for a ``loss`` begins beyond it."""
    rng = np.random.default_rng(21)
    lost_frac = (discordance + loss) / 2
    draws = rng.multinomial(num_items, [lost_frac, discordance - lost_frac, 1 - discordance], size=num_draws)
    unique, counts = np.unique(draws[:, :2], axis=0, return_counts=True)
    critical = t_quantile(0.9, num_items)
    ends = [tango_interval(float(b), float(c), num_items, critical) for b, c in unique]
    decided = [low > margin if loss else high <= margin for low, high in ends]
    return float(np.average(decided, weights=counts))


@pytest.mark.parametrize(
    ("margin", "discordance"), [(0.01, 0.02), (0.02, 0.05), (0.05, 0.05), (0.01, 0.005), (0.05, 0.2)]
)
def test_as_many_items_as_needed_pass_a_lossless_candidate_four_times_in_five(
    margin: float, discordance: float
) -> None:
    needed = drop_power(margin, 150, discordance).needed
    assert needed is not None
    assert pass_frac(margin, discordance, needed) == pytest.approx(0.8, abs=0.035)  # counts are discrete


def test_fewer_than_the_least_cannot_pass_even_without_a_flip() -> None:
    least = drop_power(0.01, 150, 0.02).least
    assert least is not None
    z = t_quantile(0.9, 10**6)
    assert tango_interval(0, 0, least, z)[1] <= 0.01 < tango_interval(0, 0, least - 1, z)[1]
    assert not drop_power(0.01, least - 1, 0.0).can_pass
    assert drop_power(0.01, least, 0.0).can_pass


def test_small_task_with_a_margin_of_a_point_can_hardly_be_decided() -> None:
    found = drop_power(0.01, 150, 0.02)
    assert (found.can_pass, found.is_enough) == (False, False)
    assert found.needed == pytest.approx(1400, rel=0.01)
    assert 0.04 < found.failed_frac < 0.08


def test_loss_that_is_failed_is_failed_at_least_four_times_in_five() -> None:
    loss = drop_power(0.02, 600, 0.05).failed_frac
    assert 0.78 < pass_frac(0.02, 0.05, 600, loss=loss) < 0.95


def test_clusters_multiply_and_no_margin_needs_more_than_there_are() -> None:
    single, shared = drop_power(0.02, 100, 0.04), drop_power(0.02, 100, 0.04, design_effect=3)
    assert single.needed is not None and shared.needed == pytest.approx(3 * single.needed, abs=3)
    none = drop_power(0.0, 100, 0.04)
    assert (none.needed, none.least, none.can_pass, none.is_enough) == (None, None, False, False)


def test_mean_needs_more_samples_the_closer_its_limit_is() -> None:
    assert mean_power(0.01, 16, 0.02) == math.ceil(16 / 4 * (2.486 / 1.645) ** 2)
    assert mean_power(0.01, 16, 0.0) is None
    assert mean_power(math.inf, 16, 0.01) is None

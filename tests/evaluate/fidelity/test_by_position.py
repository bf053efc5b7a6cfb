import numpy as np
import pytest

from quantpipe.evaluate.fidelity.by_position import position_rows, slope_per_doubling


def test_buckets_double_and_hold_every_position_once() -> None:
    kl_WT = np.tile(np.arange(1.0, 256.0), (4, 1))
    rows = position_rows(kl_WT, 0.9)
    assert [(row.first, row.last) for row in rows] == [(1, 15), (16, 31), (32, 63), (64, 127), (128, 255)]
    assert [row.mean_kl for row in rows] == [(row.first + row.last) / 2 for row in rows]
    assert [(row.first, row.last) for row in position_rows(kl_WT[:, :20], 0.9)] == [(1, 15), (16, 20)]
    assert [(row.first, row.last) for row in position_rows(kl_WT[:, :3], 0.9)] == [(1, 3)]


def test_slope_is_what_each_doubling_adds() -> None:
    context = np.arange(1, 1024)
    exact_T = 0.01 * np.floor(np.log2(context))
    value, (low, high) = slope_per_doubling(np.tile(exact_T, (3, 1)), 0.9) or (0.0, (0.0, 0.0))
    assert (value, low, high) == (pytest.approx(0.01), pytest.approx(0.01), pytest.approx(0.01))
    noise_WT = np.random.default_rng(0).exponential(0.05, size=(16, 1023))
    flat, (low, high) = slope_per_doubling(noise_WT, 0.9) or (1.0, (1.0, 1.0))
    assert low < 0 < high and abs(flat) < 0.005
    assert (slope_per_doubling(noise_WT + exact_T, 0.9) or (0.0, (0.0, 0.0)))[1][0] > 0.005


def test_short_windows_and_single_ones_have_no_slope() -> None:
    assert slope_per_doubling(np.zeros((4, 63)), 0.9) is None
    assert slope_per_doubling(np.zeros((1, 255)), 0.9) is None

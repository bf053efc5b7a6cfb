"""Percentiles of the last minute."""

from quantpipe.serve.recent import MAX_SAMPLES, WINDOW_S, Percentiles, RecentValues


def test_percentiles_are_values_of_the_last_minute_only() -> None:
    now_s = 0.0
    values = RecentValues(lambda: now_s)
    assert values.percentiles() == Percentiles(0, None, None)
    values.add(1000.0)
    now_s = WINDOW_S + 1
    for value in range(100):
        values.add(float(value))
    assert values.percentiles() == Percentiles(100, 50.0, 95.0)
    values.add(7.0)
    assert values.percentiles().num == 101
    now_s = 2 * WINDOW_S + 2
    assert values.percentiles() == Percentiles(0, None, None)


def test_the_latest_are_kept_if_there_are_too_many() -> None:
    values = RecentValues(lambda: 0.0)
    for value in range(MAX_SAMPLES + 10):
        values.add(float(value))
    assert values.percentiles().num == MAX_SAMPLES
    one = RecentValues(lambda: 0.0)
    one.add(3.0)
    assert one.percentiles() == Percentiles(1, 3.0, 3.0)

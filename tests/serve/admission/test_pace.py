"""When somebody who is turned away should come again."""

from quantpipe.serve.admission.pace import MAX_WAIT_S, Pace


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def paced(per_s: float, num: int = 20) -> tuple[Pace, Clock]:
    """A pace at which ``per_s`` places were given back every second."""
    clock = Clock()
    pace = Pace(clock)
    for _ in range(num):
        clock.now_s += 1 / per_s
        pace.released(1)
    return pace, clock


def test_wait_is_what_is_missing_over_the_rate_of_release() -> None:
    pace, _ = paced(per_s=2)
    assert pace.retry_after_s(10) == 5


def test_everybody_who_is_turned_away_is_told_a_later_time() -> None:
    pace, clock = paced(per_s=2)
    assert [pace.retry_after_s(4) for _ in range(4)] == [2, 4, 6, 8]
    clock.now_s += 4.1  # the first two have come back, and the releases are slower on the whole by now
    assert 6 <= pace.retry_after_s(4) < 12


def test_a_server_that_stopped_giving_back_is_told_from_a_fast_one() -> None:
    pace, clock = paced(per_s=10)
    clock.now_s += 60
    assert pace.retry_after_s(1) > 1


def test_wait_is_at_least_a_second_and_at_most_a_minute() -> None:
    assert Pace().retry_after_s(1000) == 1  # nothing is known
    pace, _ = paced(per_s=1000)
    assert pace.retry_after_s(1) == 1
    pace, _ = paced(per_s=1)
    assert [pace.retry_after_s(10**6) for _ in range(3)] == [MAX_WAIT_S] * 3
    assert pace.retry_after_s(5) == 5, "a promise that is not kept stands in nobody's way"

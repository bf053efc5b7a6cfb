"""How long restarts wait, by a clock that stands where it is put."""

from quantpipe.serve.engine_process.backoff import Backoff


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_pauses_double_up_to_half_a_minute_and_begin_anew_after_a_success() -> None:
    backoff = Backoff(Clock())
    assert [backoff.next_delay_s() for _ in range(8)] == [1, 2, 4, 8, 16, 30, 30, 30]
    backoff.reset()
    assert backoff.next_delay_s() == 1


def test_what_is_left_is_the_pause_and_a_start_and_never_less_than_a_second() -> None:
    clock = Clock()
    backoff = Backoff(clock)
    assert backoff.retry_after_s == 1
    backoff.start_s = 2.5
    for _ in range(4):
        delay_s = backoff.next_delay_s()
    assert (delay_s, backoff.retry_after_s) == (8, 11)
    clock.now_s += 4
    assert backoff.retry_after_s == 7
    clock.now_s += 60
    assert backoff.retry_after_s == 1

"""Limits of one key, on a clock of our own."""

import pytest

from quantpipe.serve.admission.key_limits import KeyLimits, KeyUsage
from quantpipe.serve.admission.limits import RefusedError


class Clock:
    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def test_requests_at_a_time() -> None:
    usage = KeyUsage(KeyLimits(max_concurrent=2))
    usage.begin()
    usage.begin()
    with pytest.raises(RefusedError, match="2 requests at a time") as caught:
        usage.begin()
    assert (caught.value.status, caught.value.code) == (429, "rate_limit_exceeded")
    usage.end()
    usage.begin()


def test_requests_per_minute_and_the_time_that_is_told_suffices() -> None:
    clock = Clock()
    usage = KeyUsage(KeyLimits(requests_per_minute=3), clock)
    for _ in range(3):
        usage.begin()
        clock.now_s += 10
    with pytest.raises(RefusedError, match="3 requests in the last minute; 3 is the limit") as caught:
        usage.begin()
    assert caught.value.retry_after_s is not None and 30 <= caught.value.retry_after_s <= 32
    clock.now_s += caught.value.retry_after_s
    usage.begin()


def test_tokens_count_as_they_are_used_and_too_many_are_waited_for() -> None:
    clock = Clock()
    usage = KeyUsage(KeyLimits(tokens_per_minute=100), clock)
    usage.begin()
    usage.use(99)
    usage.begin()  # the minute's tokens are not used up, so it begins, whatever it will take
    usage.use(500)
    with pytest.raises(RefusedError, match="599 tokens") as caught:
        usage.begin()
    clock.now_s += caught.value.retry_after_s or 0
    usage.begin()


def test_what_was_refused_is_not_counted() -> None:
    clock = Clock()
    usage = KeyUsage(KeyLimits(max_concurrent=1, requests_per_minute=2), clock)
    usage.begin()
    for _ in range(5):
        with pytest.raises(RefusedError):
            usage.begin()
    usage.end()
    usage.begin()
    assert usage.num_open == 1

"""The limit follows the machine: steps come to take what they should, and it is forgotten when there is room again."""

import pytest

from quantpipe.engine.batch_limit import BatchLimit


def run(limit: BatchLimit, num_steps: int, token_s: float, now_s: float = 0.0) -> list[float]:
    """Steps that use the whole limit, each taking ``token_s`` per token."""
    steps_s = []
    for _ in range(num_steps):
        steps_s.append(limit.num_tokens * token_s)
        now_s += steps_s[-1]
        limit.observe(limit.num_tokens, steps_s[-1], now_s)
    return steps_s


def test_without_a_target_nothing_changes() -> None:
    limit = BatchLimit(512, None)
    run(limit, 50, 10.0)
    assert limit.num_tokens == 512


@pytest.mark.parametrize("token_s", [0.0005, 0.002, 0.05])
def test_steps_settle_near_the_target(token_s: float) -> None:
    limit = BatchLimit(512, 0.1)
    late = run(limit, 300, token_s)[100:]
    assert max(late) < 0.1 + max(0.011, 1.1 * token_s)  # tokens are whole
    assert sum(late) / len(late) > 0.7 * 0.1


def test_limit_shrinks_from_what_was_used_not_from_what_was_allowed() -> None:
    limit = BatchLimit(512, 0.1)
    limit.observe(40, 0.2, 0.2)
    assert limit.num_tokens == 20


def test_one_outlier_at_most_halves_the_limit_and_it_is_never_below_a_token() -> None:
    limit = BatchLimit(512, 0.1)
    limit.observe(512, 60.0, 60.0)
    assert limit.num_tokens == 256
    for step in range(50):
        limit.observe(limit.num_tokens, 1.0, 61.0 + step)
    assert limit.num_tokens == 1


def test_limit_grows_back_while_the_engine_is_idle() -> None:
    limit = BatchLimit(512, 0.1)
    for step in range(20):
        limit.observe(limit.num_tokens, 1.0, 1.0 + step)
    assert limit.num_tokens == 1
    limit.observe(1, 0.01, 30.0)
    assert limit.num_tokens == 512

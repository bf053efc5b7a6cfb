"""When a batch is formed, and that nobody joins it once it runs."""

import pytest

from quantpipe.engine.batching import Batching


def test_continuous_takes_whoever_waits() -> None:
    assert Batching("continuous", 4, 1.0).num_places(num_running=3, num_waiting=9, now_s=0.0) == 9


@pytest.mark.parametrize("mode", ["dynamic", "static"])
def test_nobody_joins_before_the_whole_batch_has_ended(mode: str) -> None:
    batching = Batching(mode, 4, 1.0)
    assert batching.num_places(0, 9, 0.0) == 4
    for _ in range(4):
        batching.joined()
    assert [batching.num_places(num_running, 5, 0.0) for num_running in (4, 3, 1)] == [0, 0, 0]
    assert batching.num_places(0, 5, 0.0) == 4


@pytest.mark.parametrize("mode", ["dynamic", "static"])
def test_batch_whose_prompts_exceed_a_step_is_joined_over_several(mode: str) -> None:
    batching = Batching(mode, 4, 1.0)
    assert batching.num_places(0, 9, 0.0) == 4
    batching.joined()
    assert batching.num_places(1, 8, 0.0) == 3
    batching.close()
    assert batching.num_places(1, 8, 0.0) == 0


def test_dynamic_batch_is_what_waits_and_static_waits_for_more() -> None:
    dynamic, static = Batching("dynamic", 4, 1.0), Batching("static", 4, 1.0)
    for batching in (dynamic, static):
        batching.arrived(10.0)
        batching.arrived(10.5)
    assert dynamic.num_places(0, 2, 10.6) == 2
    assert static.num_places(0, 2, 10.6) == 0
    assert static.wait_s(2, 10.6) == pytest.approx(0.9)
    assert static.num_places(0, 4, 10.6) == 4
    assert static.num_places(0, 2, 11.5) == 2
    assert static.wait_s(0, 10.6) == 0

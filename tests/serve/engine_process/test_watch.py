"""When an engine counts as stalled or hung."""

import pytest

from quantpipe.serve.engine_process.watch import EngineWatch, WatchLimits


def test_an_idle_engine_that_answers_moves() -> None:
    watch = EngineWatch(1.0)
    for _ in range(100):
        watch.pass_time(1.0)
        assert watch.ask()
        watch.answered(None)
    assert watch.still_s == 0


def test_one_step_that_lasts_counts_from_its_first_answer_on() -> None:
    watch = EngineWatch(1.0)
    for number in range(5):
        watch.pass_time(1.0)
        watch.ask()
        watch.answered(7)
        assert watch.still_s == number
    watch.answered(8)
    assert watch.still_s == 0


def test_no_answer_counts_and_no_second_question_is_asked() -> None:
    watch = EngineWatch(1.0)
    assert watch.ask()
    for _ in range(10):
        watch.pass_time(1.0)
        assert not watch.ask()
    assert watch.still_s == 10
    watch.answered(None)
    assert watch.still_s == 0 and watch.ask()


def test_finished_steps_are_signs_of_life_where_answers_are_late() -> None:
    watch = EngineWatch(1.0)
    watch.ask()
    for _ in range(10):
        watch.pass_time(1.0)
        watch.moved()
    assert watch.still_s == 0


def test_a_pause_of_the_one_who_watches_is_not_held_against_the_engine() -> None:
    watch = EngineWatch(1.0)
    watch.ask()
    watch.answered(3)
    watch.pass_time(3600.0)
    assert watch.still_s == 2.0


@pytest.mark.parametrize(("stalled_s", "hung_s", "interval_s"), [(30.0, 120.0, 1.0), (1.0, 3.0, 0.25), (8.0, 0.4, 0.1)])
def test_it_is_asked_often_enough_for_both_limits(stalled_s: float, hung_s: float, interval_s: float) -> None:
    assert WatchLimits(stalled_s, hung_s).interval_s == pytest.approx(interval_s)

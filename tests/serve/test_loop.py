"""The engine's thread: turns, refusals, aborts, idleness. Messages in, messages out."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from quantpipe.engine.request import SamplingParams
from quantpipe.serve.engine_process.messages import Abort, Accepted, Add, FromEngine, Stepped
from quantpipe.serve.loop import EngineLoop, Inbox
from quantpipe.serve.submission import PromptJob

MakeEngine = Callable[..., Any]
ENDLESS = SamplingParams(max_tokens=500, ignore_eos=True)


class Started:
    """A loop in a thread, and what it has said."""

    def __init__(self, engine: Any) -> None:
        self.said: list[FromEngine] = []
        self.inbox = Inbox()
        self.loop = EngineLoop(engine, self.inbox, lambda *messages: self.said.extend(messages))
        self.thread = threading.Thread(target=self.loop.run)

    def accepted(self) -> list[Accepted]:
        return [message for message in self.said if isinstance(message, Accepted)]

    def token_ids(self, request_id: str, index: int = 0) -> list[int]:
        outputs = [output for message in self.said if isinstance(message, Stepped) for output in message.outputs]
        own = [output for output in outputs if (output.request_id, output.index) == (request_id, index)]
        return [token_id for output in own for token_id in output.text_token_ids]


@contextmanager
def started(engine: Any) -> Iterator[Started]:
    loop = Started(engine)
    loop.thread.start()
    try:
        yield loop
    finally:
        loop.inbox.close()
        loop.thread.join(10)
        assert not loop.thread.is_alive()


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < deadline, "did not happen within 5 s"
        time.sleep(0.005)


def test_what_was_added_is_accepted_before_its_first_step(make_engine: MakeEngine) -> None:
    with started(make_engine()) as loop:
        loop.inbox.put(Add(("a", "b"), (PromptJob((1, 2), SamplingParams()), PromptJob((7,), SamplingParams()))))
        until(lambda: loop.loop.round is None and len(loop.said) > 1)
    assert loop.said[0] == Accepted("a")
    assert isinstance(loop.said[1], Stepped) and loop.said[1].stats.num_running == 2
    assert (loop.token_ids("a"), loop.token_ids("b")) == ([1, 2], [7])


def test_one_refusal_takes_back_what_was_added_with_it(make_engine: MakeEngine) -> None:
    engine = make_engine()
    with started(engine) as loop:
        loop.inbox.put(Add(("a", "b"), (PromptJob((1,), ENDLESS), PromptJob((99_999,), ENDLESS))))
        until(lambda: bool(loop.accepted()) and not engine.has_unfinished)
    (answer,) = loop.accepted()
    assert answer.param == "prompt" and "outside the vocabulary" in str(answer.refusal)
    assert not loop.loop._read


def test_aborted_samples_are_not_spoken_of_and_the_last_ends_the_request(make_engine: MakeEngine) -> None:
    engine = make_engine(step_s=0.001)
    with started(engine) as loop:
        loop.inbox.put(Add(("a",), (PromptJob((1,), SamplingParams(max_tokens=500, ignore_eos=True, n=2)),)))
        until(lambda: len(loop.token_ids("a", 1)) > 2)
        loop.inbox.put(Abort((("a", 0),)))
        until(lambda: engine._running["a"] == {1})
        num_tokens = len(loop.token_ids("a", 0))
        until(lambda: len(loop.token_ids("a", 1)) > num_tokens + 3)
        assert len(loop.token_ids("a", 0)) <= num_tokens + 1
        loop.inbox.put(Abort((("a", 1), ("unknown", 0))))
        until(lambda: not engine.has_unfinished and not loop.loop._read)
        until(lambda: isinstance(last := loop.said[-1], Stepped) and last.stats.num_running == 0)


def test_an_engine_that_finished_or_gave_up_holds_nothing(make_engine: MakeEngine) -> None:
    engine = make_engine()
    with started(engine) as loop:
        for number in range(20):
            loop.inbox.put(Add((f"{number}",), (PromptJob((number,), SamplingParams()),)))
        until(lambda: len(loop.accepted()) == 20 and not engine.has_unfinished)
    assert not (engine._progress or engine._finished or loop.loop._read)


def test_the_round_shows_whether_it_moves(make_engine: MakeEngine) -> None:
    with started(make_engine(step_s=0.01)) as loop:
        assert loop.loop.round is None
        loop.inbox.put(Add(("a",), (PromptJob((1,), ENDLESS),)))
        until(lambda: loop.loop.round is not None)
        first = loop.loop.round
        until(lambda: loop.loop.round not in (None, first))
        loop.inbox.put(Abort((("a", 0),)))
        until(lambda: loop.loop.round is None)


def test_idle_thread_sleeps(make_engine: MakeEngine) -> None:
    engine = make_engine()
    with started(engine) as loop:
        loop.inbox.put(Add(("a",), (PromptJob((1,), SamplingParams()),)))
        until(lambda: loop.loop.round is None and len(loop.said) > 1)
        time.sleep(0.05)
        clock = time.pthread_getcpuclockid(loop.thread.ident or 0)
        num_polls, cpu_s = engine.num_polls, time.clock_gettime(clock)
        time.sleep(0.5)
        assert engine.num_polls == num_polls
        assert time.clock_gettime(clock) - cpu_s < 0.03 * 0.5  # the same fraction as 0.3 s in 10

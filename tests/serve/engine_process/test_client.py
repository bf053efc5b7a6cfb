"""An engine behind its client: submission, abort, failure, shutdown. The engine runs in a thread, so it can be seen."""

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from quantpipe.engine.request import SamplingParams
from quantpipe.errors import RequestError
from quantpipe.serve.engine_process.client import NO_STATS, EngineClient
from quantpipe.serve.submission import AbortedError, EngineFailedError, PromptJob, Submission, UnavailableError

MakeEngine = Callable[..., Any]
ENDLESS = SamplingParams(max_tokens=500, ignore_eos=True)


WithClient = Callable[..., None]


@pytest.fixture
def with_client(make_client: Callable[..., EngineClient]) -> WithClient:
    """``with_client(engine, use)`` runs ``use`` with a started client, and stops it whatever happens."""

    def run(engine: Any, use: Callable[[EngineClient], Awaitable[None]], max_open_prompts: int = 8) -> None:
        async def main() -> None:
            client = make_client(engine, max_open_prompts)
            await client.start()
            try:
                await asyncio.wait_for(use(client), 10)
            finally:
                await client.stop()

        asyncio.run(main())

    return run


async def token_ids(submission: Submission) -> dict[int, list[int]]:
    got: dict[int, list[int]] = {index: [] for index in range(len(submission.jobs))}
    async for index, output in submission.outputs():
        got[index] += output.text_token_ids
    return got


async def until(condition: Callable[[], bool]) -> None:
    for _ in range(500):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("did not happen within 5 s")


def test_prompts_of_one_submission_come_back_under_their_index(
    make_engine: MakeEngine, with_client: WithClient
) -> None:
    async def use(client: EngineClient) -> None:
        submission = await client.submit([PromptJob((1, 2, 3), SamplingParams()), PromptJob((7,), SamplingParams())])
        assert await token_ids(submission) == {0: [1, 2, 3], 1: [7]}
        assert client.num_open_prompts == 0

    with_client(make_engine(), use)


def test_many_submissions_at_once_each_get_their_own_tokens(make_engine: MakeEngine, with_client: WithClient) -> None:
    async def use(client: EngineClient) -> None:
        prompts = [tuple(range(n, n + 5)) for n in range(40)]
        submissions = await asyncio.gather(*(client.submit([PromptJob(p, SamplingParams())]) for p in prompts))
        got = await asyncio.gather(*(token_ids(submission) for submission in submissions))
        assert [tokens[0] for tokens in got] == [list(prompt) for prompt in prompts]

    with_client(make_engine(), use, max_open_prompts=40)


def test_one_bad_prompt_refuses_the_whole_submission_and_leaves_nothing_behind(
    make_engine: MakeEngine, with_client: WithClient
) -> None:
    engine = make_engine()

    async def use(client: EngineClient) -> None:
        with pytest.raises(RequestError, match="outside the vocabulary"):
            await client.submit([PromptJob((1, 2), ENDLESS), PromptJob((99_999,), ENDLESS)])
        assert client.num_open_prompts == 0
        await until(lambda: not engine.has_unfinished)
        assert await token_ids(await client.submit([PromptJob((5,), SamplingParams())])) == {0: [5]}

    with_client(engine, use)


def test_aborting_one_prompt_ends_it_quietly_and_the_other_goes_on(
    make_engine: MakeEngine, with_client: WithClient
) -> None:
    async def use(client: EngineClient) -> None:
        submission = await client.submit(
            [PromptJob((1,), ENDLESS), PromptJob((2, 3), SamplingParams(max_tokens=40, ignore_eos=True))]
        )
        got: dict[int, int] = {0: 0, 1: 0}
        async for index, output in submission.outputs():
            got[index] += len(output.token_ids)
            if index == 0 and got[0] == 3:
                submission.abort(0)
        assert got == {0: 3, 1: 40}

    with_client(make_engine(step_s=0.001), use)


def test_samples_of_a_prompt_are_choices_that_end_one_by_one(make_engine: MakeEngine, with_client: WithClient) -> None:
    engine = make_engine(step_s=0.001)

    async def use(client: EngineClient) -> None:
        two = dataclasses.replace(ENDLESS, n=2, max_tokens=30)
        submission = await client.submit([PromptJob((1,), SamplingParams()), PromptJob((2, 3), two)])
        assert len(submission.samples) == 3
        got: dict[int, list[int]] = {0: [], 1: [], 2: []}
        async for choice, output in submission.outputs():
            got[choice] += output.text_token_ids
            if choice == 1 and len(got[1]) == 4:
                submission.abort(1)
        assert got == {0: [1], 1: [2, 3, 2, 3], 2: [2, 3] * 15}
        await until(lambda: not (engine._progress or engine._finished or client._choices))

    with_client(engine, use)


def test_ending_a_submission_with_samples_ends_its_requests(make_engine: MakeEngine, with_client: WithClient) -> None:
    engine = make_engine(step_s=0.001)

    async def use(client: EngineClient) -> None:
        submission = await client.submit([PromptJob((1,), dataclasses.replace(ENDLESS, n=3))] * 2)
        submission.end(AbortedError("enough"))
        assert client.num_open_prompts == 0
        await until(lambda: not (engine._progress or engine._finished or client._choices))
        with pytest.raises(RequestError, match="12 choices in one request; at most 8 fit"):
            await client.submit([PromptJob((1,), dataclasses.replace(ENDLESS, n=12))])

    with_client(engine, use)


def test_cancelling_a_waiting_submit_frees_its_place(make_engine: MakeEngine, with_client: WithClient) -> None:
    engine = make_engine(step_s=0.05)

    async def use(client: EngineClient) -> None:
        first = await client.submit([PromptJob((1,), ENDLESS)])
        waiting = asyncio.create_task(client.submit([PromptJob((2,), ENDLESS)]))
        await asyncio.sleep(0)
        assert client.num_open_prompts == 2
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        first.end(AbortedError("enough"))
        assert client.num_open_prompts == 0
        await until(lambda: not engine.has_unfinished)

    with_client(engine, use)


def test_full_queue_refuses_at_once_and_takes_requests_again_later(
    make_engine: MakeEngine, with_client: WithClient
) -> None:
    async def use(client: EngineClient) -> None:
        held = await client.submit([PromptJob((1,), ENDLESS)] * 8)
        with pytest.raises(UnavailableError) as caught:
            await client.submit([PromptJob((1,), ENDLESS)])
        assert caught.value.code == "queue_full"
        with pytest.raises(RequestError, match="at most 8"):
            await client.submit([PromptJob((1,), ENDLESS)] * 9)
        held.abort(3)
        assert await token_ids(await client.submit([PromptJob((4,), SamplingParams())])) == {0: [4]}

    with_client(make_engine(step_s=0.001), use)


def test_engine_failure_reaches_every_open_submission_and_another_engine_serves_later_ones(
    make_engine: MakeEngine,
    with_client: WithClient,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("quantpipe.serve.engine_process.backoff.FIRST_RESTART_S", 0.1)
    engine = make_engine(step_s=0.001)

    async def use(client: EngineClient) -> None:
        open_ones = [await client.submit([PromptJob((n,), ENDLESS)]) for n in range(3)]
        engine.failure = FloatingPointError("broken")
        for result in await asyncio.gather(*map(token_ids, open_ones), return_exceptions=True):
            assert isinstance(result, EngineFailedError)
        assert "FloatingPointError" in str(client.failure)
        assert client.stats == NO_STATS and client.num_open_prompts == 0
        with pytest.raises(UnavailableError) as caught:
            await client.submit([PromptJob((1,), ENDLESS)])
        assert caught.value.code == "engine_failed"
        engine.failure = None
        engine.forget_all()
        await until(lambda: client.failure is None)
        assert await token_ids(await client.submit([PromptJob((4,), SamplingParams())])) == {0: [4]}
        assert client.state.num_restarts == 1

    with_client(engine, use)
    assert "broken" in caplog.text  # the traceback is for the operator


def test_a_number_that_no_message_can_carry_is_refused_and_leaves_nothing_behind(
    make_engine: MakeEngine, with_client: WithClient
) -> None:
    async def use(client: EngineClient) -> None:
        for param, job in (
            ("prompt", PromptJob((10**30,), SamplingParams())),
            ("max_tokens", PromptJob((1,), SamplingParams(max_tokens=10**30))),
            ("stop_token_ids", PromptJob((1,), SamplingParams(stop_token_ids=(5, 10**30)))),
        ):
            with pytest.raises(RequestError, match="64 bits") as caught:
                await client.submit([PromptJob((1,), SamplingParams()), job])
            assert caught.value.param == param
        assert client.num_open_prompts == 0 and not client._choices
        assert await token_ids(await client.submit([PromptJob((4,), SamplingParams())])) == {0: [4]}

    with_client(make_engine(), use)


def test_two_clients_side_by_side_keep_their_requests_apart(
    make_engine: MakeEngine, make_client: Callable[..., EngineClient]
) -> None:
    async def main() -> None:
        clients = [make_client(make_engine()), make_client(make_engine())]
        try:
            for client in clients:
                await client.start()
            own = [await client.submit([PromptJob((n, n + 1), SamplingParams())]) for n, client in enumerate(clients)]
            assert [await token_ids(submission) for submission in own] == [{0: [0, 1]}, {0: [1, 2]}]
        finally:
            for client in clients:
                await client.stop()

    asyncio.run(main())


def test_drain_lets_short_requests_finish_and_ends_long_ones(make_engine: MakeEngine, with_client: WithClient) -> None:
    async def use(client: EngineClient) -> None:
        short = asyncio.create_task(token_ids(await client.submit([PromptJob((1, 2, 3), SamplingParams())])))
        long = asyncio.create_task(token_ids(await client.submit([PromptJob((1,), ENDLESS)])))
        await client.drain(0.5)
        assert await short == {0: [1, 2, 3]}
        with pytest.raises(UnavailableError, match="shutting down"):
            await long
        with pytest.raises(UnavailableError, match="shutting down"):
            await client.submit([PromptJob((1,), ENDLESS)])

    with_client(make_engine(step_s=0.01), use)


def test_drain_returns_as_soon_as_the_last_request_is_done(make_engine: MakeEngine, with_client: WithClient) -> None:
    async def use(client: EngineClient) -> None:
        last = asyncio.create_task(token_ids(await client.submit([PromptJob((1, 2, 3), SamplingParams())])))
        await asyncio.wait_for(client.drain(3600), 5)
        assert await last == {0: [1, 2, 3]}

    with_client(make_engine(step_s=0.01), use)


def test_finished_requests_leave_nothing_in_the_engine(make_engine: MakeEngine, with_client: WithClient) -> None:
    engine = make_engine()

    async def use(client: EngineClient) -> None:
        for n in range(50):
            submission = await client.submit([PromptJob((n,), ENDLESS if n % 2 else SamplingParams())])
            async for _ in submission.outputs():
                if n % 2:
                    submission.abort(0)
        await until(lambda: not (engine._progress or engine._finished or client._choices))

    with_client(engine, use)

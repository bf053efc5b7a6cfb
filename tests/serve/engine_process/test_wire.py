"""Messages as bytes and back: whole, in pieces, and those that are none."""

import dataclasses
from typing import get_args

import msgspec
import pytest

from quantpipe.engine.constraint import Grammar
from quantpipe.engine.request import FinishReason, SamplingParams, StepOutput, TokenLogprob
from quantpipe.serve.engine_process.client import NO_STATS
from quantpipe.serve.engine_process.messages import (
    Abort,
    Accepted,
    Add,
    EngineFacts,
    Failed,
    FromEngine,
    Opened,
    Opening,
    Ping,
    Pong,
    Ready,
    StartFailure,
    Stepped,
    ToEngine,
)
from quantpipe.serve.engine_process.wire import FrameBuffer, encode, from_engine_decoder, to_engine_decoder
from quantpipe.serve.submission import PromptJob

# Every field at a value that is not its default.
PARAMS = SamplingParams(
    n=3,
    max_tokens=7,
    min_tokens=2,
    temperature=0.5,
    top_p=0.25,
    top_k=9,
    min_p=0.125,
    repetition_penalty=1.5,
    presence_penalty=-1.0,
    frequency_penalty=1.0,
    logit_bias={5: -100.0, 250: 3.5},
    seed=2**63 - 1,
    stop=["text"],
    stop_token_ids=(1, 2),
    ignore_eos=True,
    grammar=Grammar("regex", "[a-z]+"),
    logprobs=4,
    prompt_logprobs=2,
    prompt_logprobs_from=3,
)
JOB = PromptJob((1, 2, 3), PARAMS, "tenant 🔑", -7, "batch", 1.5, 2.5)
LOGPROBS = (TokenLogprob(5, -0.5, True, ((5, -0.5),)),)
OUTPUT = StepOutput(
    "request-1-0", (5, 6), LOGPROBS, FinishReason.STOP, "why", 2, 16, LOGPROBS, is_refused=True, queued_s=0.25
)
TO_ENGINE: list[ToEngine] = [
    Opening(b"/a/\xff", {"backend": "cpu", "num_threads": None, "target_step_s": 0.5, "odd": [1]}, True),
    Add(("request-1-0",), (JOB,)),
    Abort((("request-1-0", 2),)),
    Ping(),
]
FROM_ENGINE: list[FromEngine] = [
    Opened(EngineFacts(128, "cpu", "int8", ("slow",))),
    Ready(),
    StartFailure("DataError", "why", 3, "Traceback", 28, "/a"),
    Accepted("request-1-0", "no", "prompt"),
    Stepped((OUTPUT,), dataclasses.replace(NO_STATS, num_running=3, step_s=1.5)),
    Pong(17),
    Failed("ValueError"),
]


def test_every_message_arrives_as_it_was_sent() -> None:
    assert {type(message) for message in TO_ENGINE} == set(get_args(ToEngine))
    assert {type(message) for message in FROM_ENGINE} == set(get_args(FromEngine))
    assert [to_engine_decoder.decode(payload) for payload in FrameBuffer().feed(encode(*TO_ENGINE))] == TO_ENGINE
    assert [from_engine_decoder.decode(payload) for payload in FrameBuffer().feed(encode(*FROM_ENGINE))] == FROM_ENGINE


def test_every_field_of_what_is_carried_was_tried() -> None:
    for carried in (PARAMS, JOB, OUTPUT):
        for each in dataclasses.fields(carried):
            default = each.default_factory() if callable(each.default_factory) else each.default
            assert getattr(carried, each.name) != default, f"{type(carried).__name__}.{each.name}"


@pytest.mark.parametrize("num_bytes", [1, 2, 3, 5, 64])
def test_messages_are_found_however_the_bytes_are_cut(num_bytes: int) -> None:
    framed, frames, found = encode(*FROM_ENGINE), FrameBuffer(), []
    for start in range(0, len(framed), num_bytes):
        found += frames.feed(framed[start : start + num_bytes])
    assert [from_engine_decoder.decode(payload) for payload in found] == FROM_ENGINE


def test_a_message_longer_than_any_buffer_arrives() -> None:
    message = Add(("a",), (PromptJob(tuple(range(200_000)), SamplingParams()),))
    (payload,) = FrameBuffer().feed(encode(message))
    decoded = to_engine_decoder.decode(payload)
    assert isinstance(decoded, Add) and decoded.jobs[0].prompt_ids == tuple(range(200_000))


def test_what_is_no_message_is_not_taken_for_one() -> None:
    (payload,) = FrameBuffer().feed(encode(Ready()))
    with pytest.raises(msgspec.ValidationError):
        to_engine_decoder.decode(payload)
    with pytest.raises(OverflowError):
        encode(Add(("a",), (PromptJob((10**30,), SamplingParams()),)))

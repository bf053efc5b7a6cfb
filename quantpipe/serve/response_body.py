"""From the deltas of a request's choices to the bytes of its response: one JSON object, or server-sent events."""

import logging
from collections.abc import AsyncIterator, Iterable
from typing import TypeAlias

from quantpipe.serve.api_errors import problem_of
from quantpipe.serve.generation import TextDelta
from quantpipe.serve.render import Renderer, WholeChoice
from quantpipe.serve.replies import PromptTokensDetails, Usage

logger = logging.getLogger(__name__)

Deltas: TypeAlias = AsyncIterator[tuple[int, TextDelta]]


async def begun(deltas: Deltas) -> Deltas:
    """The same deltas, once there is one: what waits in vain for its turn is refused with a status of its own."""
    first = await anext(deltas)

    async def all_deltas() -> Deltas:
        yield first
        async for delta in deltas:
            yield delta

    return all_deltas()


async def whole(deltas: Deltas, num_choices: int, renderer: Renderer, num_prompt_tokens: int) -> str:
    """The JSON of the reply that is not streamed, from the same deltas a stream is made of."""
    parts: list[list[TextDelta]] = [[] for _ in range(num_choices)]
    async for index, delta in deltas:
        parts[index].append(delta)
    choices = [
        WholeChoice(
            text="".join(delta.text for delta in own),
            tokens=tuple(token for delta in own for token in delta.tokens),
            finish_reason=own[-1].finish_reason or "stop",
        )
        for own in parts
    ]
    usage = _usage(num_prompt_tokens, [own[-1] for own in parts])
    return renderer.whole(choices, usage).model_dump_json()


async def events(
    deltas: Deltas, renderer: Renderer, num_prompt_tokens: int, include_usage: bool
) -> AsyncIterator[bytes]:
    """Server-sent events: chunks, then the usage if wanted, or an error in place of what is missing; then [DONE]."""
    latest: dict[int, TextDelta] = {}
    try:
        for chunk in renderer.opening_chunks():
            yield _event(chunk.model_dump_json().encode())
        async for index, delta in deltas:
            latest[index] = delta
            for chunk in renderer.delta_chunks(index, delta):
                yield _event(chunk.model_dump_json().encode())
        if include_usage:
            chunk = renderer.usage_chunk(_usage(num_prompt_tokens, latest.values()))
            yield _event(chunk.model_dump_json().encode())
    except Exception as error:
        problem = problem_of(error)
        if problem.code == "internal_error":
            logger.exception("a stream failed")
        yield _event(problem.body())
    yield _event(b"[DONE]")


def _event(data: bytes) -> bytes:
    return b"data: " + data + b"\n\n"


def _usage(num_prompt_tokens: int, latest: Iterable[TextDelta]) -> Usage:
    """From the latest delta of each choice."""
    latest = tuple(latest)
    num_tokens = sum(delta.num_tokens for delta in latest)
    return Usage(
        prompt_tokens=num_prompt_tokens,
        completion_tokens=num_tokens,
        total_tokens=num_prompt_tokens + num_tokens,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=sum(delta.num_cached_tokens for delta in latest)),
    )

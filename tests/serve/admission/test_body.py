"""Bodies as they come over ASGI: in pieces, too large, too slowly, or broken off."""

import asyncio
from collections.abc import Sequence

import pytest
from starlette.types import Message, Receive

from quantpipe.serve.admission.body import NUM_WHOLE_BODIES, BodyReader, replayed
from quantpipe.serve.admission.limits import Limits, RefusedError
from quantpipe.serve.submission import AbortedError, UnavailableError

LIMITS = Limits(max_body_bytes=10, slow_client_s=0.05)


def part(body: bytes, more_body: bool = True) -> Message:
    return {"type": "http.request", "body": body, "more_body": more_body}


def receiving(messages: Sequence[Message]) -> Receive:
    """What comes after the last message never comes."""
    left = list(messages)

    async def receive() -> Message:
        if not left:
            await asyncio.Event().wait()
        return left.pop(0)

    return receive


def test_pieces_are_joined_and_come_once_more_with_what_follows() -> None:
    async def use() -> None:
        receive = receiving([part(b"abc"), part(b"defghij", more_body=False), {"type": "http.disconnect"}])
        body = await BodyReader(LIMITS).read(receive, [(b"content-length", b"10")])
        assert body == b"abcdefghij"
        again = replayed(body, receive)
        assert await again() == part(body, more_body=False)
        assert await again() == {"type": "http.disconnect"}

    asyncio.run(use())


@pytest.mark.parametrize(
    ("headers", "messages"),
    [
        ([(b"content-length", b"11")], []),  # nothing is read at all
        ([], [part(b"x" * 11, more_body=False)]),
        ([(b"content-length", b"3")], [part(b"x" * 6), part(b"x" * 5)]),
        ([(b"content-length", b"-5")], [part(b"x" * 11)]),
    ],
)
def test_body_that_is_too_large_is_413_by_what_it_says_or_by_count(
    headers: list[tuple[bytes, bytes]], messages: list[Message]
) -> None:
    with pytest.raises(RefusedError, match="more than 10 bytes") as caught:
        asyncio.run(BodyReader(LIMITS).read(receiving(messages), headers))
    assert (caught.value.status, caught.value.code) == (413, "body_too_large")


def test_body_that_does_not_come_is_408_and_a_client_that_has_gone_is_told_nothing() -> None:
    with pytest.raises(RefusedError, match=r"within 0.05 s") as caught:
        asyncio.run(BodyReader(LIMITS).read(receiving([part(b"x")]), []))
    assert caught.value.status == 408
    with pytest.raises(AbortedError):
        asyncio.run(BodyReader(LIMITS).read(receiving([part(b"x"), {"type": "http.disconnect"}]), []))


def test_many_bodies_on_their_way_are_bounded_together_and_their_room_comes_back() -> None:
    async def use() -> None:
        reader = BodyReader(Limits(max_body_bytes=10, slow_client_s=0.2))
        hanging = [asyncio.create_task(reader.read(receiving([part(b"x" * 10)]), [])) for _ in range(NUM_WHOLE_BODIES)]
        await asyncio.sleep(0.01)
        with pytest.raises(UnavailableError, match="too many large bodies"):
            await reader.read(receiving([part(b"x")]), [])
        await asyncio.gather(*hanging, return_exceptions=True)
        assert await reader.read(receiving([part(b"x"), part(b"y", more_body=False)]), []) == b"xy"

    asyncio.run(use())

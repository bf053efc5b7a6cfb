"""One streamed completion of an OpenAI-compatible server: when its tokens came. Raw sockets: a client shares the cores.

Times are ``time.perf_counter`` seconds.
"""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit


@dataclass(frozen=True)
class Reply:
    """When a request was sent, had its first and its last token, and how many it got."""

    sent_s: float
    first_s: float
    last_s: float
    num_tokens: int

    @property
    def ttft_s(self) -> float:
        return self.first_s - self.sent_s

    @property
    def tpot_s(self) -> float:
        return (self.last_s - self.first_s) / max(self.num_tokens - 1, 1)


async def complete(url: str, model: str, prompt: str, new_tokens: int) -> Reply:
    """Ask for exactly so many tokens, greedy. RuntimeError where the server refuses, or gives another number."""
    asked = {
        "model": model,
        "prompt": prompt,
        "max_tokens": new_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    sent_s = time.perf_counter()
    first_s = last_s = 0.0
    num_events, num_tokens = 0, None
    async for event in _events(url, json.dumps(asked).encode()):
        now_s = time.perf_counter()
        if b'"completion_tokens"' in event:
            num_tokens = (json.loads(event).get("usage") or {}).get("completion_tokens", num_tokens)
        if not first_s and not _has_text(event):
            continue
        first_s = first_s or now_s
        if b'"choices":[]' not in event.replace(b" ", b""):
            last_s, num_events = now_s, num_events + 1
    found = num_events if num_tokens is None else num_tokens
    if found != new_tokens:
        raise RuntimeError(f"{url}: {found} tokens where {new_tokens} were asked; not comparable")
    return Reply(sent_s, first_s, last_s, found)


async def complete_all(
    url: str, model: str, prompts: Sequence[str], new_tokens: int, concurrency: int
) -> tuple[list[Reply], float]:
    """All prompts, ``concurrency`` at a time, and the seconds they took together."""
    waiting = list(reversed(prompts))
    replies: list[Reply] = []

    async def ask_in_turn() -> None:
        while waiting:
            replies.append(await complete(url, model, waiting.pop(), new_tokens))

    started_s = time.perf_counter()
    await asyncio.gather(*(ask_in_turn() for _ in range(concurrency)))
    return replies, time.perf_counter() - started_s


def _has_text(event: bytes) -> bool:
    choices = json.loads(event).get("choices") or [{}]
    return bool(choices[0].get("text"))


async def _events(url: str, body: bytes) -> AsyncIterator[bytes]:
    """The data of each server-sent event of a POST to /v1/completions, the closing ``[DONE]`` left out."""
    where = urlsplit(url)
    reader, writer = await asyncio.open_connection(where.hostname, where.port or 80)
    try:
        head = (
            f"POST {where.path.rstrip('/')}/v1/completions HTTP/1.1\r\nHost: {where.netloc}\r\nConnection: close\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        writer.write(head.encode() + body)
        status = (await reader.readline()).decode().strip()
        is_chunked = False
        while (line := (await reader.readline()).strip().lower()) != b"":
            is_chunked = is_chunked or (line.startswith(b"transfer-encoding") and b"chunked" in line)
        if " 200" not in status:
            raise RuntimeError(f"{url}: {status}: {(await reader.read(500)).decode(errors='replace')}")
        held = b""
        async for part in _parts(reader, is_chunked):
            *lines, held = (held + part).split(b"\n")
            for line in lines:
                if line.startswith(b"data:") and (data := line[5:].strip()) != b"[DONE]":
                    yield data
    finally:
        writer.close()


async def _parts(reader: asyncio.StreamReader, is_chunked: bool) -> AsyncIterator[bytes]:
    """The body as it comes."""
    while not is_chunked:
        part = await reader.read(1 << 16)
        if not part:
            return
        yield part
    while size := int((await reader.readline()).split(b";")[0] or b"0", 16):
        yield (await reader.readexactly(size + 2))[:-2]

"""A client of a server under mixed load: asks in every way that clients do, checks every reply, and counts."""

import asyncio
import json
import random
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import httpx

WORDS = ("the", "model", "reads", "a", "prompt", "and", "goes", "on", "while", "others", "wait", "for", "their", "turn")
MAX_NEW_TOKENS = 48
BUSY = (503,)  # a full queue is an answer, not a fault
BAD_BODIES: tuple[dict[str, Any], ...] = (
    {"prompt": ""},
    {"prompt": [10**30]},
    {"prompt": "a", "temperature": -1},
    {"prompt": "a", "max_tokens": 10**9},
    {"prompt": "a", "logit_bias": {"999999999": 1}},
    {"prompt": "a", "n": 0},
    {"messages": []},
)


class WrongReplyError(Exception):
    """A reply that no client should get."""


@dataclass
class Found:
    """What all clients saw, by kind of request."""

    counts: Counter[str] = field(default_factory=Counter)
    busy: Counter[str] = field(default_factory=Counter)
    latencies_s: defaultdict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    faults: list[str] = field(default_factory=list)


class SoakClient:
    """One client's requests, of every kind."""

    def __init__(self, http: httpx.AsyncClient, model: str, found: Found, draw: random.Random) -> None:
        self._http = http
        self._model = model
        self._found = found
        self._draw = draw
        self._kinds: dict[str, tuple[int, Callable[[], Awaitable[int]]]] = {
            "stream": (30, self.stream),
            "whole": (30, self.whole),
            "left stream": (15, self.leave_stream),
            "left whole": (10, self.leave_whole),
            "bad": (10, self.bad),
            "slow": (5, self.read_slowly),
        }

    async def run(self, until_s: float) -> None:
        """Ask until that time, one request after the other."""
        names = list(self._kinds)
        weights = [weight for weight, _ in self._kinds.values()]
        while time.monotonic() < until_s:
            (name,) = self._draw.choices(names, weights)
            started_s = time.monotonic()
            try:
                status = await self._kinds[name][1]()
            except (WrongReplyError, httpx.HTTPError, ValueError, LookupError) as error:
                self._found.faults.append(f"{name}: {type(error).__name__}: {error}")
                continue
            self._found.counts[name] += 1
            if status in BUSY:
                self._found.busy[name] += 1
                await asyncio.sleep(0.2)
            else:
                self._found.latencies_s[name].append(time.monotonic() - started_s)

    async def stream(self, pause_s: float = 0.0) -> int:
        async with self._open() as response:
            if response.status_code in BUSY:
                return response.status_code
            _expect(response.status_code == 200, f"status {response.status_code}")
            events = []
            async for line in response.aiter_lines():
                if line:
                    events.append(line.removeprefix("data: "))
                    await asyncio.sleep(pause_s)
        _expect(events[-1] == "[DONE]", f"ends with {events[-1][:80]}")
        last = json.loads(events[-2])
        _expect("error" not in last, events[-2])
        _expect(last["choices"][0]["finish_reason"] in ("stop", "length"), events[-2])
        return 200

    async def read_slowly(self) -> int:
        return await self.stream(pause_s=0.1)

    async def whole(self) -> int:
        response = await self._http.post("/v1/completions", json=self._body())
        if response.status_code == 200:
            _expect(response.json()["choices"][0]["finish_reason"] in ("stop", "length"), response.text[:200])
        else:
            _expect(response.status_code in BUSY, f"status {response.status_code}: {response.text[:200]}")
        return response.status_code

    async def leave_stream(self) -> int:
        num_lines = self._draw.randrange(12)
        async with self._open() as response:
            lines = response.aiter_lines()
            for _ in range(num_lines):
                if await anext(lines, None) is None:
                    break
        return response.status_code

    async def leave_whole(self) -> int:
        try:
            response = await self._http.post(
                "/v1/completions", json=self._body(), timeout=self._draw.uniform(0.001, 0.3)
            )
        except httpx.TimeoutException:
            return 200
        return response.status_code

    async def bad(self) -> int:
        body = {"model": self._model} | self._draw.choice(BAD_BODIES)
        path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
        response = await self._http.post(path, json=body)
        if response.status_code not in BUSY:
            _expect(response.status_code == 400 and "message" in response.json()["error"], response.text[:200])
        return response.status_code

    def _open(self) -> Any:
        return self._http.stream("POST", "/v1/completions", json=self._body() | {"stream": True})

    def _body(self) -> dict[str, Any]:
        prompt = " ".join(self._draw.choices(WORDS, k=self._draw.randint(1, 120)))
        max_tokens = self._draw.randint(1, MAX_NEW_TOKENS)
        return {"model": self._model, "prompt": prompt, "max_tokens": max_tokens, "n": self._draw.choice((1, 1, 1, 2))}


def _expect(is_right: bool, otherwise: str) -> None:
    if not is_right:
        raise WrongReplyError(otherwise)

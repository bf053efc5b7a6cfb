"""Hundreds of requests that went wrong on their way, by chance: none is the server's failure, none harms the next."""

import copy
import json
import random
from typing import Any

import pytest

Server = Any
NUM_REQUESTS = 300
CHAT, COMPLETIONS, TOKENIZE, DETOKENIZE = "/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {"a": {}}}}}
SAMPLING: dict[str, Any] = {
    **dict(model="echo", n=2, max_tokens=8, min_tokens=1, temperature=0.5, top_p=0.9, top_k=5, min_p=0.1, seed=1),
    **dict(frequency_penalty=0.1, presence_penalty=0.1, repetition_penalty=1.1, logit_bias={"5": 1.5}, stop=["x", "y"]),
    **dict(stop_token_ids=[3], priority=1, qos="batch", latency_budget_ms=1000, cache_salt="salt", user="me"),
    **dict(stream=True, stream_options={"include_usage": True}),
}
MESSAGES = [
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": [{"type": "text", "text": "hi"}], "name": "Ann"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}],
    },
    {"role": "tool", "content": "5", "tool_call_id": "1"},
]
FORM = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object", "required": ["a"]}}}
GOOD: list[tuple[str, dict[str, Any]]] = [
    (COMPLETIONS, {**SAMPLING, "prompt": ["ab", "cd"], "logprobs": 2, "echo": True}),
    (COMPLETIONS, {**SAMPLING, "prompt": [1, 2, 3], "guided_regex": "[ab]+", "suffix": ""}),
    (COMPLETIONS, {**SAMPLING, "prompt": "ab", "structured_outputs": {"choice": ["a", "b"]}}),
    (
        CHAT,
        {**SAMPLING, "messages": MESSAGES, "tools": [TOOL], "tool_choice": "none", "top_logprobs": 1, "logprobs": True},
    ),
    (CHAT, {**SAMPLING, "messages": MESSAGES, "response_format": FORM}),
    (TOKENIZE, {"model": "echo", "messages": MESSAGES, "return_token_strs": True}),
    (TOKENIZE, {"prompt": "text", "add_special_tokens": False}),
    (DETOKENIZE, {"model": "echo", "tokens": [1, 2, 256]}),
]
JUNK: list[Any] = [
    *(None, True, -1, 0, 1, 2**31, 2**63, 10**40, -0.5, 1e308, float("nan"), float("inf"), "", "x", "\ud800", "\0"),
    *("x" * 3000, "((", "{", "$ref", [], {}, [[]], [{}], {"": None}, {"type": "object"}, {"$ref": "#"}, [1, "a", None]),
    *([[[[[[[[]]]]]]]], {"a": {"a": {"a": {"a": []}}}}, list(range(300)), {str(number): 1 for number in range(300)}),
]


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Where something can go wrong in a JSON value: everywhere but at the top."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    found = [path] if path else []
    for key, own in inner:
        found += places(own, (*path, key))
    return found


def spoil(body: dict[str, Any], rng: random.Random) -> None:
    """Take something out of ``body``, put something else in its place, or give it another name."""
    *path, last = rng.choice(places(body))
    holder: Any = body
    for key in path:
        holder = holder[key]
    match rng.randrange(4):
        case 0:
            del holder[last]
        case 1 if isinstance(holder, dict):
            holder[rng.choice(["", "x", "extra", last.upper(), "\ud800", last + " "])] = holder.pop(last)
        case _:
            holder[last] = copy.deepcopy(rng.choice(JUNK))


def spoil_bytes(content: bytes, rng: random.Random) -> bytes:
    place = rng.randrange(len(content))
    match rng.randrange(4):
        case 0:
            return content[:place]
        case 1:
            return content[:place] + rng.randbytes(3) + content[place:]
        case 2:
            return content[:place] + b"[" * 2000 + content[place:]
        case _:
            return content + content


def request(rng: random.Random) -> tuple[str, bytes]:
    path, good = rng.choice(GOOD)
    body = copy.deepcopy(good)
    for _ in range(rng.choice([1, 1, 1, 2, 4])):
        if body:
            spoil(body, rng)
    content = json.dumps(body).encode()
    return path, spoil_bytes(content, rng) if rng.random() < 0.15 else content


@pytest.mark.parametrize(("path", "body"), GOOD, ids=lambda part: str(part)[:20])
def test_unspoiled_request_is_answered(server: Server, path: str, body: dict[str, Any]) -> None:
    response = server.post(path, **body)
    assert response.status_code == 200, response.text
    assert '"error"' not in response.text


def test_no_malformed_request_is_the_servers_failure_and_the_next_good_one_works(server: Server) -> None:
    rng = random.Random(20261130)
    num_refused = 0
    for number in range(NUM_REQUESTS):
        path, content = request(rng)
        response = server.http.post(path, content=content, headers={"Content-Type": "application/json"})
        told = (number, path, content[:600], response.text[-400:])
        assert response.status_code in (200, 400, 404), told
        assert "server_error" not in response.text, told
        if response.status_code != 200:
            num_refused += 1
            error = response.json()["error"]
            assert set(error) == {"message", "type", "param", "code"}, told
            assert error["message"] and "\n" not in error["message"] and len(error["message"]) < 900, told
        elif response.headers["content-type"].startswith("text/event-stream"):
            assert response.text.endswith("data: [DONE]\n\n"), told
        if number % 10 == 0 or response.status_code == 200:
            good = server.post(COMPLETIONS, model="echo", prompt="good")
            assert good.json()["choices"][0]["text"] == "good", told
    assert num_refused > NUM_REQUESTS // 3

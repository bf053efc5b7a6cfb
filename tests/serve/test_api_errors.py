"""The error contract: every malformed request is a 400 with the one error body, and the next good one works."""

from typing import Any

import httpx
import pytest

Server = Any
CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
USER = [{"role": "user", "content": "hi"}]

BAD_FIELDS: list[tuple[str, Any]] = [
    ("max_tokens", 0),
    ("max_tokens", -1),
    ("max_tokens", 1.5),
    ("max_tokens", "10"),
    ("max_tokens", 10**30),
    ("temperature", -0.1),
    ("temperature", 2.1),
    ("temperature", "hot"),
    ("temperature", True),
    ("top_p", 0),
    ("top_p", 1.01),
    ("top_k", -2),
    ("top_k", 0.5),
    ("seed", "one"),
    ("seed", 2**63),
    ("stop", ""),
    ("stop", ["a", ""]),
    ("stop", ["a", "b", "c", "d", "e"]),
    ("stop", 7),
    ("stop", "x" * 2000),
    ("stop_token_ids", [-1]),
    ("stop_token_ids", [10**9]),
    ("n", 0),
    ("n", 129),
    ("n", 10**9),
    ("n", True),
    ("logit_bias", {"999999": 5}),
    ("logit_bias", {"258": 5}),
    ("logit_bias", {"x": 5}),
    ("logit_bias", {"9" * 5000: 5}),
    ("logit_bias", {"5": 101}),
    ("logit_bias", {"5": "1"}),
    ("logit_bias", [5]),
    ("frequency_penalty", 2.1),
    ("frequency_penalty", "1"),
    ("presence_penalty", -3),
    ("repetition_penalty", 0),
    ("repetition_penalty", -1.5),
    ("min_p", 1.5),
    ("min_p", -0.1),
    ("min_tokens", -1),
    ("min_tokens", 1.5),
    ("min_tokens", 10**30),
    ("priority", -21),
    ("priority", 20),
    ("priority", 0.5),
    ("priority", "high"),
    ("priority", True),
    ("qos", "premium"),
    ("qos", ""),
    ("qos", 1),
    ("latency_budget_ms", 0),
    ("latency_budget_ms", -100),
    ("latency_budget_ms", 10**30),
    ("latency_budget_ms", "1s"),
    ("cache_salt", ""),
    ("cache_salt", "x" * 257),
    ("cache_salt", 7),
    ("cache_salt", ["tenant"]),
    ("response_format", {"type": "xml"}),
    ("tools", [{"type": "function", "function": {"name": "f"}}]),
    ("stream", "yes"),
    ("stream_options", {"include_usage": True}),
    ("stream_options", {"include_usage": True, "other": 1}),
    ("model", None),
    ("model", 5),
    ("best_of", 2),
    ("best_of", "1"),
    ("suffix", "x"),
    ("functions", [{"name": "f"}]),
]
BAD_PROMPTS: list[Any] = [
    "",
    [],
    [""],
    ["a", ""],
    [[]],
    [[1], []],
    [1, "a"],
    [[1], "a"],
    [1.5],
    [-1],
    [999_999],
    [10**30],
    [[1], [999_999]],
    None,
    7,
    {"text": "a"},
    [1] * 600,
]
BAD_MESSAGES: list[Any] = [
    [],
    None,
    "hi",
    [{"role": "user"}],
    [{"content": "hi"}],
    [{"role": "wizard", "content": "hi"}],
    [{"role": "function", "content": "hi"}],
    [{"role": "user", "content": None}],
    [{"role": "user", "content": 5}],
    [{"role": "user", "content": []}],
    [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x"}}]}],
    [{"role": "user", "content": "hi", "colour": "red"}],
    [{"role": "user", "content": "refuse"}],
    [{"role": "user", "content": "long " * 200}],
    ["hi"],
]
BAD_BODIES: dict[str, bytes] = {
    "empty": b"",
    "not JSON": b"{",
    "array": b"[1, 2]",
    "string": b'"model"',
    "null": b"null",
    "NaN": b'{"model": "echo", "prompt": "a", "temperature": NaN}',
    "NaN in logit_bias": b'{"model": "echo", "prompt": "a", "logit_bias": {"5": NaN}}',
    "NaN as latency budget": b'{"model": "echo", "prompt": "a", "latency_budget_ms": NaN}',
    "half of a character as salt": b'{"model": "echo", "prompt": "a", "cache_salt": "\\ud800"}',
    "Infinity": b'{"model": "echo", "prompt": "a", "temperature": 1e999}',
    "lone surrogate in the prompt": rb'{"model": "echo", "prompt": "a\ud800b"}',
    "lone surrogate in a stop": rb'{"model": "echo", "prompt": "a", "stop": "\udfff"}',
    "lone surrogate in the model": rb'{"model": "\ud800", "prompt": "a"}',
    "lone surrogate in a known field": rb'{"model": "echo", "prompt": "a", "echo": "\ud800", "messages": "\ud800"}',
    "lone surrogate in a content": rb'{"model": "echo", "messages": [{"role": "user", "content": "\udc00"}]}',
    "lone surrogate in a role": rb'{"model": "echo", "messages": [{"role": "\udc00", "content": ""}]}',
    "lone surrogate in a part": rb'{"model": "echo", "messages": [{"role": "user", "content": "", "\udc00": 1}]}',
    "lone surrogate in options": rb'{"model": "echo", "prompt": "a", "stream": true, "stream_options": {"\udc00": 1}}',
    "not UTF-8": b'{"model": "echo", "prompt": "\xff\xfe"}',
    "deeply nested": b'{"model": "echo", "prompt": ' + b"[" * 100_000,
    "nested list": b'{"model": "echo", "prompt": ' + b"[" * 100 + b"]" * 100 + b"}",
    "number of 5000 digits": b'{"model": "echo", "prompt": "a", "seed": ' + b"9" * 5000 + b"}",
}


def assert_refused(response: httpx.Response, param: str | None = None) -> dict[str, Any]:
    assert response.status_code == 400, response.text
    error: dict[str, Any] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert error["message"] and "\n" not in error["message"] and len(error["message"]) < 900
    if param is not None:
        assert str(error["param"]).startswith(param)
    return error


def assert_still_works(server: Server) -> None:
    response = server.post(COMPLETIONS, model="echo", prompt="good")
    assert response.json()["choices"][0]["text"] == "good"


@pytest.mark.parametrize(("field", "value"), BAD_FIELDS, ids=lambda part: repr(part)[:30])
def test_bad_field_is_refused_by_name_on_both_endpoints(server: Server, field: str, value: Any) -> None:
    for path, prompt in ((COMPLETIONS, {"prompt": "hi"}), (CHAT, {"messages": USER})):
        error = assert_refused(server.post(path, **({"model": "echo", **prompt} | {field: value})), field)
        assert field in error["message"]
    assert_still_works(server)


@pytest.mark.parametrize("prompt", BAD_PROMPTS, ids=lambda prompt: repr(prompt)[:30])
def test_bad_prompt_is_refused(server: Server, prompt: Any) -> None:
    for stream in (False, True):
        assert_refused(server.post(COMPLETIONS, model="echo", prompt=prompt, stream=stream), "prompt")
    assert_still_works(server)


@pytest.mark.parametrize("messages", BAD_MESSAGES, ids=lambda messages: repr(messages)[:60])
def test_bad_messages_are_refused(server: Server, messages: Any) -> None:
    assert_refused(server.post(CHAT, model="echo", messages=messages), "messages")
    assert_still_works(server)


@pytest.mark.parametrize("name", BAD_BODIES)
def test_body_that_is_no_proper_json_object_is_refused(server: Server, name: str) -> None:
    headers = {"Content-Type": "application/json"}
    for path in (COMPLETIONS, CHAT):
        assert_refused(server.http.post(path, content=BAD_BODIES[name], headers=headers))
    assert_still_works(server)


def test_body_without_json_content_type_is_refused_with_the_header_to_send(server: Server) -> None:
    for headers in ({}, {"Content-Type": "text/plain"}):
        response = server.http.post(CHAT, content=b'{"model": "echo"}', headers=headers)
        assert "Content-Type: application/json" in assert_refused(response)["message"]


def test_limits_beyond_the_context_are_refused_with_the_right_numbers(server: Server) -> None:
    error = assert_refused(server.post(COMPLETIONS, model="echo", prompt=[1] * 500, max_tokens=50), "max_tokens")
    assert "12" in error["message"] and "512" in error["message"]


@pytest.mark.parametrize(
    ("path", "field", "value"),
    [
        (COMPLETIONS, "logprobs", 6),
        (COMPLETIONS, "logprobs", True),
        (COMPLETIONS, "echo", "yes"),
        (COMPLETIONS, "messages", USER),
        (COMPLETIONS, "max_completion_tokens", 4),
        (CHAT, "logprobs", 1),
        (CHAT, "top_logprobs", 3),
        (CHAT, "prompt", "x"),
        (CHAT, "echo", True),
        (CHAT, "max_completion_tokens", 0),
        (CHAT, "reasoning_effort", "high"),
        (CHAT, "modalities", ["audio"]),
    ],
)
def test_fields_of_one_endpoint_are_checked_there(server: Server, path: str, field: str, value: Any) -> None:
    prompt: dict[str, Any] = {"prompt": "hi"} if path == COMPLETIONS else {"messages": USER}
    assert_refused(server.post(path, model="echo", **(prompt | {field: value})), field)


def test_more_tokens_at_least_than_at_most_are_refused(server: Server) -> None:
    error = assert_refused(server.post(COMPLETIONS, model="echo", prompt="a", min_tokens=5, max_tokens=4), "min_tokens")
    assert error["message"] == "min_tokens: 5 exceeds max_tokens 4; lower it"
    assert server.post(COMPLETIONS, model="echo", prompt="a", min_tokens=4, max_tokens=4).status_code == 200


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("stream", [True, False])
def test_unknown_fields_are_ignored_by_name_and_counted(server: Server, path: str, stream: bool) -> None:
    def count() -> float:
        text = server.http.get("/metrics").text
        name = "quantpipe:ignored_fields_total"
        return float(next(line.split()[1] for line in text.splitlines() if line.startswith(name)))

    before = count()
    asked: dict[str, Any] = {"prompt": "a"} if path == COMPLETIONS else {"messages": USER}
    odd = {"max_token": 5, "a, b\r\nSet-Cookie: c": 1, "é" * 500: 2, "user": "me"}
    response = server.post(path, model="echo", stream=stream, **asked, **odd)
    assert response.status_code == 200
    names = response.headers["quantpipe-ignored"].split(", ")
    assert names == ["a%2C%20b%5Cr%5CnSet-Cookie%3A%20c", "max_token", "%C3%A9" * 60]
    assert "set-cookie" not in response.headers
    assert count() == before + 3
    assert "quantpipe-ignored" not in server.post(path, model="echo", **asked, user="me").headers


def test_thousands_of_unknown_fields_are_no_trouble(server: Server) -> None:
    response = server.post(COMPLETIONS, model="echo", prompt="a", **{f"field{number}": 1 for number in range(5000)})
    assert response.status_code == 200 and len(response.headers["quantpipe-ignored"]) < 1000


def test_limits_that_contradict_each_other_are_refused(server: Server) -> None:
    body = dict(model="echo", messages=USER, max_tokens=4)
    assert_refused(server.post(CHAT, **body, max_completion_tokens=5), "max_tokens")
    assert server.post(CHAT, **body, max_completion_tokens=4).status_code == 200


def test_message_parts_that_are_not_served_are_refused_by_name(server: Server) -> None:
    messages = [{"role": "assistant", "content": "", "audio": {"id": "1"}}]
    assert_refused(server.post(CHAT, model="echo", messages=messages), "audio")


def test_what_is_not_served_is_said_by_name(server: Server) -> None:
    error = assert_refused(server.post(COMPLETIONS, model="echo", prompt="a", suffix="b"), "suffix")
    assert error["message"] == "suffix is not served; leave it out or set it to ''"
    error = assert_refused(server.post(COMPLETIONS, model="echo", prompt="a", best_of=3, n=2), "best_of")
    assert "the best of more choices than n is not served" in error["message"]
    assert server.post(COMPLETIONS, model="echo", prompt="a", best_of=2, n=2).status_code == 200
    error = assert_refused(server.post(COMPLETIONS, model="echo", prompt="a", max_tokens=0), "max_tokens")
    assert "echo: true" in error["message"]


@pytest.mark.parametrize("body", [{"model": "echo", "input": "text"}, {}])
def test_embeddings_are_refused_with_what_is_served(server: Server, body: dict[str, Any]) -> None:
    assert "embeddings are not served" in assert_refused(server.post("/v1/embeddings", **body))["message"]
    assert "embeddings are not served" in assert_refused(server.http.post("/v1/embeddings", content=b"{"))["message"]


def test_name_of_a_model_is_quoted_in_one_line_of_bounded_length(server: Server) -> None:
    for name in ("x" * 5000, "a\nb\x1b[31m"):
        for path, asked in ((COMPLETIONS, {"prompt": "a"}), (CHAT, {"messages": USER}), ("/tokenize", {"prompt": "a"})):
            response = server.post(path, model=name, **asked)
            message = response.json()["error"]["message"]
            assert response.status_code == 404
            assert message.isprintable() and len(message) < 200

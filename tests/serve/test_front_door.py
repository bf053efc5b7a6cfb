"""What requests meet before they are parsed, over real sockets: keys, limits, sizes, ids, an overloaded server."""

import json
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest

from quantpipe.serve.admission.key_limits import KeyLimits
from quantpipe.serve.admission.limits import Limits
from quantpipe.serve.front_options import FrontOptions
from quantpipe.serve.keys import ApiKey, digest_of

COMPLETIONS = "/v1/completions"
BODY = {"model": "echo", "prompt": "abc"}
LONG = {"model": "echo", "prompt": "x", "max_tokens": 400, "ignore_eos": True}
StartServer = Callable[..., Any]
MakeEngine = Callable[..., Any]


def bearer(secret: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {secret}"}


@pytest.fixture
def keyed(start_server: StartServer, make_engine: MakeEngine) -> Any:
    keys = [ApiKey("alice", digest_of("for-alice")), ApiKey("bob", digest_of("for-bob"), KeyLimits(max_concurrent=1))]
    return start_server(make_engine(step_s=0.005), options=FrontOptions(keys=keys))


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", COMPLETIONS),
        ("POST", "/v1/chat/completions"),
        ("GET", "/v1/models"),
        ("GET", "/v1/models/echo"),
        ("GET", "/metrics"),
        ("GET", "/stats"),
        ("GET", "/docs"),
        ("GET", "/openapi.json"),
        ("GET", "/no/such/path"),
    ],
)
def test_everything_but_probes_and_the_page_needs_a_key(keyed: Any, method: str, path: str) -> None:
    for headers in ({}, bearer("wrong"), {"Authorization": "for-alice"}):
        refused = keyed.http.request(method, path, headers=headers, json=BODY if method == "POST" else None)
        assert (refused.status_code, refused.headers["www-authenticate"]) == (401, "Bearer")
        error = refused.json()["error"]
        assert (error["type"], error["param"], error["code"]) == ("invalid_request_error", None, "invalid_api_key")
    answered = keyed.http.request(method, path, headers=bearer("for-alice"), json=BODY if method == "POST" else None)
    assert answered.status_code != 401


def test_probes_are_open_and_metrics_where_the_operator_says_so(
    keyed: Any, start_server: StartServer, make_engine: MakeEngine
) -> None:
    assert keyed.http.get("/health").status_code == 200
    options = FrontOptions(keys=[ApiKey("a", digest_of("s"))], are_metrics_open=True)
    server = start_server(make_engine(), options=options)
    assert server.http.get("/metrics").status_code == 200
    assert server.http.get("/stats").status_code == 401


def test_openai_client_with_the_wrong_key_gets_its_own_error(keyed: Any) -> None:
    client = openai.OpenAI(base_url=f"{keyed.url}/v1", api_key="wrong", max_retries=0)
    with pytest.raises(openai.AuthenticationError, match="not known here"):
        client.models.list()
    client = openai.OpenAI(base_url=f"{keyed.url}/v1", api_key="for-alice", max_retries=0)
    assert client.completions.create(**BODY).choices[0].text == "abc"


def test_each_key_has_a_prefix_cache_of_its_own_divided_by_the_clients_salt(keyed: Any) -> None:
    for secret in ("for-alice", "for-bob"):
        for salt in ({}, {"cache_salt": "x"}, {"cache_salt": "y"}, {}):
            assert keyed.http.post(COMPLETIONS, json=BODY | salt, headers=bearer(secret)).status_code == 200
    salts = [request.cache_salt for request in keyed.engine.seen_requests]
    assert len(set(salts)) == 6
    assert (salts[0], salts[4]) == (salts[3], salts[7])
    assert all(len(salt) == 64 for salt in salts)


def test_key_has_as_many_requests_at_a_time_as_it_may_and_others_do_not_notice(keyed: Any) -> None:
    with httpx.stream("POST", keyed.url + COMPLETIONS, json=LONG | {"stream": True}, headers=bearer("for-bob")) as own:
        lines = own.iter_lines()
        next(lines)
        refused = keyed.http.post(COMPLETIONS, json=BODY, headers=bearer("for-bob"))
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limit_exceeded")
        assert refused.json()["error"]["type"] == "rate_limit_error"
        assert int(refused.headers["retry-after"]) >= 1
        assert keyed.http.post(COMPLETIONS, json=BODY, headers=bearer("for-alice")).status_code == 200
        assert keyed.http.get("/v1/models", headers=bearer("for-bob")).status_code == 200
    deadline = time.monotonic() + 5
    while keyed.http.post(COMPLETIONS, json=BODY, headers=bearer("for-bob")).status_code != 200:
        assert time.monotonic() < deadline, "the place of a client that left is free again"


def test_tokens_of_prompts_and_answers_count_against_a_key(start_server: StartServer, make_engine: MakeEngine) -> None:
    keys = [ApiKey("a", digest_of("s"), KeyLimits(tokens_per_minute=15)), ApiKey("b", digest_of("t"))]
    server = start_server(make_engine(), options=FrontOptions(keys=keys))
    body = {"model": "echo", "prompt": [65] * 5, "max_tokens": 5}  # ten tokens
    assert server.http.post(COMPLETIONS, json=body | {"stream": True}, headers=bearer("s")).status_code == 200
    assert server.http.post(COMPLETIONS, json=body, headers=bearer("s")).status_code == 200
    refused = server.http.post(COMPLETIONS, json=body, headers=bearer("s"))
    assert (refused.status_code, "20 tokens" in refused.json()["error"]["message"]) == (429, True)
    assert 1 < int(refused.headers["retry-after"]) <= 62
    assert server.http.post(COMPLETIONS, json=body, headers=bearer("t")).status_code == 200


def test_request_id_is_the_clients_if_it_is_plain_and_a_new_one_otherwise(server: Any) -> None:
    for path in ("/health", "/no/such/path", "/metrics"):
        assert server.http.get(path, headers={"X-Request-Id": "my-id_1.2"}).headers["x-request-id"] == "my-id_1.2"
    made = set()
    for asked in ("", "a b", "x" * 129, "ü", "a\tb"):
        headers = {b"X-Request-Id": asked.encode()} if asked else {}
        made.add(server.http.get("/health", headers=headers).headers["x-request-id"])
    assert len(made) == 5 and all(len(own) == 32 for own in made)
    assert server.http.post(COMPLETIONS, json={"model": "gpt"}).headers["x-request-id"]


@pytest.fixture
def small(start_server: StartServer, make_engine: MakeEngine) -> Any:
    limits = Limits(max_body_bytes=2000, max_prompt_tokens=20, max_open_tokens=400, slow_client_s=0.3)
    return start_server(make_engine(step_s=0.005), options=FrontOptions(limits=limits))


@pytest.mark.parametrize("is_told", [True, False])
def test_large_body_is_413_whether_its_length_is_told_or_not_and_the_next_request_works(
    small: Any, is_told: bool
) -> None:
    def parts() -> Iterator[bytes]:
        yield b'{"model": "echo", "prompt": "'
        for _ in range(50):
            yield b"x" * 1000
        yield b'"}'

    content = b"".join(parts()) if is_told else parts()
    refused = small.http.post(COMPLETIONS, content=content, headers={"Content-Type": "application/json"})
    assert (refused.status_code, refused.json()["error"]["code"]) == (413, "body_too_large")
    assert small.post(COMPLETIONS, **BODY).status_code == 200


def test_body_that_does_not_come_is_408_and_holds_no_place(small: Any) -> None:
    with socket.create_connection(small.listener.getsockname()) as connection:
        head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 100"
        connection.sendall(f"{head}\r\n\r\n{{".encode())
        connection.settimeout(10)
        received = b""
        while part := connection.recv(1 << 16):  # until the server closes
            received += part
    assert received.startswith(b"HTTP/1.1 408") and b'"code": "body_timeout"' in received
    assert "quantpipe:open_prompts 0.0" in small.http.get("/metrics").text


def test_long_prompt_and_too_many_tokens_in_all_are_400(small: Any) -> None:
    refused = small.post(COMPLETIONS, model="echo", prompt=[65] * 21)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "prompt")
    assert "at most 20" in refused.json()["error"]["message"]
    messages = [{"role": "user", "content": "x" * 30}]
    refused = small.post("/v1/chat/completions", model="echo", messages=messages, max_tokens=1)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "messages")
    refused = small.post(COMPLETIONS, model="echo", prompt=[65], max_tokens=200, n=3)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "max_tokens")


def test_open_tokens_are_bounded_over_all_requests_and_come_back(small: Any) -> None:
    asked = {"model": "echo", "prompt": [65], "max_tokens": 390, "ignore_eos": True}
    with httpx.stream("POST", small.url + COMPLETIONS, json=asked | {"stream": True}) as reply:
        lines = reply.iter_lines()
        next(lines)
        refused = small.post(COMPLETIONS, model="echo", prompt=[65] * 9)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "queue_full")
        assert "open tokens" in refused.json()["error"]["message"]
        assert small.post(COMPLETIONS, model="echo", prompt=[65], max_tokens=5).status_code == 200
    deadline = time.monotonic() + 5
    while small.post(COMPLETIONS, model="echo", prompt=[65] * 9).status_code != 200:
        assert time.monotonic() < deadline


def test_long_headers_end_the_connection_before_they_are_held(
    start_server: StartServer, make_engine: MakeEngine
) -> None:
    server = start_server(make_engine())
    with socket.create_connection(server.listener.getsockname()) as connection:
        connection.settimeout(10)
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\nX-Long: " + b"x" * 40_000)  # no end
        assert connection.recv(1 << 16).startswith(b"HTTP/1.1 400")
    assert server.http.get("/health", headers={"X-Long": "x" * 30_000}).status_code == 200


def test_request_that_waits_too_long_for_its_turn_is_503_streaming_or_not(
    start_server: StartServer, make_engine: MakeEngine
) -> None:
    server = start_server(make_engine(step_s=0.005, max_num_seqs=1))
    with httpx.stream("POST", server.url + COMPLETIONS, json=LONG | {"stream": True}) as reply:
        lines = reply.iter_lines()
        next(lines)
        for is_stream in (True, False):
            refused = server.post(COMPLETIONS, **BODY, max_queue_ms=30, stream=is_stream)
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "queue_timeout")
            assert refused.headers["retry-after"] == "1"
    for is_stream in (True, False):
        answered = server.post(COMPLETIONS, **BODY, max_queue_ms=60_000, stream=is_stream)
        assert answered.status_code == 200, answered.text
    assert server.post(COMPLETIONS, **BODY, max_queue_ms=0).status_code == 400


def test_five_hundred_requests_at_once_are_answered_or_refused_with_retry_after_and_health_stays_ok(
    start_server: StartServer, make_engine: MakeEngine
) -> None:
    options = FrontOptions(limits=Limits(max_open_prompts=32))
    server = start_server(make_engine(step_s=0.005), options=options)

    def ask(number: int) -> int:
        reply = http.post(COMPLETIONS, json={"model": "echo", "prompt": f"number {number}"})
        if reply.status_code == 503:
            assert reply.json()["error"]["code"] == "queue_full"
            assert 1 <= int(reply.headers["retry-after"]) <= 60
        else:
            assert (reply.status_code, reply.json()["choices"][0]["text"]) == (200, f"number {number}")
        return int(reply.status_code)

    # A connection each: threads that share idle ones may close them under each other.
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    with httpx.Client(base_url=server.url, limits=limits, timeout=60) as http, ThreadPoolExecutor(64) as pool:
        asked = [pool.submit(ask, number) for number in range(500)]
        while not all(own.done() for own in asked):
            assert server.http.get("/health").status_code == 200
            time.sleep(0.02)
        statuses = [own.result() for own in asked]
    assert set(statuses) == {200, 503}
    assert server.post(COMPLETIONS, **BODY).status_code == 200
    counted = json.loads(server.http.get("/stats").text)["requests"]
    assert counted["errors"] == {"queue_full": statuses.count(503)}
    assert (counted["open_prompts"], counted["open_tokens"]) == (0, 0)


def test_what_goes_wrong_inside_is_a_500_body_with_an_id(
    start_server: StartServer, make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = start_server(make_engine())
    monkeypatch.setattr("quantpipe.serve.app.stats_view", lambda *_: 1 / 0)
    reply = server.http.get("/stats", headers={"X-Request-Id": "mine"})
    assert (reply.status_code, reply.json()["error"]["code"]) == (500, "internal_error")
    assert reply.headers["x-request-id"] == "mine"

"""Two arms over a real socket: who answers, what tells it, and what happens where one loses its engine."""

import io
import json
import re
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest
from tokenizers import Tokenizer as Core

from quantpipe.engine.tokenizer import Tokenizer
from quantpipe.serve.admission.key_limits import KeyLimits
from quantpipe.serve.arms.split import Split
from quantpipe.serve.front_options import FrontOptions
from quantpipe.serve.keys import ApiKey, digest_of

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
ARM = "X-Quantpipe-Arm"
HALVES = Split((50, 50))
Server = Any
StartServer = Callable[..., Any]
MakeEngine = Callable[..., Any]


@pytest.fixture
def two(start_server: StartServer, make_engine: MakeEngine) -> Callable[..., Server]:
    """``two(split, step_s=..., ...)``: a server of two arms."""

    def start(split: Split = HALVES, step_s: float = 0.0005, **options: Any) -> Server:
        own = {"second": make_engine(step_s)} | options
        return start_server(make_engine(step_s), options=FrontOptions(split=split), **own)

    return start


def ask(server: Server, headers: dict[str, str] | None = None, **fields: Any) -> httpx.Response:
    body = {"model": "echo", "prompt": "abc"} | fields
    return server.http.post(COMPLETIONS, json=body, headers=headers)  # type: ignore[no-any-return]


def series(server: Server, name: str) -> dict[str, float]:
    """Values by labels."""
    found = re.findall(rf"^quantpipe:{name}(\{{.*\}})? (\S+)$", server.http.get("/metrics").text, re.MULTILINE)
    return {labels: float(value) for labels, value in found}


def test_header_model_user_and_draw_decide_and_the_reply_and_the_metric_say_so(two: Callable[..., Server]) -> None:
    server = two()
    for header, label in (("a", "a"), ("b", "b"), ("echo-b", "b")):
        assert ask(server, {ARM: header}).headers[ARM] == label
    named = ask(server, model="echo-b")
    assert (named.headers[ARM], named.json()["model"]) == ("b", "echo-b")
    assert len({ask(server, user="someone").headers[ARM] for _ in range(6)}) == 1
    assert {ask(server, user=f"user {number}").headers[ARM] for number in range(12)} == {"a", "b"}
    assert {ask(server).headers[ARM] for _ in range(12)} == {"a", "b"}
    assert server.engine_loop is not server.second_loop
    routed = series(server, "routed_requests_total")
    assert (routed['{arm="a",by="header"}'], routed['{arm="b",by="header"}']) == (1, 2)
    assert routed['{arm="b",by="model"}'] == 1
    assert sum(value for labels, value in routed.items() if 'by="user"' in labels) == 18
    assert sum(value for labels, value in routed.items() if 'by="draw"' in labels) == 12


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_stream_says_its_arm_and_gives_the_same_text(two: Callable[..., Server], path: str) -> None:
    server = two()
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    for label in "ab":
        headers = {ARM: label}
        if path == COMPLETIONS:
            made: Any = client.completions.with_raw_response.create(
                model="echo", prompt="abc", stream=True, extra_headers=headers
            )
            text = "".join(chunk.choices[0].text for chunk in made.parse())
        else:
            made = client.chat.completions.with_raw_response.create(
                model="echo", messages=[{"role": "user", "content": "hi"}], stream=True, extra_headers=headers
            )
            text = "".join(chunk.choices[0].delta.content or "" for chunk in made.parse())
        assert made.headers[ARM] == label
        assert text == ("abc" if path == COMPLETIONS else "user:hi;assistant:")


def test_arm_or_model_that_is_not_there_is_refused(two: Callable[..., Server]) -> None:
    server = two()
    refused = ask(server, {ARM: "c"})
    assert refused.status_code == 400 and "there is no arm" in refused.json()["error"]["message"]
    assert ARM not in refused.headers
    assert ask(server, {ARM: "a"}, model="echo-b").status_code == 400
    assert ask(server, model="other").status_code == 404
    assert ask(server, user=5).json()["error"]["param"] == "user"
    assert series(server, "http_responses_total") == {'{arm="",status="400"}': 3, '{arm="",status="404"}': 1}


def test_each_arm_has_its_own_tokenizer_template_and_length(
    two: Callable[..., Server], make_engine: MakeEngine, tokenizer: Tokenizer
) -> None:
    template = "{% for m in messages %}[{{ m.content }}]{% endfor %}"
    other = Tokenizer(Core.from_str(tokenizer._core.to_str()), tokenizer.special_tokens, template)
    second = make_engine()
    second.max_model_len = 100
    server = two(second=second, second_tokenizer=other)
    messages = [{"role": "user", "content": "hi"}]
    texts = {
        label: server.http.post(CHAT, json={"model": "echo", "messages": messages}, headers={ARM: label}).json()
        for label in "ab"
    }
    assert texts["a"]["choices"][0]["message"]["content"] == "user:hi;assistant:"
    assert texts["b"]["choices"][0]["message"]["content"] == "[hi]"
    assert ask(server, {ARM: "a"}, prompt=[65] * 200).status_code == 200
    assert ask(server, {ARM: "b"}, prompt=[65] * 200).status_code == 400
    models = {model["id"]: model["max_model_len"] for model in server.http.get("/v1/models").json()["data"]}
    assert models == {"echo": 100, "echo-a": 512, "echo-b": 100}
    assert server.http.get("/v1/models/echo-b").json()["max_model_len"] == 100
    counts = []
    for label in ("a", "b", None):
        headers = {} if label is None else {ARM: label}
        reply = server.http.post("/tokenize", json={"model": "echo", "messages": messages}, headers=headers)
        counts.append((reply.headers[ARM], reply.json()["count"]))
    assert counts == [("a", 19), ("b", 4), ("a", 19)]


def test_requests_of_a_lost_arm_go_to_the_other_and_those_that_ask_for_it_fail(two: Callable[..., Server]) -> None:
    server = two(Split((0, 1)))
    assert ask(server).headers[ARM] == "b"
    server.second_loop._supervisor._launch.launched[-1].kill()
    deadline = time.monotonic() + 5
    while server.second_loop.state.word == "ready":
        assert time.monotonic() < deadline
        time.sleep(0.005)
    for stream in (False, True):
        assert ask(server, stream=stream).headers[ARM] == "a"
    refused = ask(server, {ARM: "b"})
    assert (refused.status_code, refused.json()["error"]["code"], refused.headers[ARM]) == (503, "engine_failed", "b")
    assert series(server, "routed_requests_total")['{arm="a",by="failover"}'] == 2
    assert series(server, "request_errors_total")['{arm="b",code="engine_failed"}'] == 1
    ready = server.http.get("/ready")
    assert (ready.status_code, ready.json()["status"]) == (200, "degraded")
    assert "arm b" in ready.json()["reason"] and ready.json()["arms"]["a"]["status"] == "ok"
    server.second_loop._supervisor._launch._engine.forget_all()
    while server.http.get("/ready").json()["status"] != "ok":
        assert time.monotonic() < deadline + 10
        time.sleep(0.02)
    assert ask(server).headers[ARM] == "b"
    assert series(server, "engine_restarts_total") == {'{arm="a"}': 0, '{arm="b"}': 1}


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_waited_in_a_lost_arm_is_answered_by_the_other(
    two: Callable[..., Server], make_engine: MakeEngine, stream: bool
) -> None:
    second = make_engine(step_s=0.02, max_num_seqs=1)
    server = two(Split((0, 1)), second=second)
    long = {"max_tokens": 450, "ignore_eos": True}
    with ThreadPoolExecutor(2) as pool:
        running = pool.submit(ask, server, stream=stream, **long)
        until(lambda: len(second.seen_requests) == 1 and second.stats().num_running == 1)
        time.sleep(0.1)  # it has its first token
        waiting = pool.submit(ask, server, stream=stream, user="someone")
        until(lambda: len(second.seen_requests) == 2)
        second.failure = RuntimeError("broken")
        lost, answered = running.result(), waiting.result()
    assert (answered.status_code, answered.headers[ARM]) == (200, "a")
    assert "engine_failed" in lost.text and lost.headers[ARM] == "b"  # it had begun
    second.failure = None


def test_a_key_pays_once_for_a_prompt_that_two_arms_were_given(
    start_server: StartServer, make_engine: MakeEngine
) -> None:
    second = make_engine(step_s=0.02, max_num_seqs=1)
    keys = [ApiKey("alice", digest_of("s"), KeyLimits(tokens_per_minute=8))]
    options = FrontOptions(split=Split((0, 1)), keys=keys)
    server = start_server(make_engine(), options=options, second=second)
    key = {"Authorization": "Bearer s"}
    second.failure = RuntimeError("broken")  # at its first step: the prompt of 4 tokens was taken before
    assert ask(server, key, max_tokens=1).headers[ARM] == "a"
    assert ask(server, key, max_tokens=1).status_code == 200, "5 of 8 are used"
    assert ask(server, key, max_tokens=1).status_code == 429


def test_both_lost_is_503_and_not_ready(two: Callable[..., Server]) -> None:
    server = two()
    for loop in (server.engine_loop, server.second_loop):
        loop._supervisor._launch.launched[-1].kill()
    until(lambda: server.http.get("/ready").status_code == 503)
    until(lambda: server.http.get("/health").json()["arms"]["b"]["status"] == "failed")
    refused = ask(server)
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "engine_failed")
    assert int(refused.headers["retry-after"]) >= 1


def test_metrics_tell_arms_apart_and_stats_sum_them(two: Callable[..., Server]) -> None:
    server = two()
    for label in "aab":
        assert ask(server, {ARM: label}, max_tokens=3).status_code == 200
    assert series(server, "generation_tokens_total") == {'{arm="a"}': 6, '{arm="b"}': 3}
    assert series(server, "time_to_first_token_seconds_count") == {'{arm="a"}': 2, '{arm="b"}': 1}
    finished = series(server, "request_success_total")
    assert finished == {'{arm="a",finished_reason="length"}': 2, '{arm="b",finished_reason="length"}': 1}
    assert series(server, "request_prompt_tokens_sum") == {'{arm="a"}': 8, '{arm="b"}': 4}
    stats = server.http.get("/stats").json()
    assert stats["requests"]["finished"] == {"length": 3}
    assert (stats["tokens"]["generated"], stats["latency"]["ttft_s"]["num"]) == (9, 3)
    first, second = stats["arms"]
    assert (first["label"], first["name"], first["share"], first["is_shadow"]) == ("a", "echo-a", 0.5, False)
    assert (first["routed"], second["routed"]) == ({"header": 2}, {"header": 1})
    assert (first["tokens"]["generated"], second["tokens"]["generated"]) == (6, 3)
    assert stats["shadow"] is None and stats["served"]["model"] == "echo"


def test_log_has_the_arm(two: Callable[..., Server], logged: Callable[[str], io.StringIO]) -> None:
    stream = logged("json")
    server = two()
    ask(server, {ARM: "b"})
    ask(server, {ARM: "no"})
    server.stop()
    assert [json.loads(line).get("arm") for line in stream.getvalue().splitlines()] == ["b", None]


def test_one_arm_says_nothing_of_arms(server: Server) -> None:
    reply = ask(server)
    assert ARM not in reply.headers
    assert "arm=" not in server.http.get("/metrics").text
    assert server.http.get("/stats").json()["arms"] == []
    assert server.http.get("/health").json()["arms"] == {}
    assert ask(server, {ARM: "b"}).status_code == 400


def test_users_are_shared_out_by_the_weights_while_many_ask_at_once(two: Callable[..., Server]) -> None:
    server = two(Split((70, 30)))
    with ThreadPoolExecutor(8) as pool:
        arms = list(pool.map(lambda number: ask(server, user=f"u{number % 40}").headers[ARM], range(160)))
    by_user = {number % 40: {arms[other] for other in range(number % 40, 160, 40)} for number in range(40)}
    assert all(len(own) == 1 for own in by_user.values())
    assert Counter(arms)["a"] > Counter(arms)["b"] > 0


def until(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        threading.Event().wait(0.01)

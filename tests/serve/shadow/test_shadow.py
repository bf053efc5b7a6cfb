"""A shadow over a real socket: what it is asked, what is compared, and that nobody waits for it or fails with it."""

import re
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from tokenizers import Tokenizer as Core

from quantpipe.engine.tokenizer import Tokenizer
from quantpipe.serve.front_options import FrontOptions
from quantpipe.serve.shadow.options import ShadowOptions

COMPLETIONS = "/v1/completions"
LONG = {"max_tokens": 400, "ignore_eos": True}
Server = Any
MakeEngine = Callable[..., Any]
Shadowed = Callable[..., Server]


@pytest.fixture
def shadowed(start_server: Callable[..., Server], make_engine: MakeEngine) -> Shadowed:
    """``shadowed(second, share=..., max_open=...)``: a server whose second arm is a shadow."""

    def start(second: Any = None, first: Any = None, tokenizer: Tokenizer | None = None, **options: Any) -> Server:
        front = FrontOptions(shadow=ShadowOptions(**options))
        engines = first or make_engine(), second or make_engine()
        return start_server(engines[0], options=front, second=engines[1], second_tokenizer=tokenizer)

    return start


def ask(server: Server, **fields: Any) -> httpx.Response:
    return server.post(COMPLETIONS, **{"model": "echo", "prompt": "abc", "temperature": 0} | fields)  # type: ignore[no-any-return]


def view(server: Server) -> dict[str, Any]:
    return server.http.get("/stats").json()["shadow"]  # type: ignore[no-any-return]


def outcomes(server: Server, num: int) -> dict[str, int]:
    """Once there are so many in all."""
    until(lambda: sum(view(server)["outcomes"].values()) >= num)
    return view(server)["outcomes"]  # type: ignore[no-any-return]


def until(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("path", [COMPLETIONS, "/v1/chat/completions"])
@pytest.mark.parametrize("stream", [False, True])
def test_the_same_request_reaches_both_and_is_compared(
    shadowed: Shadowed, make_engine: MakeEngine, path: str, stream: bool
) -> None:
    second = make_engine()
    server = shadowed(second)
    prompt = {"prompt": "abc"} if path == COMPLETIONS else {"messages": [{"role": "user", "content": "hi"}]}
    body = {"model": "echo", "n": 2, "seed": 5, "temperature": 0.5, "max_tokens": 3, "stop": "zz", **prompt}
    reply = server.post(path, stream=stream, **body)
    assert (reply.status_code, reply.headers["X-Quantpipe-Arm"]) == (200, "a")
    assert outcomes(server, 1) == {"compared": 1}
    own, other = server.engine.seen_requests[0], second.seen_requests[0]
    assert (own.prompt_ids, own.params) == (other.prompt_ids, other.params)
    found = view(server)
    assert (found["num_equal"], found["num_different"], found["equal_frac"]) == (2, 0, 1.0)
    assert found["finish_reasons"] == {"length/length": 2}
    assert found["generated_tokens"] == {"a": 6, "b": 6}
    assert found["ttft_s"]["a"]["num"] == found["ttft_s"]["b"]["num"] == found["tpot_s"]["b"]["num"] == 2
    text = server.http.get("/metrics").text
    for series in (
        'shadow_requests_total{outcome="compared"} 1.0',
        'shadow_texts_total{result="equal"} 2.0',
        'shadow_finish_reasons_total{a="length",b="length"} 2.0',
        'shadow_time_to_first_token_seconds_count{arm="b"} 2.0',
        'shadow_generation_tokens_sum{arm="a"} 6.0',
        "shadow_first_difference_tokens_count 0.0",
    ):
        assert f"quantpipe:{series}" in text
    assert 'request_success_total{arm="a"' in text and 'request_success_total{arm="b"' not in text


def test_texts_that_part_are_counted_where_they_part(shadowed: Shadowed, make_engine: MakeEngine) -> None:
    class Differs(make_engine):  # type: ignore[misc, valid-type]
        def add(self, prompt_ids: Any, *arguments: Any, **named: Any) -> Any:
            return super().add([*prompt_ids[:-1], prompt_ids[-1] + 1], *arguments, **named)

    server = shadowed(Differs())
    assert ask(server, prompt="abcd", max_tokens=6).json()["choices"][0]["text"] == "abcd"
    assert outcomes(server, 1) == {"compared": 1}
    found = view(server)
    assert (found["num_different"], found["equal_frac"]) == (1, 0.0)
    assert found["first_difference_tokens"]["p50"] == 3


def test_a_draw_without_a_seed_is_not_compared_but_timed(shadowed: Shadowed) -> None:
    server = shadowed()
    assert ask(server, temperature=0.7).status_code == 200
    assert outcomes(server, 1) == {"not_comparable": 1}
    found = view(server)
    assert (found["num_equal"], found["equal_frac"], found["ttft_s"]["b"]["num"]) == (0, None, 1)
    for fields in ({"temperature": 0.7, "top_k": 1}, {"temperature": 0.7, "seed": 1}):
        ask(server, **fields)
    assert outcomes(server, 3) == {"not_comparable": 1, "compared": 2}


def test_nobody_waits_for_a_shadow_that_is_slow_or_stands_still(shadowed: Shadowed, make_engine: MakeEngine) -> None:
    second = make_engine(step_s=1.0)
    server = shadowed(second, max_open=2)
    started_s = time.monotonic()
    for _ in range(6):
        assert ask(server).json()["choices"][0]["text"] == "abc"
    assert time.monotonic() - started_s < 4.0, "the shadow needs four seconds for one of them"
    assert view(server)["outcomes"] == {"dropped": 4}
    until(lambda: len(second.seen_requests) >= 1)
    assert len(second.seen_requests) <= 2


def test_a_shadow_that_fails_or_is_gone_harms_nobody(shadowed: Shadowed, make_engine: MakeEngine) -> None:
    second = make_engine()
    second.max_model_len = 20
    server = shadowed(second)
    assert ask(server, prompt=[65] * 40).status_code == 200  # too long for the shadow
    assert outcomes(server, 1) == {"failed": 1}
    second.failure = RuntimeError("broken")
    assert ask(server).json()["choices"][0]["text"] == "abc"
    assert outcomes(server, 2) == {"failed": 2}
    until(lambda: bool(server.second_loop.state.word != "ready"))
    assert ask(server).json()["choices"][0]["text"] == "abc"
    assert outcomes(server, 3) == {"failed": 2, "dropped": 1}
    ready = server.http.get("/ready")
    assert (ready.status_code, ready.json()["status"]) == (200, "degraded")


@pytest.mark.parametrize("stream", [False, True])
def test_what_the_shadow_does_ends_with_a_request_whose_client_leaves(
    shadowed: Shadowed, make_engine: MakeEngine, stream: bool
) -> None:
    first, second = make_engine(step_s=0.02), make_engine(step_s=0.02)
    server = shadowed(second, first)
    with (
        pytest.raises(httpx.ReadTimeout),
        httpx.stream(
            "POST",
            server.url + COMPLETIONS,
            json={"model": "echo", "prompt": "x", "stream": stream, **LONG},
            timeout=httpx.Timeout(5, read=0.3),
        ) as reply,
    ):
        for number, _ in enumerate(reply.iter_lines()):
            if number == 4:
                raise httpx.ReadTimeout("gone in the middle")
    assert outcomes(server, 1) == {"abandoned": 1}
    until(lambda: not first.stats().num_running and not second.stats().num_running, 2.0)


def test_a_share_is_followed_and_the_rest_is_not_counted(shadowed: Shadowed) -> None:
    server = shadowed(share=0.5, seed=3)
    for _ in range(40):
        ask(server, max_tokens=1)
    until(lambda: server.http.get("/stats").json()["arms"][1]["running"] == 0)
    assert 8 < sum(view(server)["outcomes"].values()) < 32


def test_another_tokenizer_reads_the_prompt_its_own_way_and_only_texts_are_compared(
    shadowed: Shadowed, make_engine: MakeEngine, tokenizer: Tokenizer
) -> None:
    core = Core.from_str(tokenizer._core.to_str())
    core.add_special_tokens(["<extra>"])
    second = make_engine()
    template = "{% for m in messages %}[{{ m.content }}]{% endfor %}"
    server = shadowed(second, tokenizer=Tokenizer(core, tokenizer.special_tokens, template))
    messages = [{"role": "user", "content": "hi"}]
    assert server.post("/v1/chat/completions", model="echo", messages=messages, temperature=0).status_code == 200
    assert outcomes(server, 1) == {"compared": 1}
    assert second.seen_prompts[0] == tuple(tokenizer.encode("[hi]"))
    found = view(server)
    assert (found["num_different"], found["first_difference_tokens"]["num"]) == (1, 0)


def test_the_shadow_cannot_be_asked_for(shadowed: Shadowed) -> None:
    server = shadowed()
    reply = server.http.post(COMPLETIONS, json={"model": "echo", "prompt": "x"}, headers={"X-Quantpipe-Arm": "b"})
    assert reply.status_code == 400
    assert ask(server, model="echo-b").status_code == 404
    assert [model["id"] for model in server.http.get("/v1/models").json()["data"]] == ["echo"]


def test_many_at_once_are_each_compared_or_dropped_and_nothing_is_left(
    shadowed: Shadowed, make_engine: MakeEngine
) -> None:
    second = make_engine(step_s=0.002)
    server = shadowed(second, max_open=4)
    with ThreadPoolExecutor(8) as pool:
        replies = list(pool.map(lambda number: ask(server, prompt=f"prompt {number}", n=2), range(40)))
    assert {reply.status_code for reply in replies} == {200}
    found = outcomes(server, 40)
    assert found.keys() <= {"compared", "dropped"} and found["compared"] >= 2
    assert view(server)["num_equal"] == 2 * found["compared"]
    assert server.second_loop.num_open_prompts == 0
    assert re.search(r'num_requests_running\{arm="b"\} 0.0', server.http.get("/metrics").text)


def test_metrics_are_those_documented(shadowed: Shadowed) -> None:
    documented = (Path(__file__).parents[3] / "docs" / "serving.md").read_text(encoding="utf-8")
    names = re.findall(r"^# TYPE quantpipe:(\w+)", shadowed().http.get("/metrics").text, re.MULTILINE)
    assert len([name for name in names if name.startswith("shadow_")]) > 6
    for name in names:
        assert f"`{name.removesuffix('_total')}`" in documented or name.endswith("_created"), name


def test_drain_does_not_wait_for_the_shadow(shadowed: Shadowed, make_engine: MakeEngine) -> None:
    server = shadowed(make_engine(step_s=0.5))
    assert ask(server).status_code == 200
    server.stop()
    assert server.second_loop.num_open_prompts == 0

"""The endpoints over a real socket, as the openai client and less polite ones use them."""

import json
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

SOME_TEXT = "Grüße, 你好世界 👩🏽‍🚀 and 한국어."
CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
Server = Any
StartServer = Callable[..., Any]


@pytest.fixture(scope="module")
def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=20)


def events(response: httpx.Response) -> list[dict[str, Any]]:
    """The chunks of a finished stream, which must end with [DONE]."""
    lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def num_in_engine(server: Server) -> int:
    """From /metrics, as an operator would look."""
    lines = server.http.get("/metrics").text.splitlines()
    counts = dict(line.split() for line in lines if not line.startswith("#") and "{" not in line)
    return int(float(counts["quantpipe:num_requests_running"]) + float(counts["quantpipe:num_requests_waiting"]))


def wait_for_num_in_engine(server: Server, number: int) -> None:
    """Waits a while: the machine may be busy. Requests that are to be dropped must need longer than this."""
    deadline = time.monotonic() + 4.0
    while num_in_engine(server) != number:
        assert time.monotonic() < deadline, f"{num_in_engine(server)} in the engine"
        time.sleep(0.01)


def test_completion_and_its_stream_give_the_same_text(client: openai.OpenAI) -> None:
    whole = client.completions.create(model="echo", prompt=SOME_TEXT, max_tokens=200)
    chunks = list(client.completions.create(model="echo", prompt=SOME_TEXT, max_tokens=200, stream=True))
    assert whole.choices[0].text == SOME_TEXT
    assert "".join(chunk.choices[0].text for chunk in chunks) == SOME_TEXT
    assert "\ufffd" not in "".join(chunk.choices[0].text for chunk in chunks)
    assert whole.choices[0].finish_reason == chunks[-1].choices[0].finish_reason == "stop"


def test_chat_and_its_stream_give_the_same_text(client: openai.OpenAI) -> None:
    messages: Any = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": SOME_TEXT}]
    whole = client.chat.completions.create(model="echo", messages=messages)
    chunks = list(client.chat.completions.create(model="echo", messages=messages, stream=True))
    expected = f"system:Be kind.;user:{SOME_TEXT};assistant:"
    assert whole.choices[0].message.content == expected
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == expected
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_eight_clients_at_once_each_get_their_own_answer(client: openai.OpenAI) -> None:
    def ask(number: int) -> tuple[str, str]:
        prompt = f"client {number} says {SOME_TEXT}"
        if number % 2:
            return prompt, client.completions.create(model="echo", prompt=prompt, max_tokens=200).choices[0].text
        stream = client.completions.create(model="echo", prompt=prompt, max_tokens=200, stream=True)
        return prompt, "".join(chunk.choices[0].text for chunk in stream)

    with ThreadPoolExecutor(8) as pool:
        for prompt, text in pool.map(ask, range(16)):
            assert text == prompt


def test_list_of_prompts_gives_one_choice_each(client: openai.OpenAI) -> None:
    prompts = ["one", "twenty-two", "three"]
    whole = client.completions.create(model="echo", prompt=prompts)
    assert [(choice.index, choice.text) for choice in whole.choices] == list(enumerate(prompts))
    texts = ["", "", ""]
    for chunk in client.completions.create(model="echo", prompt=prompts, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == prompts


def test_token_ids_are_taken_as_they_are_and_text_gets_one_bos(server: Server, client: openai.OpenAI) -> None:
    client.completions.create(model="echo", prompt=[65, 66])
    assert server.engine.seen_prompts[-1] == (65, 66)
    client.completions.create(model="echo", prompt=[[65], [66, 67]])
    assert server.engine.seen_prompts[-2:] == [(65,), (66, 67)]
    client.completions.create(model="echo", prompt="A")
    assert server.engine.seen_prompts[-1].count(256) == 1


def test_chat_prompt_has_exactly_one_bos(server: Server, client: openai.OpenAI) -> None:
    client.chat.completions.create(model="echo", messages=[{"role": "user", "content": "hi"}])
    assert server.engine.seen_prompts[-1].count(256) == 1
    assert server.engine.seen_prompts[-1][0] == 256


def test_message_content_may_be_text_parts_and_developer_means_system(client: openai.OpenAI) -> None:
    parts: Any = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    messages: Any = [{"role": "developer", "content": "rule"}, {"role": "user", "content": parts}]
    whole = client.chat.completions.create(model="echo", messages=messages)
    assert whole.choices[0].message.content == "system:rule;user:one\ntwo;assistant:"


def test_answer_can_be_sent_back_as_a_message(client: openai.OpenAI) -> None:
    first = client.chat.completions.create(model="echo", messages=[{"role": "user", "content": "hi"}], max_tokens=3)
    messages: Any = [first.choices[0].message.model_dump(), {"role": "user", "content": "and"}]
    again = client.chat.completions.create(model="echo", messages=messages)
    assert again.choices[0].message.content == "assistant:use;user:and;assistant:"


def test_sampling_fields_reach_the_engine(server: Server) -> None:
    body = dict(temperature=0.5, top_p=0.9, top_k=7, seed=-3, max_tokens=2, stop_token_ids=[5], ignore_eos=True)
    assert server.post(COMPLETIONS, model="echo", prompt="abc", **body).status_code == 200
    params = server.engine.seen_params[-1]
    assert (params.temperature, params.top_p, params.top_k, params.max_tokens) == (0.5, 0.9, 7, 2)
    assert params.seed is not None and params.seed >= 0
    assert (params.stop_token_ids, params.ignore_eos, params.logprobs) == ((5,), True, None)
    body = dict(logit_bias={"5": -100}, presence_penalty=0.5, min_tokens=1)
    assert server.post(CHAT, model="echo", messages=[{"role": "user", "content": "a"}], **body).status_code == 200
    params = server.engine.seen_params[-1]
    assert (params.logit_bias, params.presence_penalty, params.min_tokens) == ({5: -100.0}, 0.5, 1)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_scheduling_fields_reach_the_engine(server: Server, path: str) -> None:
    asked = {"prompt": "a"} if path == COMPLETIONS else {"messages": [{"role": "user", "content": "a"}]}
    order = dict(priority=-7, qos="interactive", latency_budget_ms=1500, cache_salt="tenant 🔑")
    assert server.post(path, model="echo", **asked, **order).status_code == 200
    seen = server.engine.seen_requests[-1]
    assert (seen.priority, seen.qos, seen.deadline_s, seen.cache_salt) == (-7, "interactive", 1.5, "tenant 🔑")
    for unasked in ({}, dict.fromkeys(order)):
        assert server.post(path, model="echo", **asked, **unasked).status_code == 200
        seen = server.engine.seen_requests[-1]
        assert (seen.priority, seen.qos, seen.deadline_s, seen.cache_salt) == (0, "standard", None, "")


def test_defaults_are_openais(server: Server) -> None:
    assert server.post(COMPLETIONS, model="echo", prompt="a" * 60).json()["usage"]["completion_tokens"] == 16
    assert server.engine.seen_params[-1].temperature == 1.0
    assert server.post(CHAT, model="echo", messages=[{"role": "user", "content": "a" * 60}]).status_code == 200
    assert server.engine.seen_params[-1].max_tokens == 512 - len(server.engine.seen_prompts[-1])
    assert server.post(COMPLETIONS, model="echo", prompt=[65] * 505).status_code == 200
    assert server.engine.seen_params[-1].max_tokens == 7


def test_max_tokens_ends_with_finish_reason_length(client: openai.OpenAI) -> None:
    whole = client.completions.create(model="echo", prompt="abcdef", max_tokens=3)
    assert (whole.choices[0].text, whole.choices[0].finish_reason) == ("abc", "length")
    messages: Any = [{"role": "user", "content": "hi"}]
    chat = client.chat.completions.create(model="echo", messages=messages, max_completion_tokens=4)
    assert (chat.choices[0].message.content, chat.choices[0].finish_reason) == ("user", "length")


@pytest.mark.parametrize("stop", ["<end>", ["nothing", "<end>"]])
def test_stream_never_contains_any_part_of_a_stop_string(server: Server, stop: str | list[str]) -> None:
    body = dict(model="echo", prompt="a<b <e<end> more", max_tokens=50, stop=stop)
    chunks = events(server.post(COMPLETIONS, **body, stream=True, logprobs=0))
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "a<b <e"
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
    tokens = [token for chunk in chunks for token in chunk["choices"][0]["logprobs"]["tokens"]]
    assert "".join(tokens) == "a<b <e"
    whole = server.post(COMPLETIONS, **body).json()["choices"][0]
    assert (whole["text"], whole["finish_reason"]) == ("a<b <e", "stop")
    wait_for_num_in_engine(server, 0)


def test_usage_comes_after_the_finish_chunk_and_has_no_choices(server: Server) -> None:
    body = dict(model="echo", messages=[{"role": "user", "content": "hi"}], stream=True)
    chunks = events(server.post(CHAT, **body, stream_options={"include_usage": True}))
    assert chunks[-2]["choices"][0]["finish_reason"] == "stop"
    assert chunks[-1]["choices"] == []
    num_prompt = len("user:hi;assistant:") + 1
    expected: dict[str, Any] = {"prompt_tokens": num_prompt, "completion_tokens": num_prompt}
    expected |= {"total_tokens": 2 * num_prompt, "prompt_tokens_details": {"cached_tokens": 0}}
    assert chunks[-1]["usage"] == expected
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    assert server.post(CHAT, **(body | {"stream": False})).json()["usage"] == expected
    assert all(chunk["usage"] is None for chunk in events(server.post(CHAT, **body)))


def test_usage_sums_over_prompts(server: Server) -> None:
    body = dict(model="echo", prompt=["ab", "cde"], stream=True, stream_options={"include_usage": True})
    assert events(server.post(COMPLETIONS, **body))[-1]["usage"]["completion_tokens"] == 3 + 4  # with the end tokens


def test_completion_logprobs_line_up_with_the_text(client: openai.OpenAI) -> None:
    whole = client.completions.create(model="echo", prompt="héy", max_tokens=4, logprobs=2)
    logprobs: Any = whole.choices[0].logprobs
    assert whole.choices[0].text == "héy"
    assert [text for text in logprobs.tokens if len(text) == 1] == ["h", "y"]
    assert all(text.startswith("token_id:") for text in logprobs.tokens[1:3])
    assert logprobs.text_offset == [0, 1, 1, 2]
    assert logprobs.token_logprobs == [-0.5] * 4
    assert [len(top) for top in logprobs.top_logprobs] == [2] * 4
    assert logprobs.top_logprobs[0]["h"] == -0.5


def test_chat_logprobs_carry_bytes_and_alternatives_streamed_or_not(client: openai.OpenAI) -> None:
    request: Any = dict(model="echo", messages=[{"role": "user", "content": "é"}], logprobs=True, top_logprobs=3)
    whole = client.chat.completions.create(**request)
    entries: Any = whole.choices[0].logprobs.content if whole.choices[0].logprobs else None
    assert (entries[0].token, entries[0].bytes, entries[0].logprob) == ("u", [117], -0.5)
    assert [len(entry.top_logprobs) for entry in entries] == [3] * len(entries)
    assert [entry.bytes for entry in entries[5:7]] == [None, None]  # halves of a character
    chunks = list(client.chat.completions.create(**request, stream=True))
    streamed = [e for c in chunks if c.choices[0].logprobs for e in c.choices[0].logprobs.content or []]
    assert streamed == entries


def test_fields_that_change_nothing_are_taken(server: Server) -> None:
    harmless = dict(user="me", metadata={"a": "b"}, store=True, service_tier="auto", safety_identifier="x")
    neutral = dict(
        n=1, best_of=1, logit_bias={}, presence_penalty=0, frequency_penalty=0.0, response_format={"type": "text"}
    )
    absent = dict(tools=None, tool_choice="none", stop=None, seed=None, max_tokens=None, temperature=None)
    body = dict(model="echo", messages=[{"role": "user", "content": "hi", "name": "Ann"}])
    response = server.post(CHAT, **body, **harmless, **neutral, **absent)
    assert response.status_code == 200, response.text


def test_models_are_listed_and_found_by_name(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["echo"]
    assert client.models.retrieve("echo").id == "echo"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("org/other")


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_unknown_model_is_404_and_named(server: Server, path: str) -> None:
    prompt: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}]} if path == CHAT else {"prompt": "x"}
    response = server.post(path, model="gpt-9", **prompt)
    assert response.status_code == 404
    error = response.json()["error"]
    assert (error["param"], error["code"]) == ("model", "model_not_found")
    assert "gpt-9" in error["message"] and "echo" in error["message"]


def test_unknown_path_and_method_have_the_same_error_body(server: Server) -> None:
    assert server.http.get("/v2/nothing").json()["error"]["type"] == "invalid_request_error"
    response = server.http.get(CHAT)
    assert (response.status_code, set(response.json()["error"])) == (405, {"message", "type", "param", "code"})


@pytest.mark.parametrize("stream", [True, False])
def test_each_prompt_gets_n_choices_in_order_and_is_counted_once(server: Server, stream: bool) -> None:
    options = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    response = server.post(COMPLETIONS, model="echo", prompt=["one", "three"], n=3, **options)
    replies = events(response) if stream else [response.json()]
    texts, finished = [""] * 6, [0] * 6
    for reply in replies:
        for choice in reply["choices"]:
            texts[choice["index"]] += choice["text"]
            finished[choice["index"]] += choice["finish_reason"] == "stop"
    assert (texts, finished) == (["one"] * 3 + ["three"] * 3, [1] * 6)
    usage = replies[-1]["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (4 + 6, 3 * 4 + 3 * 6)
    assert [params.n for params in server.engine.seen_params[-2:]] == [3, 3]


def test_chat_choices_are_told_apart_in_a_stream(client: openai.OpenAI) -> None:
    messages: Any = [{"role": "user", "content": "x"}]
    whole = client.chat.completions.create(model="echo", messages=messages, n=2)
    assert [choice.message.content for choice in whole.choices] == ["user:x;assistant:"] * 2
    chunks = list(client.chat.completions.create(model="echo", messages=messages, n=2, stream=True))
    for index in range(2):
        own = [choice for chunk in chunks for choice in chunk.choices if choice.index == index]
        assert own[0].delta.role == "assistant"
        assert "".join(choice.delta.content or "" for choice in own) == "user:x;assistant:"
        assert [choice.finish_reason for choice in own if choice.finish_reason] == ["stop"]


def test_stop_string_ends_every_choice_and_the_request_in_the_engine(server: Server) -> None:
    reply = server.post(COMPLETIONS, model="echo", prompt="abcdef", n=4, stop="d", ignore_eos=True, max_tokens=400)
    assert [choice["text"] for choice in reply.json()["choices"]] == ["abc"] * 4
    wait_for_num_in_engine(server, 0)


def test_metrics_are_those_documented(server: Server) -> None:
    server.post(COMPLETIONS, model="echo", prompt="abc")
    text = server.http.get("/metrics").text
    assert 'quantpipe:request_success_total{finished_reason="stop"}' in text
    assert "quantpipe:time_to_first_token_seconds_bucket" in text
    assert "quantpipe:generation_tokens_total" in text
    documented = (Path(__file__).parents[2] / "docs" / "serving.md").read_text(encoding="utf-8")
    for line in text.splitlines():
        if line.startswith("# TYPE quantpipe:"):
            name = line.split()[2].removeprefix("quantpipe:").removesuffix("_total")
            assert f"`{name}`" in documented or name.endswith("_created"), name


def test_openapi_description_names_errors_and_streams(server: Server) -> None:
    operation = server.http.get("/openapi.json").json()["paths"][CHAT]["post"]
    assert set(operation["responses"]) == {str(s) for s in (200, 400, 401, 404, 408, 413, 429, 500, 503)}
    assert "text/event-stream" in operation["responses"]["200"]["content"]


STEP_S = 0.02
NUM_TRIES = 5


def num_held(server: Server) -> int:
    stats = server.engine.stats()
    return int(stats.num_running + stats.num_waiting)


def wait_for_num_held(server: Server, number: int) -> None:
    deadline = time.monotonic() + 10
    while num_held(server) != number:
        assert time.monotonic() < deadline, f"{num_held(server)} in the engine"
        time.sleep(0.001)


def steps_after_leaving(server: Server, path: str, body: dict[str, Any], num_chunks: int | None) -> int:
    """Let a client leave after so many chunks, or (None) while it waits for a whole reply; how many steps more the
    engine has computed when the request is gone. Time by the engine's own clock: a busy machine slows both.
    """
    before = num_held(server)
    with (
        pytest.raises(httpx.ReadTimeout),
        httpx.stream("POST", server.url + path, json=body, timeout=httpx.Timeout(5, read=0.2)) as reply,
    ):  # a reply that is not streamed runs into the limit; then the client hangs up
        wait_for_num_held(server, before + 1)
        lines = reply.iter_lines()
        for _ in range(num_chunks or 0):
            next(lines)
        raise httpx.ReadTimeout("gone in the middle of the stream")
    left_at = server.engine.stats().steps
    wait_for_num_held(server, before)
    return int(server.engine.stats().steps - left_at)


def assert_gone_at_once(num_steps: list[int]) -> None:
    """What looked at intervals would be late by half of one as a rule. None takes a second."""
    assert sorted(num_steps)[len(num_steps) // 2] <= 5, num_steps
    assert max(num_steps) * STEP_S < 1.0, num_steps


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("num_chunks", [None, 5])
def test_disconnect_frees_a_running_request_at_once(
    start_server: StartServer, make_engine: Callable[..., Any], path: str, num_chunks: int | None
) -> None:
    server = start_server(make_engine(step_s=STEP_S))
    prompt: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}]} if path == CHAT else {"prompt": "x"}
    # The engine needs nine seconds for this.
    body = dict(model="echo", max_tokens=450, ignore_eos=True, stream=num_chunks is not None, **prompt)
    assert_gone_at_once([steps_after_leaving(server, path, body, num_chunks) for _ in range(NUM_TRIES)])


@pytest.mark.parametrize("num_chunks", [None, 0])
def test_disconnect_frees_a_queued_request_at_once(
    start_server: StartServer, make_engine: Callable[..., Any], num_chunks: int | None
) -> None:
    server = start_server(make_engine(step_s=STEP_S, max_num_seqs=1))
    body = dict(model="echo", prompt="x", max_tokens=450, ignore_eos=True)
    with httpx.stream("POST", server.url + COMPLETIONS, json=body | {"stream": True}) as running:
        lines = running.iter_lines()
        next(lines)
        body["stream"] = num_chunks is not None
        assert_gone_at_once([steps_after_leaving(server, COMPLETIONS, body, num_chunks) for _ in range(NUM_TRIES)])
        assert num_held(server) == 1, "the one that runs goes on"


def test_full_queue_is_503_with_retry_after_and_health_stays_ok(
    start_server: StartServer, make_engine: Callable[..., Any]
) -> None:
    server = start_server(make_engine(step_s=0.005), max_open_prompts=4)

    def ask(number: int) -> httpx.Response:
        return server.post(COMPLETIONS, model="echo", prompt=f"request {number}")  # type: ignore[no-any-return]

    with ThreadPoolExecutor(24) as pool:
        responses = list(pool.map(ask, range(24)))
        assert server.http.get("/health").status_code == 200
    refused = [response for response in responses if response.status_code != 200]
    assert 0 < len(refused) < 24
    for response in refused:
        assert (response.status_code, response.json()["error"]["code"]) == (503, "queue_full")
        assert int(response.headers["retry-after"]) >= 1
    assert ask(0).status_code == 200


def test_engine_failure_is_a_500_body_an_error_event_and_a_server_that_is_not_ready(
    start_server: StartServer, make_engine: Callable[..., Any]
) -> None:
    server = start_server(make_engine(step_s=0.01))
    body = dict(model="echo", prompt="x", max_tokens=400, ignore_eos=True)
    with ThreadPoolExecutor(2) as pool:
        whole = pool.submit(server.post, COMPLETIONS, **body)
        streamed = pool.submit(server.post, COMPLETIONS, **body, stream=True)
        wait_for_num_in_engine(server, 2)
        server.engine.failure = RuntimeError("broken")
        assert whole.result().status_code == 500
        assert whole.result().json()["error"]["code"] == "engine_failed"
        assert events(streamed.result())[-1]["error"]["code"] == "engine_failed"
    health = server.http.get("/health")
    assert (health.status_code, health.json()["status"]) == (200, "failed")
    assert server.http.get("/ready").status_code == 503
    assert server.post(COMPLETIONS, **body).status_code == 503


def test_openai_client_raises_when_a_stream_ends_with_an_error(
    start_server: StartServer, make_engine: Callable[..., Any]
) -> None:
    server = start_server(make_engine(step_s=0.01))
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    extra = {"ignore_eos": True}
    stream = client.completions.create(model="echo", prompt="x", max_tokens=400, stream=True, extra_body=extra)
    next(iter(stream))
    server.engine.failure = RuntimeError("broken")
    with pytest.raises(openai.APIError, match="engine failed"):
        list(stream)


def test_shutdown_ends_every_stream_with_an_error_event_and_done(
    start_server: StartServer, make_engine: Callable[..., Any]
) -> None:
    server = start_server(make_engine(step_s=0.01))
    body = dict(model="echo", prompt="x", max_tokens=400, ignore_eos=True)
    with ThreadPoolExecutor(5) as pool:
        streams = [pool.submit(server.post, COMPLETIONS, **body, stream=True) for _ in range(4)]
        whole = pool.submit(server.post, COMPLETIONS, **body)
        wait_for_num_in_engine(server, 5)
        server.drain(0.1)
        for stream in streams:
            assert events(stream.result())[-1]["error"]["code"] == "shutting_down"
        assert (whole.result().status_code, whole.result().json()["error"]["code"]) == (503, "shutting_down")
    assert server.http.get("/health").json()["status"] == "stopping"

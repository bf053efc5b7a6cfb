"""A real engine on a random model behind a real server: what clients get, addresses, the end."""

import json
import random
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import Any

import httpx
import openai
import pytest
from served_process import ServedProcess, until

from quantpipe.errors import ArtifactError, DataError, RecipeError
from quantpipe.serve.server import bind, run_server


@pytest.fixture(scope="module")
def process(served_folder: Path) -> Iterator[ServedProcess]:
    with ServedProcess(served_folder) as started:
        yield started


@pytest.fixture(scope="module")
def url(process: ServedProcess) -> str:
    return process.url


@pytest.fixture(scope="module")
def http(url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=url, timeout=30) as client:
        yield client


def kv_usage(http: httpx.Client) -> float:
    lines = http.get("/metrics").text.splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith("quantpipe:kv_cache_usage_perc"))


def kv_blocks(http: httpx.Client) -> dict[str, int]:
    """By state."""
    found = re.findall(r'^quantpipe:kv_blocks\{state="(\w+)"\} (\S+)$', http.get("/metrics").text, re.MULTILINE)
    return {state: int(float(number)) for state, number in found}


def test_openai_client_gets_the_same_greedy_text_streaming_and_not_from_eight_threads(url: str) -> None:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)

    def ask(is_stream: bool) -> str:
        request: Any = dict(model="tiny", prompt="Hello", temperature=0, max_tokens=24)
        if not is_stream:
            return client.completions.create(**request).choices[0].text
        return "".join(chunk.choices[0].text for chunk in client.completions.create(**request, stream=True))

    with ThreadPoolExecutor(8) as pool:
        texts = set(pool.map(ask, [True, False] * 4))
    assert len(texts) == 1
    chat = client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "Hi"}], max_tokens=5)
    assert chat.usage is not None and chat.usage.completion_tokens <= 5


def test_samples_of_one_prompt_are_forked_and_the_first_is_that_of_one_alone(http: httpx.Client) -> None:
    body = {"model": "tiny", "prompt": "Hello there", "temperature": 1.5, "seed": 5, "max_tokens": 20}
    reply = http.post("/v1/completions", json=body | {"n": 4}).json()
    texts = [choice["text"] for choice in reply["choices"]]
    assert len(set(texts)) == 4
    assert reply["usage"]["prompt_tokens"] == 12  # with the BOS
    assert http.post("/v1/completions", json=body).json()["choices"][0]["text"] == texts[0]
    copied = next(line for line in http.get("/metrics").text.splitlines() if line.startswith("quantpipe:kv_blocks_cop"))
    assert float(copied.split()[1]) == 3
    refused = http.post("/v1/completions", json=body | {"n": 5})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "n")
    assert "max_num_seqs 4" in refused.json()["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 3])
def test_usage_counts_cached_tokens_under_the_same_salt_only(http: httpx.Client, stream: bool, n: int) -> None:
    def cached_tokens(salt: str) -> int:
        body: dict[str, Any] = {"model": "tiny", "prompt": [7] * 40, "max_tokens": 4, "n": n, "cache_salt": salt}
        if not stream:
            reply = http.post("/v1/completions", json=body).json()
        else:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
            reply = json.loads(http.post("/v1/completions", json=body).text.split("data: ")[-2])
        return int(reply["usage"]["prompt_tokens_details"]["cached_tokens"])

    one, other = f"one {n} {stream}", f"other {n} {stream}"
    assert [cached_tokens(one), cached_tokens(one), cached_tokens(other)] == [0, 32, 0]


def test_requests_the_engine_refuses_are_400_and_harm_nothing(http: httpx.Client) -> None:
    for prompt in ([258], [-1], [10**30], [1] * 257, ""):
        response = http.post("/v1/completions", json={"model": "tiny", "prompt": prompt})
        assert response.status_code == 400, response.text
    for fields in ({"logit_bias": {"258": 1}}, {"stop_token_ids": [258]}, {"min_tokens": 17}):
        response = http.post("/v1/completions", json={"model": "tiny", "prompt": [5], **fields})
        assert response.status_code == 400, response.text
        assert response.json()["error"]["param"] == next(iter(fields))
    assert http.post("/v1/completions", json={"model": "tiny", "prompt": [5]}).status_code == 200


def test_two_hundred_streams_closed_at_random_tokens_or_while_queued_leave_no_block_in_use(http: httpx.Client) -> None:
    num_blocks = sum(kv_blocks(http).values())

    def leave(seed: int) -> None:
        draw = random.Random(seed)
        body = {"model": "tiny", "prompt": "x" * draw.randint(1, 60), "max_tokens": 150, "ignore_eos": True}
        with http.stream("POST", "/v1/completions", json=body | {"stream": True}) as response:
            lines = response.iter_lines()
            for _ in range(seed % 7):  # none: it has been accepted, and nothing more
                next(lines)

    with ThreadPoolExecutor(8) as pool:  # of these, four run and four wait
        list(pool.map(leave, range(200)))
    deadline = time.monotonic() + 2
    while kv_usage(http) > 0:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    left = kv_blocks(http)
    assert (left["held"], left["free"] + left["cached"]) == (0, num_blocks)


def last_events(http: httpx.Client, max_tokens: int, when_begun: Callable[[], None]) -> list[Any]:
    """The last event but [DONE] of four streams; once all have begun, something is done to their server."""
    begun = Barrier(5)

    def read(number: int) -> list[str]:
        body = {"model": "tiny", "prompt": [number], "max_tokens": max_tokens, "ignore_eos": True, "stream": True}
        with http.stream("POST", "/v1/completions", json=body) as response:
            begun.wait(30)  # taken by the server, which refuses what comes after the signal
            return [line.removeprefix("data: ") for line in response.iter_lines() if line]

    with ThreadPoolExecutor(4) as pool:
        streams = [pool.submit(read, number) for number in range(4)]
        begun.wait(30)
        when_begun()
        events = [stream.result() for stream in streams]
    assert [done for *_, done in events] == ["[DONE]"] * 4
    return [json.loads(last) for *_, last, _ in events]


def test_sigterm_ends_all_streams_properly_and_the_process_with_0(http: httpx.Client, process: ServedProcess) -> None:
    # Both, as some service managers do: the engine leaves it to the server.
    for last in last_events(http, 120, lambda: process.send_to_both(signal.SIGTERM)):
        assert last["choices"][0]["finish_reason"] == "length"
    process.assert_ended_quietly()


def test_while_it_drains_others_are_refused_and_what_does_not_end_in_time_ends_with_an_error(
    served_folder: Path,
) -> None:
    with ServedProcess(served_folder, drain_s=1.0, is_endless=True) as process:
        with httpx.Client(base_url=process.url, timeout=30) as http:

            def stop_and_ask() -> None:
                process.send_signal(signal.SIGTERM)
                until(lambda: http.get("/ready").status_code == 503)
                assert http.get("/health").json()["status"] == "stopping"
                refused = http.post("/v1/completions", json={"model": "tiny", "prompt": "x"})
                assert (refused.status_code, refused.json()["error"]["code"]) == (503, "shutting_down")
                assert int(refused.headers["retry-after"]) >= 1

            lasts = last_events(http, 10**6, stop_and_ask)
        assert [last["error"]["code"] for last in lasts] == ["shutting_down"] * 4
        process.assert_ended_quietly()


def test_ctrl_c_in_a_terminal_drains_and_a_second_one_ends_at_once(served_folder: Path) -> None:
    with ServedProcess(served_folder, is_endless=True) as process:
        with httpx.Client(base_url=process.url, timeout=30) as http:

            def interrupt_twice() -> None:
                process.send_to_both(signal.SIGINT)
                until(lambda: http.get("/ready").status_code == 503)
                time.sleep(0.3)
                process.send_to_both(signal.SIGINT)

            lasts = last_events(http, 10**6, interrupt_twice)
        assert [last["error"]["message"] for last in lasts] == ["the server was told to stop at once"] * 4
        process.assert_ended_quietly()


def test_damaged_folder_is_refused_before_the_address_is_taken(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(ArtifactError):
            run_server([tmp_path], {}, "127.0.0.1", taken.getsockname()[1])


def test_an_address_in_use_is_said_before_the_model_is_warm(served_folder: Path) -> None:
    with bind("127.0.0.1", 0) as taken, pytest.raises(DataError, match="choose another port"):
        run_server([served_folder], {"backend": "reference"}, "127.0.0.1", taken.getsockname()[1])


def test_settings_of_no_engine_are_refused_in_the_words_of_the_engine(served_folder: Path) -> None:
    with pytest.raises(RecipeError, match="unknown setting; did you mean 'max_prefill_chunk'"):
        run_server([served_folder], {"max_prefil_chunk": 3}, "127.0.0.1", 0)
    with pytest.raises(RecipeError, match="a value that none can have"):
        run_server([served_folder], {"max_prefill_chunk": 10**30}, "127.0.0.1", 0)


def test_front_never_imports_what_only_the_engine_needs() -> None:
    code = "import sys, quantpipe.serve.server; print({'torch', 'quantpipe.engine.engine'} & set(sys.modules))"
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "set()\n"


def test_address_that_cannot_be_had_is_one_line_that_says_what_to_do() -> None:
    with bind("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        assert port > 0
        with pytest.raises(DataError, match=rf"127.0.0.1:{port}: .*in use; choose another port"):
            bind("127.0.0.1", port)
    with pytest.raises(DataError, match="address of this machine"):
        bind("no such host", 80)
    with pytest.raises(DataError, match="0 to 65535"):
        bind("127.0.0.1", 70_000)

"""Two tiny models in processes of their own: one is killed, the front is told to stop, one follows the other."""

import os
import signal
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import Any

import httpx
import openai
import pytest
from random_llama import write_random_llama
from served_process import ServedProcess, is_running, until

from quantpipe.engine.tokenizer import Tokenizer

ARM = "X-Quantpipe-Arm"


@pytest.fixture(scope="module")
def second_folder(tmp_path_factory: pytest.TempPathFactory, tokenizer: Tokenizer) -> Path:
    """Another model, with the same tokenizer."""
    folder = tmp_path_factory.mktemp("second")
    write_random_llama(folder, tokenizer, seed=1)
    return folder


@pytest.fixture(scope="module")
def process(served_folder: Path, second_folder: Path) -> Iterator[ServedProcess]:
    with ServedProcess(served_folder, second=second_folder, is_endless=True) as started:
        yield started


@pytest.fixture(scope="module")
def http(process: ServedProcess) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=process.url, timeout=30) as client:
        yield client


def complete(http: httpx.Client, arm: str | None = None, **fields: Any) -> httpx.Response:
    body = {"model": "tiny", "prompt": "Hello", "max_tokens": 8, "temperature": 0} | fields
    return http.post("/v1/completions", json=body, headers={} if arm is None else {ARM: arm})


def test_openai_client_is_answered_by_two_models(
    process: ServedProcess, http: httpx.Client, served_folder: Path, second_folder: Path
) -> None:
    assert f"a: {served_folder.name}, 50 %, backend reference" in process.ready_line
    client = openai.OpenAI(base_url=f"{process.url}/v1", api_key="none", max_retries=0)
    names = [model.id for model in client.models.list()]
    assert names == ["tiny", served_folder.name, second_folder.name]

    def ask(user: str) -> tuple[str, str]:
        made = client.completions.with_raw_response.create(
            model="tiny", prompt="Hello", max_tokens=8, temperature=0, user=user
        )
        return made.headers[ARM], made.parse().choices[0].text

    with ThreadPoolExecutor(4) as pool:
        answers = Counter(pool.map(ask, [f"user {number}" for number in range(16)]))
    assert len(answers) == 2 and {arm for arm, _ in answers} == {"a", "b"}, "each arm says one thing, and another one"
    for arm, text in answers:
        name = dict(zip("ab", names[1:], strict=True))[arm]
        assert (
            client.completions.create(model=name, prompt="Hello", max_tokens=8, temperature=0).choices[0].text == text
        )


def test_kill_9_of_one_engine_leaves_the_streams_of_the_other_and_its_share_goes_there(
    process: ServedProcess, http: httpx.Client
) -> None:
    begun = Barrier(3)

    def stream(arm: str) -> str:
        body = {"model": "tiny", "prompt": "x", "max_tokens": 400, "ignore_eos": True, "stream": True}
        with http.stream("POST", "/v1/completions", json=body, headers={ARM: arm}) as response:
            lines = response.iter_lines()
            next(lines)
            begun.wait(30)
            return [line for line in lines if line][-2]

    with ThreadPoolExecutor(2) as pool:
        of_a, of_b = pool.submit(stream, "a"), pool.submit(stream, "b")
        begun.wait(30)
        killed = process.engine_pids[1]
        os.kill(killed, signal.SIGKILL)
        assert '"engine_failed"' in of_b.result()
        assert '"finish_reason":"length"' in of_a.result()
    assert {complete(http).headers[ARM] for _ in range(6)} == {"a"}
    refused = complete(http, "b")
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "engine_failed")
    assert http.get("/ready").json()["status"] == "degraded"
    until(lambda: http.get("/ready").json()["status"] == "ok")
    assert complete(http, "b").status_code == 200
    assert killed not in process.engine_pids and len(process.engine_pids) == 2
    assert 'quantpipe:engine_restarts_total{arm="b"} 1.0' in http.get("/metrics").text


def test_sigterm_drains_both_and_leaves_no_process(process: ServedProcess, http: httpx.Client) -> None:
    engines = process.engine_pids
    begun = Barrier(3)

    def stream(arm: str) -> str:
        body = {"model": "tiny", "prompt": "x", "max_tokens": 150, "ignore_eos": True, "stream": True}
        with http.stream("POST", "/v1/completions", json=body, headers={ARM: arm}) as response:
            begun.wait(30)
            return [line for line in response.iter_lines() if line][-2]

    with ThreadPoolExecutor(2) as pool:
        streams = [pool.submit(stream, arm) for arm in "ab"]
        begun.wait(30)
        process.send_to_both(signal.SIGTERM)
        assert all('"finish_reason":"length"' in one.result() for one in streams)
    assert process.wait() == 0
    assert not any(map(is_running, engines))


def test_a_shadow_follows_at_the_lowest_priority_and_may_be_killed(served_folder: Path, second_folder: Path) -> None:
    with ServedProcess(served_folder, second=second_folder, is_shadowed=True, is_endless=True) as process:
        with httpx.Client(base_url=process.url, timeout=30) as http:
            assert [niceness(pid) for pid in process.engine_pids] == [0, 19]
            for number in range(3):
                assert complete(http, prompt=[number], max_tokens=20).headers[ARM] == "a"
            until(lambda: sum(shadow(http)["outcomes"].values()) == 3)
            assert shadow(http)["outcomes"] == {"compared": 3}
            assert shadow(http)["num_different"] == 3, "they are different models"
            assert shadow(http)["generated_tokens"] == {"a": 60, "b": 60}
            os.kill(process.engine_pids[1], signal.SIGKILL)
            until(lambda: http.get("/ready").json()["status"] == "degraded")
            assert complete(http).status_code == http.get("/ready").status_code == 200
        process.send_signal(signal.SIGTERM)
        assert process.wait() == 0


def shadow(http: httpx.Client) -> dict[str, Any]:
    return http.get("/stats").json()["shadow"]  # type: ignore[no-any-return]


def niceness(pid: int) -> int:
    return os.getpriority(os.PRIO_PROCESS, pid)

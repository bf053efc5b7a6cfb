"""A real engine on a random model behind a real process: start, serve, signals, addresses."""

import json
import random
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import Any

import httpx
import openai
import pytest
import torch
from safetensors.torch import save_file

from quantpipe.engine.config import EngineConfig
from quantpipe.engine.tokenizer import Tokenizer
from quantpipe.errors import ArtifactError, DataError
from quantpipe.serve.server import bind, run_server

CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 258,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "bos_token_id": 256,
    "eos_token_id": 257,
    "tie_word_embeddings": True,
}
LAYER_SHAPES = {
    "self_attn.q_proj": (64, 64),
    "self_attn.k_proj": (32, 64),
    "self_attn.v_proj": (32, 64),
    "self_attn.o_proj": (64, 64),
    "mlp.gate_proj": (128, 64),
    "mlp.up_proj": (128, 64),
    "mlp.down_proj": (64, 128),
    "input_layernorm": (64,),
    "post_attention_layernorm": (64,),
}
SCRIPT = """
import sys
from pathlib import Path
from threading import Barrier
import torch
torch.set_num_threads(1)
from quantpipe.engine.config import EngineConfig
from quantpipe.serve.server import run_server
run_server(Path(sys.argv[1]), EngineConfig(backend="reference", num_threads=1, max_num_seqs=4), "127.0.0.1", 0, "tiny")
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tokenizer: Tokenizer) -> Path:
    """A random two-layer Llama, written by hand: importing transformers takes longer than all tests here."""
    made = tmp_path_factory.mktemp("served")
    (made / "config.json").write_text(json.dumps(CONFIG))
    shapes = {"model.embed_tokens": (258, 64), "model.norm": (64,)}
    for layer in range(2):
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in LAYER_SHAPES.items()}
    generator = torch.Generator().manual_seed(0)
    tensors = {f"{name}.weight": 0.3 * torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    save_file(tensors, made / "model.safetensors")
    tokenizer._core.save(str(made / "tokenizer.json"))
    (made / "tokenizer_config.json").write_text(json.dumps(tokenizer.special_tokens))
    (made / "chat_template.jinja").write_text(str(tokenizer.chat_template))
    return made


@pytest.fixture(scope="module")
def process(folder: Path) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", SCRIPT, str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as started:
        yield started
        started.kill()


@pytest.fixture(scope="module")
def url(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    ready_line = process.stdout.readline()
    assert ready_line.startswith("quantpipe: serving tiny on http://127.0.0.1:")
    assert "backend reference" in ready_line
    return ready_line.split()[4]


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


def test_sigterm_ends_all_streams_properly_and_the_process_with_0(
    http: httpx.Client, process: subprocess.Popen[str]
) -> None:
    begun = Barrier(5)

    def read(number: int) -> list[str]:
        body = {"model": "tiny", "prompt": [number], "max_tokens": 120, "ignore_eos": True, "stream": True}
        with http.stream("POST", "/v1/completions", json=body) as response:
            begun.wait(30)  # taken by the server, which refuses what comes after the signal
            return [line.removeprefix("data: ") for line in response.iter_lines() if line]

    with ThreadPoolExecutor(4) as pool:
        streams = [pool.submit(read, number) for number in range(4)]
        begun.wait(30)
        process.send_signal(signal.SIGTERM)
        for stream in streams:
            *_, last, done = stream.result()
            assert done == "[DONE]"
            assert "error" in json.loads(last) or json.loads(last)["choices"][0]["finish_reason"] == "length"
    assert process.wait(10) == 0
    assert process.stderr is not None and process.stderr.read() == ""


def test_damaged_folder_is_refused_before_the_address_is_taken(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(ArtifactError):
            run_server(tmp_path, EngineConfig(), "127.0.0.1", taken.getsockname()[1])


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

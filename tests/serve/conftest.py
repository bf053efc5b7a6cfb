"""A byte-level tokenizer, an engine that repeats its prompt in a thread, and a real HTTP server over them."""

import asyncio
import dataclasses
import io
import logging
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
import tokenizers
import uvicorn
from random_llama import write_random_llama
from tokenizers import decoders, models, pre_tokenizers, processors

from quantpipe.engine.request import (
    FinishReason,
    QosClass,
    Request,
    SamplingParams,
    StepOutput,
    TokenLogprob,
    check_request,
)
from quantpipe.engine.stats import EngineStats
from quantpipe.engine.tokenizer import Tokenizer
from quantpipe.serve.admission.slow_client import limit_buffers
from quantpipe.serve.app import create_app
from quantpipe.serve.arms.arm import Arm
from quantpipe.serve.engine_process.client import EngineClient
from quantpipe.serve.engine_process.host import EngineHost
from quantpipe.serve.engine_process.messages import EngineFacts, Opened, Opening
from quantpipe.serve.front_options import FrontOptions
from quantpipe.serve.http_config import uvicorn_config
from quantpipe.serve.logs import start_logging
from quantpipe.serve.loop import SteppedEngine
from quantpipe.serve.server import bind

VOCAB_SIZE = 258
BOS, EOS = 256, 257
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' and m.content == 'refuse' %}"
    "{{ raise_exception('not this') }}{% endif %}{{ m.role }}:{{ m.content }};{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


class EchoEngine:
    """Repeats the prompt, one token per step and sample, then ends; with ``ignore_eos`` it repeats without end."""

    max_model_len = 512

    def __init__(self, step_s: float = 0.0, max_num_seqs: int = 16) -> None:
        self.step_s = step_s
        self.max_num_seqs = max_num_seqs
        self.failure: Exception | None = None
        self.seen_requests: list[Request] = []
        self.num_polls = 0
        self._progress: dict[str, tuple[Request, int]] = {}
        self._running: dict[str, set[int]] = {}  # samples
        self._finished: set[str] = set()
        self._num_generated = 0
        self._num_steps = 0

    @property
    def seen_params(self) -> list[SamplingParams]:
        return [request.params for request in self.seen_requests]

    @property
    def seen_prompts(self) -> list[tuple[int, ...]]:
        return [request.prompt_ids for request in self.seen_requests]

    @property
    def has_unfinished(self) -> bool:
        self.num_polls += 1
        return bool(self._progress)

    def compiled(self, params: SamplingParams) -> None:
        pass

    def add(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        request_id: str | None = None,
        *,
        cache_salt: str = "",
        priority: int = 0,
        qos: QosClass = "standard",
        deadline_s: float | None = None,
        max_queue_s: float | None = None,
    ) -> str:
        assert request_id is not None
        request = Request(
            request_id,
            tuple(prompt_ids),
            params,
            None,
            cache_salt,
            priority,
            qos,
            deadline_s,
            time.monotonic(),
            max_queue_s,
        )
        check_request(request, VOCAB_SIZE, self.max_model_len)
        self.seen_requests.append(request)
        self._progress[request_id] = (request, 0)
        self._running[request_id] = set(range(params.n))
        return request_id

    def abort(self, request_id: str) -> None:
        self._progress.pop(request_id, None)
        self._finished.discard(request_id)

    def forget_all(self) -> None:
        """As an engine that was just started."""
        self._progress.clear()

    def abort_sample(self, request_id: str, index: int) -> None:
        self._running[request_id].discard(index)

    def step(self) -> list[StepOutput]:
        time.sleep(self.step_s)
        self._num_steps += 1
        if self.failure is not None:
            raise self.failure
        outputs = self._expired()
        for request_id in list(self._progress)[: self.max_num_seqs]:
            samples = sorted(self._running[request_id])
            output = self._advance(request_id)
            outputs += [
                dataclasses.replace(output, index=index, prompt_logprobs=output.prompt_logprobs if index == 0 else ())
                for index in samples
            ]
        return outputs

    def _expired(self) -> list[StepOutput]:
        """Those behind the running ones that have waited too long; all that came counts, not only what was begun."""
        outputs: list[StepOutput] = []
        for request_id in list(self._progress)[self.max_num_seqs :]:
            request, _ = self._progress[request_id]
            if request.max_queue_s is not None and time.monotonic() - request.arrival_s > request.max_queue_s:
                del self._progress[request_id]
                reason, samples = FinishReason.EXPIRED, sorted(self._running[request_id])
                outputs += [StepOutput(request_id, (), (), reason, "not begun", index) for index in samples]
        return outputs

    def _advance(self, request_id: str) -> StepOutput:
        request, count = self._progress[request_id]
        prompt_logprobs = () if count else self._prompt_logprobs(request)
        if request.params.max_tokens == 0:
            del self._progress[request_id]
            self._finished.add(request_id)
            return StepOutput(request_id, (), (), FinishReason.LENGTH, prompt_logprobs=prompt_logprobs)
        text_ids = [token_id for token_id in request.prompt_ids if token_id != BOS] or [0]
        is_end = count == len(text_ids) and not request.params.ignore_eos
        token_id = EOS if is_end else text_ids[count % len(text_ids)]
        self._num_generated += 1
        self._progress[request_id] = (request, count + 1)
        reason = FinishReason.STOP if is_end or token_id in request.params.stop_token_ids else None
        if reason is None and count + 1 >= request.params.max_tokens:
            reason = FinishReason.LENGTH
        if reason is not None:
            del self._progress[request_id]
            self._finished.add(request_id)
        logprobs = self._logprobs(token_id, request.params.logprobs)
        return StepOutput(request_id, (token_id,), logprobs, reason, prompt_logprobs=prompt_logprobs)

    def _prompt_logprobs(self, request: Request) -> tuple[TokenLogprob, ...]:
        own = [self._logprobs(token_id, request.params.prompt_logprobs) for token_id in request.prompt_ids[1:]]
        return tuple(logprob for logprobs in own for logprob in logprobs)

    def _logprobs(self, token_id: int, num_top: int | None) -> tuple[TokenLogprob, ...]:
        if num_top is None:
            return ()
        top = tuple(((token_id + rank) % VOCAB_SIZE, -0.5 - rank) for rank in range(num_top))
        return (TokenLogprob(token_id, -0.5, True, top),)

    def stats(self) -> EngineStats:
        num_running = min(len(self._progress), self.max_num_seqs)
        num_waiting = len(self._progress) - num_running
        return EngineStats(num_running, num_waiting, num_running, 99, 99, 0, 0, self._num_generated, self._num_steps)


@pytest.fixture(scope="session")
def make_engine() -> type[EchoEngine]:
    """``make_engine(step_s=..., max_num_seqs=...)``."""
    return EchoEngine


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    """One token per byte, so that every character outside ASCII is split."""
    vocab = {symbol: index for index, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    core = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(["<s>", "</s>"])
    core.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS)])
    return Tokenizer(core, {"bos_token": "<s>", "eos_token": "</s>"}, TEMPLATE)


@pytest.fixture(scope="session")
def served_folder(tmp_path_factory: pytest.TempPathFactory, tokenizer: Tokenizer) -> Path:
    """A random two-layer Llama with that tokenizer."""
    folder = tmp_path_factory.mktemp("served")
    write_random_llama(folder, tokenizer)
    return folder


class EngineThread:
    """Runs an engine as its own process would, but in a thread of this one, where tests can look into it."""

    pid = -1

    def __init__(self, engine: SteppedEngine) -> None:
        ours, theirs = socket.socketpair()
        self.connection = ours
        self._engine = engine
        self._theirs = theirs
        self._is_served = True
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    @property
    def ident(self) -> int:
        return self._thread.ident or 0

    def _run(self) -> None:
        with self._theirs:
            host = EngineHost(self._theirs)
            host.listen()
            host.wait_for_opening()
            host.send(Opened(EngineFacts(self._engine.max_model_len)))
            self._is_served = host.serve(self._engine)
            self._theirs.shutdown(socket.SHUT_RDWR)

    def kill(self) -> None:
        with suppress(OSError):  # it has ended already
            self._theirs.shutdown(socket.SHUT_RDWR)

    def wait(self, timeout: float | None = None) -> int:
        self._thread.join(timeout)
        if self._thread.is_alive():
            raise subprocess.TimeoutExpired("engine", timeout or 0)
        return 0 if self._is_served else 1


class EngineThreads:
    """Launches an engine in one thread after the other."""

    def __init__(self, engine: SteppedEngine) -> None:
        self._engine = engine
        self.launched: list[EngineThread] = []

    def __call__(self) -> tuple[EngineThread, socket.socket]:
        self.launched.append(EngineThread(self._engine))
        return self.launched[-1], self.launched[-1].connection


def client_of(engine: SteppedEngine, max_open_prompts: int = 256) -> EngineClient:
    """A client of an engine that runs in a thread."""
    return EngineClient(Opening(b""), max_open_prompts, launch=EngineThreads(engine))


@pytest.fixture(scope="session")
def make_client() -> Callable[..., EngineClient]:
    """``make_client(engine, max_open_prompts=...)``."""
    return client_of


class RunningServer:
    """A uvicorn server in its own thread and event loop; of two arms where there is a ``second`` engine."""

    def __init__(
        self,
        engine: SteppedEngine,
        tokenizer: Tokenizer,
        max_open_prompts: int = 256,
        options: FrontOptions | None = None,
        second: SteppedEngine | None = None,
        second_tokenizer: Tokenizer | None = None,
    ) -> None:
        self.engine = engine
        options = options or FrontOptions()
        self.listener = bind("127.0.0.1", 0)
        limit_buffers(self.listener, options.limits.slow_client_s)
        self.url = f"http://127.0.0.1:{self.listener.getsockname()[1]}"
        self.engine_loop = client_of(engine, max_open_prompts)
        arms = [Arm("a", "echo-a", self.engine_loop, tokenizer)]
        if second is not None:
            self.second_loop = client_of(second, max_open_prompts)
            arms.append(Arm("b", "echo-b", self.second_loop, second_tokenizer or tokenizer))
        app = create_app(arms, "echo", self._remember_event_loop, options)
        self.uvicorn = uvicorn.Server(uvicorn_config(app, options, 5))
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.http = httpx.Client(base_url=self.url, timeout=20)

    def _run(self) -> None:
        asyncio.run(self.uvicorn.serve(sockets=[self.listener]))

    def _remember_event_loop(self) -> None:
        self.event_loop = asyncio.get_running_loop()
        self._ready.set()

    def start(self) -> None:
        self._thread.start()
        assert self._ready.wait(10)

    def drain(self, drain_s: float) -> None:
        asyncio.run_coroutine_threadsafe(self.engine_loop.drain(drain_s), self.event_loop).result(10)

    def stop(self) -> None:
        self.http.close()
        self.uvicorn.should_exit = True
        self._thread.join(10)
        assert not self._thread.is_alive()

    def post(self, path: str, **body: object) -> httpx.Response:
        return self.http.post(path, json=body)


@contextmanager
def running(server: RunningServer) -> Iterator[RunningServer]:
    server.start()
    try:
        yield server
    finally:
        server.stop()


@pytest.fixture(scope="session")
def server(tokenizer: Tokenizer) -> Iterator[RunningServer]:
    """One server shared by tests that leave it healthy and empty."""
    with running(RunningServer(EchoEngine(step_s=0.0005), tokenizer)) as started:
        yield started


@pytest.fixture
def start_server(tokenizer: Tokenizer) -> Iterator[Callable[..., RunningServer]]:
    """Start a server of one's own: ``start_server(engine, max_open_prompts=..., options=..., second=...)``."""
    started: list[RunningServer] = []

    def start(
        engine: EchoEngine,
        max_open_prompts: int = 256,
        options: FrontOptions | None = None,
        second: EchoEngine | None = None,
        second_tokenizer: Tokenizer | None = None,
    ) -> RunningServer:
        started.append(RunningServer(engine, tokenizer, max_open_prompts, options, second, second_tokenizer))
        started[-1].start()
        return started[-1]

    yield start
    for own in started:
        own.stop()


@pytest.fixture(scope="session")
def run_real() -> Callable[[SteppedEngine, Tokenizer], AbstractContextManager[RunningServer]]:
    """``with run_real(engine, tokenizer) as server``: a server, whose model is called echo, over a real engine."""
    return lambda engine, tokenizer: running(RunningServer(engine, tokenizer))


@pytest.fixture
def logged() -> Iterator[Callable[[str], io.StringIO]]:
    """Start logging in a format; what is written. All loggers are as before afterwards."""
    root, access = logging.getLogger(), logging.getLogger("quantpipe.access")
    before = (root.handlers[:], root.level, access.level)

    def start(log_format: Any) -> io.StringIO:
        stream = io.StringIO()
        start_logging(log_format, stream)
        return stream

    yield start
    root.handlers[:], root.level, access.level = before[0], before[1], before[2]

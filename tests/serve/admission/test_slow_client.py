"""Clients that ask for a stream and do not read it, over real sockets."""

import asyncio
import json
import logging
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
from starlette.types import Message

from quantpipe.serve import submission as submission_module
from quantpipe.serve.admission.limits import Limits
from quantpipe.serve.admission.slow_client import DROP_AFTER_S, limit_buffers, watched_send
from quantpipe.serve.front_options import FrontOptions

StartServer = Callable[..., Any]
MakeEngine = Callable[..., Any]


def test_send_that_waits_too_long_gives_up_once_and_goes_on_waiting() -> None:
    async def use() -> None:
        given_up: list[float] = []
        is_read = asyncio.Event()

        async def send(message: Message) -> None:
            if message["type"] == "slow":
                await is_read.wait()

        watched = watched_send(send, 0.05, lambda: given_up.append(time.monotonic()))
        await watched({"type": "quick"})
        sending = asyncio.create_task(watched({"type": "slow"}))
        await asyncio.sleep(0.15)
        assert len(given_up) == 1 and not sending.done()
        is_read.set()
        await sending
        await asyncio.sleep(0.1)
        assert len(given_up) == 1

    asyncio.run(use())


def request_without_reading(server: Any) -> socket.socket:
    """A connection whose other end holds as little as it can of what comes."""
    body = {"model": "echo", "prompt": "x" * 100, "max_tokens": 400, "ignore_eos": True, "stream": True, "n": 100}
    text = json.dumps(body)
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect(("127.0.0.1", server.listener.getsockname()[1]))
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(text)}"
    connection.sendall(f"{head}\r\n\r\n{text}".encode())
    return connection


def wait_until_engine_has_begun_and_ended(server: Any) -> None:
    deadline = time.monotonic() + 10
    while not server.engine.seen_requests or server.engine.has_unfinished:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_stream_that_nobody_reads_ends_in_the_engine_and_its_place_is_free(
    start_server: StartServer, make_engine: MakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    limits = Limits(max_open_prompts=100, slow_client_s=0.3)
    server = start_server(make_engine(step_s=0.02), options=FrontOptions(limits=limits))
    with request_without_reading(server) as connection, caplog.at_level(logging.WARNING):
        wait_until_engine_has_begun_and_ended(server)
        # It would have gone on for eight seconds, and have got every one of its tokens.
        assert server.engine.stats().generated_tokens < 400
        reply = server.post("/v1/completions", model="echo", prompt="abc")  # needs a place
        assert (reply.status_code, reply.json()["choices"][0]["text"]) == (200, "abc")
        connection.settimeout(10)
        received = b""
        while part := connection.recv(1 << 16):  # reads at last, and is told
            received += part
            if b"[DONE]" in received:
                break
    assert b'"code": "slow_client"' in received
    assert 'request_errors_total{code="slow_client"} 1.0' in server.http.get("/metrics").text
    assert not caplog.records, "a slow client is no fault of the server"


def test_backlog_beyond_the_bound_ends_a_stream_before_its_time(
    start_server: StartServer, make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(submission_module, "MAX_UNREAD_STEPS", 5)
    server = start_server(make_engine(step_s=0.02), options=FrontOptions(limits=Limits(slow_client_s=3600)))
    with request_without_reading(server):
        wait_until_engine_has_begun_and_ended(server)
        assert server.engine.stats().generated_tokens < 400


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="connections are dropped on Linux only")
def test_connections_inherit_what_the_kernel_is_told(start_server: StartServer, make_engine: MakeEngine) -> None:
    server = start_server(make_engine(), options=FrontOptions(limits=Limits(slow_client_s=7)))
    with socket.create_connection(server.listener.getsockname()):
        deadline = time.monotonic() + 5
        while not (protocols := list(server.uvicorn.server_state.connections)):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        accepted = protocols[0].transport.get_extra_info("socket")
        assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 12_000
        assert accepted.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) <= 2 * 128 * 1024


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="connections are dropped on Linux only")
def test_kernel_drops_a_connection_whose_other_end_takes_nothing() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.socket() as client:
        limit_buffers(listener, 1 - DROP_AFTER_S)
        client.connect(listener.getsockname())
        accepted, _ = listener.accept()
        with accepted, pytest.raises(TimeoutError):
            accepted.setblocking(False)
            deadline = time.monotonic() + 20
            while time.monotonic() < deadline:
                with suppress(BlockingIOError):
                    accepted.send(b"x" * 65536)
                time.sleep(0.001)

"""Connections on which a request's headers do not come, over real sockets."""

import json
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from quantpipe.serve.admission.limits import Limits
from quantpipe.serve.front_options import FrontOptions

LIMIT_S = 0.4
StartServer = Callable[..., Any]
MakeEngine = Callable[..., Any]


@pytest.fixture
def server(start_server: StartServer, make_engine: MakeEngine) -> Any:
    return start_server(make_engine(), options=FrontOptions(limits=Limits(slow_client_s=LIMIT_S)))


@contextmanager
def connected(server: Any) -> Iterator[socket.socket]:
    with socket.create_connection(server.listener.getsockname(), timeout=10) as connection:
        yield connection


def all_of(connection: socket.socket) -> bytes:
    """Until the server closes it."""
    parts: list[bytes] = []
    while part := connection.recv(65536):
        parts.append(part)
    return b"".join(parts)


def test_one_byte_now_and_then_does_not_keep_a_connection_open(server: Any) -> None:
    with connected(server) as connection:
        started_s = time.monotonic()
        connection.setblocking(False)
        reply = b""
        for byte in b"GET /health HTTP/1.1\r\nHost: x\r\n" + b"X-Filler: y\r\n" * 1000:
            try:
                connection.send(bytes([byte]))
                reply += connection.recv(65536)
                break
            except BlockingIOError:
                time.sleep(LIMIT_S / 8)
            assert time.monotonic() < started_s + 20 * LIMIT_S
        connection.settimeout(10)
        reply += all_of(connection)
    head, _, body = reply.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 408 ") and b"connection: close" in head.lower()
    assert json.loads(body)["error"]["code"] == "headers_timeout"
    assert time.monotonic() - started_s >= LIMIT_S


def test_a_connection_without_any_request_is_closed_without_a_word(server: Any) -> None:
    with connected(server) as connection:
        assert all_of(connection) == b""


def test_the_second_request_of_a_connection_is_timed_from_its_own_first_byte(server: Any) -> None:
    whole = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
    with connected(server) as connection:
        for _ in range(6):  # longer in all than one may take
            connection.sendall(whole[:10])
            time.sleep(LIMIT_S / 4)
            connection.sendall(whole[10:])
            reply = b""
            while not reply.endswith(b"}"):
                reply += connection.recv(65536)
            assert reply.startswith(b"HTTP/1.1 200 ")
        connection.sendall(whole[:10])
        assert all_of(connection).startswith(b"HTTP/1.1 408 ")


def test_an_answer_that_takes_longer_than_headers_may_is_not_cut(
    start_server: StartServer, make_engine: MakeEngine
) -> None:
    server = start_server(make_engine(step_s=0.05), options=FrontOptions(limits=Limits(slow_client_s=LIMIT_S)))
    reply = server.post("/v1/completions", model="echo", prompt="a" * 20, max_tokens=20)
    assert reply.status_code == 200 and reply.json()["usage"]["completion_tokens"] == 20

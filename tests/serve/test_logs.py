"""Lines of the log: one for each request, with nothing that a client could forge or would keep to itself."""

import io
import json
import logging
import re
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from quantpipe.serve.exchange import Exchange
from quantpipe.serve.front_options import FrontOptions
from quantpipe.serve.keys import ApiKey, digest_of
from quantpipe.serve.logs import LineFormatter, log_exchange

COMPLETIONS = "/v1/completions"
NASTY = 'x\r\n{"level": "info"}\u2028\x1b[31m\x00\ud800'
StartServer = Callable[..., Any]
MakeEngine = Callable[..., Any]


def entries(stream: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_request_is_one_line_with_its_figures_and_without_its_text(
    start_server: StartServer, make_engine: MakeEngine, logged: Callable[[str], io.StringIO]
) -> None:
    stream = logged("json")
    options = FrontOptions(keys=[ApiKey("alice", digest_of("for-alice"))], log_format="json")
    server = start_server(make_engine(step_s=0.001), options=options)
    headers = {"Authorization": "Bearer for-alice", "X-Request-Id": "mine"}
    for is_stream in (True, False):
        body = {"model": "echo", "prompt": "secretive", "stream": is_stream, "max_tokens": 5}
        assert server.http.post(COMPLETIONS, json=body, headers=headers).status_code == 200
    server.http.get("/health")
    server.stop()  # a line is written after the answer was sent
    streamed, whole = entries(stream)
    for entry in (streamed, whole):
        facts = ("request_id", "key", "method", "path", "status", "model", "prompt_tokens", "completion_tokens")
        assert [entry[name] for name in facts] == ["mine", "alice", "POST", COMPLETIONS, 200, "echo", 10, 5]
        assert (entry["finish_reasons"], entry["error"], entry["client"]) == ("length", None, "127.0.0.1")
        assert 0 < entry["ttft_s"] <= entry["total_s"]
    assert "secre" not in stream.getvalue() and "for-alice" not in stream.getvalue()


@pytest.mark.parametrize("log_format", ["json", "text"])
def test_nothing_that_a_client_sends_can_end_or_forge_a_line(
    start_server: StartServer, make_engine: MakeEngine, logged: Callable[[str], io.StringIO], log_format: str
) -> None:
    stream = logged(log_format)
    server = start_server(make_engine(), options=FrontOptions(log_format=log_format))  # type: ignore[arg-type]
    server.post(COMPLETIONS, model=NASTY[:-1], prompt="x")
    server.http.post(f"{COMPLETIONS}/%0a%1b[31mlevel=error%20x", json={})
    server.http.get("/none", headers={b"X-Request-Id": b"a\x1b\xffb", b"Authorization": b"\x7f\xff"})
    server.stop()
    text = stream.getvalue()
    assert text.endswith("\n") and text.count("\n") == len(text.splitlines()) == 3
    assert re.fullmatch(r"[ -~\n]*", text), "printable ASCII only"
    if log_format == "json":
        named, routed, _ = entries(stream)
        assert (named["model"], named["status"], named["error"]) == (NASTY[:-1], 404, "model_not_found")
        assert routed["path"] == f"{COMPLETIONS}/\n\x1b[31mlevel=error x"
        assert [entry["level"] for entry in entries(stream)] == ["info"] * 3


@pytest.mark.parametrize("log_format", ["json", "text"])
def test_any_text_is_printable_ascii_in_one_line(log_format: Any) -> None:
    exchange = Exchange("id", "GET", NASTY, NASTY)
    exchange.model, exchange.status = NASTY * 100, 404
    handler = _Kept(LineFormatter(log_format))
    access = logging.getLogger("quantpipe.access")
    before = access.level
    access.addHandler(handler)
    access.setLevel(logging.INFO)
    try:
        log_exchange(exchange)
    finally:
        access.removeHandler(handler)
        access.setLevel(before)
    (line,) = handler.lines
    assert re.fullmatch("[ -~]+", line)
    assert len(line) < 5000


class _Kept(logging.Handler):
    def __init__(self, formatter: logging.Formatter) -> None:
        super().__init__()
        self.setFormatter(formatter)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(self.format(record))


def test_probes_are_logged_only_when_they_fail(
    start_server: StartServer, make_engine: MakeEngine, logged: Callable[[str], io.StringIO]
) -> None:
    stream = logged("json")
    server = start_server(make_engine(), options=FrontOptions(keys=[ApiKey("a", digest_of("a"))], log_format="json"))
    assert [server.http.get(path).status_code for path in ("/health", "/metrics", "/stats")] == [200, 401, 401]
    server.stop()
    assert [(entry["path"], entry["error"]) for entry in entries(stream)] == [
        ("/metrics", "invalid_api_key"),
        ("/stats", "invalid_api_key"),
    ]


@pytest.mark.parametrize("is_stream", [True, False])
def test_client_that_leaves_is_logged_as_such(
    start_server: StartServer, make_engine: MakeEngine, logged: Callable[[str], io.StringIO], is_stream: bool
) -> None:
    stream = logged("json")
    server = start_server(make_engine(step_s=0.01), options=FrontOptions(log_format="json"))
    body = {"model": "echo", "prompt": "x", "max_tokens": 400, "ignore_eos": True}
    if is_stream:
        with httpx.stream("POST", server.url + COMPLETIONS, json=body | {"stream": True}) as reply:
            lines = reply.iter_lines()
            next(lines)
    else:
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(server.url + COMPLETIONS, json=body, timeout=httpx.Timeout(5, read=0.2))
    server.stop()
    (entry,) = entries(stream)
    assert (entry["error"], entry["status"]) == ("client_closed", 200 if is_stream else 499)
    assert entry["completion_tokens"] > 0


def test_warnings_and_exceptions_come_in_the_same_form(logged: Callable[[str], io.StringIO]) -> None:
    stream = logged("json")
    logging.getLogger("some.library").warning("line\n%s", "two")
    try:
        raise ValueError("broken")
    except ValueError:
        logging.getLogger("anything").exception("it failed")
    logging.getLogger("anything").info("not this")
    first, second = entries(stream)
    assert (first["level"], first["message"]) == ("warning", "line\ntwo")
    assert "ValueError: broken" in second["exception"]

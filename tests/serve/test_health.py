"""Whether the server lives and takes requests, as a supervisor asks, over a real socket."""

from collections.abc import Callable
from typing import Any

from quantpipe import __version__
from quantpipe.engine.tokenizer import Tokenizer
from quantpipe.serve.arms.arm import Arm
from quantpipe.serve.health import health_of
from quantpipe.serve.served_facts import GateFacts, ServedFacts

Server = Any
StartServer = Callable[..., Any]


def test_a_server_that_serves_is_alive_and_ready(server: Server) -> None:
    for path in ("/health", "/ready"):
        response = server.http.get(path)
        assert response.status_code == 200
        assert response.json()["status"] == "ok" and response.json()["reason"] is None
        assert response.json()["verdict"] is None  # nothing is known of what this engine serves
    assert server.http.get("/version").json() == {"version": __version__}


def test_verdict_on_what_is_served_is_shown(server: Server, tokenizer: Tokenizer) -> None:
    gate = GateFacts("PASS with waivers", "r", "ab" * 32, "2026-12-01")
    facts = ServedFacts("artifact", "d", "auto", "cpu", gate=gate)
    arm = Arm("a", "echo", server.engine_loop, tokenizer, lambda: facts)
    assert health_of([arm], 1).verdict == "PASS with waivers"


def test_one_that_stops_is_alive_and_not_ready(start_server: StartServer, make_engine: Callable[..., Any]) -> None:
    server = start_server(make_engine())
    server.drain(1)
    assert server.http.get("/health").status_code == 200
    response = server.http.get("/ready")
    assert (response.status_code, response.json()["status"]) == (503, "stopping")
    assert int(response.headers["retry-after"]) >= 1
    refused = server.post("/v1/completions", model="echo", prompt="x")
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "shutting_down")


def test_one_whose_engine_broke_says_why(start_server: StartServer, make_engine: Callable[..., Any]) -> None:
    engine = make_engine()
    server = start_server(engine)
    engine.failure = ZeroDivisionError("broken")
    assert server.post("/v1/completions", model="echo", prompt="x").status_code == 500
    health = server.http.get("/health")
    assert (health.status_code, health.json()["status"]) == (200, "failed")
    assert "ZeroDivisionError" in health.json()["reason"]
    assert server.http.get("/ready").status_code == 503
    refused = server.post("/v1/completions", model="echo", prompt="x")
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "engine_failed")

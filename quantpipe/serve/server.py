"""A served model folder as a process: start the engine's, bind, announce, and end gracefully on a signal."""

import asyncio
import gc
import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import uvicorn

from quantpipe.engine.tokenizer import Tokenizer
from quantpipe.errors import DataError
from quantpipe.serve.app import create_app
from quantpipe.serve.engine_process.client import EngineClient
from quantpipe.serve.engine_process.launch import STOP_SIGNALS
from quantpipe.serve.engine_process.messages import EngineFacts, Opening
from quantpipe.serve.engine_process.watch import WatchLimits
from quantpipe.serve.submission import UnavailableError

DRAIN_S = 30.0
BACKLOG = 2048
# Beyond the drain: time for the last bytes to reach slow clients.
FLUSH_S = 5.0


def run_server(
    folder: Path,
    settings: Mapping[str, Any],
    host: str,
    port: int,
    model_name: str | None = None,
    is_verified: bool = False,
    drain_s: float = DRAIN_S,
    limits: WatchLimits | None = None,
) -> None:
    """Serve ``folder`` until SIGTERM or SIGINT; a second signal cuts the requests in flight short.

    ``settings`` are those of ``EngineConfig``, by name. The engine runs in a process of its own: where that dies, the
    requests it holds end, and another is started. Port 0 takes a free one. Prints one line when requests are taken.

    Raises ArtifactError for a damaged folder (``is_verified``: by its digests, too), RecipeError for settings that
    cannot be had and DataError for an address that cannot, all before anything is served.
    """
    engine = EngineClient(Opening(os.fsencode(folder), dict(settings), is_verified), limits=limits)
    engine.launch()
    try:
        asyncio.run(_serve(engine, folder, host, port, model_name or folder.resolve().name, drain_s))
    finally:
        engine.kill()


def bind(host: str, port: int) -> socket.socket:
    """A listening socket. Raises DataError, saying what to change."""
    where = f"serve: {host}:{port}"
    if not 0 <= port <= 65535:
        raise DataError(f"{where}: ports are 0 to 65535")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise DataError(f"{where}: {error.strerror}; choose an address of this machine") from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise DataError(f"{where}: {error.strerror}; choose another port (0 takes a free one) or host") from error
    return listener


async def _serve(engine: EngineClient, folder: Path, host: str, port: int, model_name: str, drain_s: float) -> None:
    try:
        opened, tokenizer = await asyncio.gather(
            engine.open(), asyncio.to_thread(Tokenizer.open, folder), return_exceptions=True
        )
        if opened is not None:  # of two faults of a folder, that of the model
            raise opened
        if isinstance(tokenizer, BaseException):
            raise tokenizer
        with bind(host, port) as listener:
            await engine.start()
            await _answer(engine, tokenizer, model_name, listener, drain_s)
    finally:
        await engine.stop()


async def _answer(
    engine: EngineClient, tokenizer: Tokenizer, model_name: str, listener: socket.socket, drain_s: float
) -> None:
    drains: list[asyncio.Task[None]] = []

    async def drain() -> None:
        await engine.drain(drain_s)  # until it is done, new requests are answered: with a 503
        server.should_exit = True

    def on_signal() -> None:
        if drains:
            engine.end_all(UnavailableError("the server was told to stop at once", "shutting_down"))
        else:
            drains.append(asyncio.create_task(drain()))

    def on_ready() -> None:
        # Here and not earlier, because uvicorn installs its own handlers first: its would drop what is in flight.
        for signal_number in STOP_SIGNALS:
            asyncio.get_running_loop().add_signal_handler(signal_number, on_signal)
        gc.freeze()  # what is there now stays: no collection has to look at it again
        gc.enable()
        print(f"quantpipe: serving {model_name} on {_url(listener)} ({_engine_facts(engine.facts)})", flush=True)

    app = create_app(engine, tokenizer, model_name, on_ready)
    config = uvicorn.Config(
        app, log_level="warning", access_log=False, backlog=BACKLOG, timeout_graceful_shutdown=int(FLUSH_S)
    )
    server = uvicorn.Server(config)
    await server.serve(sockets=[listener])


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _engine_facts(facts: EngineFacts) -> str:
    shown = (f"backend {facts.backend}", f"kv {facts.kv_dtype}", f"max_model_len {facts.max_model_len}")
    return ", ".join((*shown, *facts.notes))

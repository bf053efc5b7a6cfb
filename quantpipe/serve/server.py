"""A served model folder as a process: open, bind, announce, and end gracefully on a signal."""

import asyncio
import gc
import signal
import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import uvicorn

from quantpipe.engine.config import EngineConfig
from quantpipe.engine.engine import Engine
from quantpipe.engine.tokenizer import Tokenizer
from quantpipe.errors import DataError, RequestError
from quantpipe.guided.compiler import GrammarCompiler
from quantpipe.serve.app import create_app
from quantpipe.serve.loop import EngineLoop
from quantpipe.serve.submission import UnavailableError

DRAIN_S = 30.0
BACKLOG = 2048
# Beyond the drain: time for the last bytes to reach slow clients.
FLUSH_S = 5.0


def run_server(
    folder: Path,
    config: EngineConfig,
    host: str,
    port: int,
    model_name: str | None = None,
    tool_parser: str | None = None,
) -> None:
    """Serve ``folder`` until SIGTERM or SIGINT; a second signal cuts the requests in flight short.

    Port 0 takes a free one. Warms the engine up, then prints one line when requests are taken. Raises ArtifactError for
    a damaged folder and DataError for an address that cannot be had, both before anything is served.
    """
    with ThreadPoolExecutor(1) as pool:
        opening = pool.submit(Tokenizer.open, folder)
        engine = Engine.open(folder, config)
    tokenizer = opening.result()
    compiler = GrammarCompiler(tokenizer, engine.description.vocab_size, engine.description.eos_token_ids)
    with suppress(RequestError):  # each request with a grammar will be told
        compiler.load()
    engine.compiler = compiler
    name = model_name or folder.resolve().name
    with bind(host, port) as listener:
        engine.warm_up()
        asyncio.run(_serve(engine, tokenizer, name, listener, compiler, tool_parser))


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


async def _serve(
    engine: Engine,
    tokenizer: Tokenizer,
    model_name: str,
    listener: socket.socket,
    compiler: GrammarCompiler,
    tool_parser: str | None,
) -> None:
    engine_loop = EngineLoop(engine)
    drains: list[asyncio.Task[None]] = []

    def on_signal() -> None:
        if drains:
            engine_loop.end_all(UnavailableError("the server was told to stop at once", "shutting_down"))
            return
        drains.append(asyncio.create_task(engine_loop.drain(DRAIN_S)))
        server.should_exit = True

    def on_ready() -> None:
        # Here and not earlier, because uvicorn installs its own handlers first: its would drop what is in flight.
        for signal_number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(signal_number, on_signal)
        gc.freeze()  # what is there now stays: no collection has to look at it again
        gc.enable()
        print(f"quantpipe: serving {model_name} on {_url(listener)} ({_engine_facts(engine)})", flush=True)

    app = create_app(engine_loop, tokenizer, model_name, on_ready, compiler, tool_parser)
    config = uvicorn.Config(
        app, log_level="warning", access_log=False, backlog=BACKLOG, timeout_graceful_shutdown=int(DRAIN_S + FLUSH_S)
    )
    server = uvicorn.Server(config)
    await server.serve(sockets=[listener])


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _engine_facts(engine: Engine) -> str:
    facts = (f"backend {engine.config.backend}", f"kv {engine.kv_dtype}", f"max_model_len {engine.max_model_len}")
    return ", ".join((*facts, *engine.backend_notes))

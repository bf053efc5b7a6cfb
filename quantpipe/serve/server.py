"""A served model folder as a process: open, bind, announce, and end gracefully on a signal."""

import asyncio
import gc
import signal
import socket
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import uvicorn

from quantpipe.engine.config import EngineConfig
from quantpipe.engine.engine import Engine
from quantpipe.engine.tokenizer import Tokenizer
from quantpipe.errors import DataError
from quantpipe.serve.admission.slow_client import limit_buffers
from quantpipe.serve.app import create_app
from quantpipe.serve.front_options import FrontOptions
from quantpipe.serve.http_config import BACKLOG, uvicorn_config
from quantpipe.serve.logs import start_logging
from quantpipe.serve.loop import EngineLoop
from quantpipe.serve.served_facts import FactsReader
from quantpipe.serve.submission import UnavailableError

DRAIN_S = 30.0
# Beyond the drain: time for the last bytes to reach slow clients.
FLUSH_S = 5.0


def run_server(
    folder: Path,
    config: EngineConfig,
    host: str,
    port: int,
    model_name: str | None = None,
    options: FrontOptions | None = None,
) -> None:
    """Serve ``folder`` until SIGTERM or SIGINT; a second signal cuts the requests in flight short.

    Port 0 takes a free one. Warms the engine up, then prints one line when requests are taken. Raises ArtifactError for
    a damaged folder and DataError for an address or a certificate that cannot be had, before anything is served.
    """
    options = options or FrontOptions()
    options.check_ssl()
    if options.log_format is not None:
        start_logging(options.log_format)
    with ThreadPoolExecutor(1) as pool:
        opening = pool.submit(Tokenizer.open, folder)
        engine = Engine.open(folder, config)
    tokenizer = opening.result()
    name = model_name or folder.resolve().name
    with bind(host, port) as listener:
        limit_buffers(listener, options.limits.slow_client_s)
        if (warning := options.exposure_warning(listener)) is not None:
            print(warning, file=sys.stderr, flush=True)
        engine.warm_up()
        asyncio.run(_serve(engine, tokenizer, name, listener, options, FactsReader(folder, config)))


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
    options: FrontOptions,
    facts: FactsReader,
) -> None:
    engine_loop = EngineLoop(engine, options.limits.max_open_prompts)
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
        url = _url(listener, options.url_scheme)
        print(f"quantpipe: serving {model_name} on {url} ({_engine_facts(engine)})", flush=True)
        facts.look_for_verdict()

    app = create_app(engine_loop, tokenizer, model_name, on_ready, options, facts.read)
    server = uvicorn.Server(uvicorn_config(app, options, DRAIN_S + FLUSH_S))
    await server.serve(sockets=[listener])


def _url(listener: socket.socket, scheme: str) -> str:
    host, port = listener.getsockname()[:2]
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def _engine_facts(engine: Engine) -> str:
    facts = (f"backend {engine.config.backend}", f"kv {engine.kv_dtype}", f"max_model_len {engine.max_model_len}")
    return ", ".join((*facts, *engine.backend_notes))

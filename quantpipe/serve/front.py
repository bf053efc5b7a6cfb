"""The HTTP side of a served model: announces itself, answers, and ends gracefully on a signal."""

import asyncio
import gc
import logging
import socket
import sys
from collections.abc import Callable, Sequence

import uvicorn

from quantpipe.serve.admission.slow_client import limit_buffers
from quantpipe.serve.app import create_app
from quantpipe.serve.arms.arm import Arm
from quantpipe.serve.arms.split import whole
from quantpipe.serve.engine_process.launch import STOP_SIGNALS
from quantpipe.serve.engine_process.messages import EngineFacts
from quantpipe.serve.front_options import FrontOptions
from quantpipe.serve.http_config import uvicorn_config
from quantpipe.serve.logs import start_logging
from quantpipe.serve.submission import UnavailableError

# Beyond the drain: time for the last bytes to reach slow clients.
FLUSH_S = 5.0


async def answer(
    arms: Sequence[Arm],
    model_name: str,
    listener: socket.socket,
    options: FrontOptions,
    look_for_verdicts: Callable[[], None],
) -> None:
    """Answer requests at ``listener`` until a signal to stop, and then for a while those that have begun.

    Prints one line when requests are taken. A second signal ends them at once.
    """
    drains: list[asyncio.Task[None]] = []

    async def drain() -> None:
        # Until it is done, new requests are answered: with a 503. Nobody waits for what a shadow has yet to say.
        patience_s = [0.0 if number in options.shadows else options.drain_s for number in range(len(arms))]
        await asyncio.gather(*(arm.engine.drain(own) for arm, own in zip(arms, patience_s, strict=True)))
        server.should_exit = True

    def on_signal() -> None:
        if not drains:
            drains.append(asyncio.create_task(drain()))
            return
        for arm in arms:
            arm.engine.end_all(UnavailableError("the server was told to stop at once", "shutting_down"))

    def on_ready() -> None:
        # Here and not earlier, because uvicorn installs its own handlers first: its would drop what is in flight.
        for signal_number in STOP_SIGNALS:
            asyncio.get_running_loop().add_signal_handler(signal_number, on_signal)
        gc.freeze()  # what is there now stays: no collection has to look at it again
        gc.enable()
        url = _url(listener, options.url_scheme)
        print(f"quantpipe: serving {model_name} on {url} ({_arms_facts(arms, options)})", flush=True)
        look_for_verdicts()

    if options.log_format is not None:
        start_logging(options.log_format)
    # That a client is gone is no news: asyncio would warn of writes to it until its disconnect is noticed.
    logging.getLogger("asyncio").setLevel(logging.ERROR)
    limit_buffers(listener, options.limits.slow_client_s)
    if (warning := options.exposure_warning(listener)) is not None:
        print(warning, file=sys.stderr, flush=True)
    app = create_app(arms, model_name, on_ready, options)
    server = uvicorn.Server(uvicorn_config(app, options, FLUSH_S))
    await server.serve(sockets=[listener])


def _url(listener: socket.socket, scheme: str) -> str:
    host, port = listener.getsockname()[:2]
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def _arms_facts(arms: Sequence[Arm], options: FrontOptions) -> str:
    """``backend cpu, ...``; of two, ``a: NAME, 90 %, backend cpu, ...; b: ...``."""
    if len(arms) == 1:
        return _engine_facts(arms[0].engine.facts)
    shares = (options.split or whole(len(arms))).shares
    parts = [
        f"{arm.label}: {arm.name}, {'shadow' if number in options.shadows else f'{100 * shares[number]:g} %'}, "
        f"{_engine_facts(arm.engine.facts)}"
        for number, arm in enumerate(arms)
    ]
    return "; ".join(parts)


def _engine_facts(facts: EngineFacts) -> str:
    shown = (f"backend {facts.backend}", f"kv {facts.kv_dtype}", f"max_model_len {facts.max_model_len}")
    return ", ".join((*shown, *facts.notes))

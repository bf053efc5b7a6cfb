"""A served model folder as two processes: the engine's, started here, and this one, which answers (``front``)."""

import asyncio
import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quantpipe.engine.tokenizer import Tokenizer
from quantpipe.errors import DataError
from quantpipe.serve.engine_process.client import EngineClient
from quantpipe.serve.engine_process.messages import Opening
from quantpipe.serve.front_options import FrontOptions

BACKLOG = 2048


def run_server(
    folder: Path,
    settings: Mapping[str, Any],
    host: str,
    port: int,
    model_name: str | None = None,
    is_verified: bool = False,
    options: FrontOptions | None = None,
) -> None:
    """Serve ``folder`` until SIGTERM or SIGINT; a second signal cuts the requests in flight short.

    ``settings`` are those of ``EngineConfig``, by name. The engine runs in a process of its own: where that dies, the
    requests it holds end, and another is started. Port 0 takes a free one. Prints one line when requests are taken.

    Raises ArtifactError for a damaged folder (``is_verified``: by its digests, too), RecipeError for settings that
    cannot be had and DataError for an address or a certificate that cannot, all before anything is served.
    """
    options = options or FrontOptions()
    options.check_ssl()
    opening = Opening(os.fsencode(folder), dict(settings), is_verified)
    engine = EngineClient(opening, options.limits.max_open_prompts, options.watch)
    engine.launch()
    try:
        asyncio.run(_serve(engine, folder, settings, host, port, model_name or folder.resolve().name, options))
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


async def _serve(
    engine: EngineClient,
    folder: Path,
    settings: Mapping[str, Any],
    host: str,
    port: int,
    model_name: str,
    options: FrontOptions,
) -> None:
    # Imported here: the engine's process, launched before, imports and loads meanwhile.
    from quantpipe.serve.front import answer
    from quantpipe.serve.served_facts import FactsReader

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
            await answer(engine, tokenizer, model_name, listener, options, FactsReader(folder, settings))
    finally:
        await engine.stop()

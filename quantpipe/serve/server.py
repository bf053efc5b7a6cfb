"""A served model folder as two processes: the engine's, started here, and this one, which answers (``front``).

Two folders are three processes: each has an engine of its own.
"""

import asyncio
import os
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from quantpipe.engine.tokenizer import Tokenizer
from quantpipe.errors import DataError
from quantpipe.serve.arms.arm import LABELS, Arm, arm_names
from quantpipe.serve.engine_process.client import EngineClient
from quantpipe.serve.engine_process.messages import Opening
from quantpipe.serve.front_options import FrontOptions

BACKLOG = 2048
SHADOW_NICENESS = 19  # it computes with what the arm that answers leaves of the cores


def run_server(
    folders: Sequence[Path],
    settings: Mapping[str, Any],
    host: str,
    port: int,
    model_name: str | None = None,
    is_verified: bool = False,
    options: FrontOptions | None = None,
) -> None:
    """Serve ``folders``, one or two, until SIGTERM or SIGINT; a second signal cuts the requests in flight short.

    ``settings`` are those of ``EngineConfig``, by name, for each. Every engine runs in a process of its own: where that
    dies, the requests it holds end, and another is started. Port 0 takes a free one. Prints one line when requests are
    taken. Two folders are the arms of a split, or one and its shadow, as ``options`` say.

    Raises ArtifactError for a damaged folder (``is_verified``: by its digests, too), RecipeError for settings that
    cannot be had and DataError for an address or a certificate that cannot, all before anything is served.
    """
    options = options or FrontOptions()
    options.check_ssl()
    names = arm_names(folders)
    model_name = model_name or folders[0].resolve().name
    settings = _shared(settings, len(folders))
    engines = [
        EngineClient(
            Opening(
                os.fsencode(folder), dict(settings), is_verified, SHADOW_NICENESS if number in options.shadows else 0
            ),
            options.limits.max_open_prompts,
            options.watch,
        )
        for number, folder in enumerate(folders)
    ]
    try:
        for engine in engines:
            engine.launch()
        asyncio.run(_serve(engines, folders, names, settings, host, port, model_name, options))
    finally:
        for engine in engines:
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
    engines: Sequence[EngineClient],
    folders: Sequence[Path],
    names: Sequence[str],
    settings: Mapping[str, Any],
    host: str,
    port: int,
    model_name: str,
    options: FrontOptions,
) -> None:
    # Imported here: the engines' processes, launched before, import and load meanwhile.
    from quantpipe.serve.front import answer
    from quantpipe.serve.served_facts import FactsReader

    try:
        opened = await asyncio.gather(
            *(engine.open() for engine in engines),
            *(asyncio.to_thread(Tokenizer.open, folder) for folder in folders),
            return_exceptions=True,
        )
        for outcome in opened:  # of two faults of a folder, that of the model
            if isinstance(outcome, BaseException):
                raise outcome
        tokenizers = [outcome for outcome in opened if isinstance(outcome, Tokenizer)]
        with bind(host, port) as listener:
            await asyncio.gather(*(engine.start() for engine in engines))
            readers = [FactsReader(folder, settings) for folder in folders]
            arms = [
                Arm(label, name, engine, tokenizer, reader.read)
                for label, name, engine, tokenizer, reader in zip(
                    LABELS, names, engines, tokenizers, readers, strict=False
                )
            ]

            def look_for_verdicts() -> None:
                for reader in readers:
                    reader.look_for_verdict()

            await answer(arms, model_name, listener, options, look_for_verdicts)
    finally:
        await asyncio.gather(*(engine.stop() for engine in engines))


def _shared(settings: Mapping[str, Any], num_engines: int) -> Mapping[str, Any]:
    """Each engine's settings: a share of the machine's memory is that of all of them together."""
    share = settings.get("memory_utilization")
    return settings if not isinstance(share, float) else {**settings, "memory_utilization": share / num_engines}

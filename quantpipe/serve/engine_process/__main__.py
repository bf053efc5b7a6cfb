"""``python -m quantpipe.serve.engine_process DESCRIPTOR``: an engine, for the process at the other end of a socket.

It ends with that end, at once and whatever it is doing: nothing it holds outlives the front. Signals to stop are
the front's to obey: a Ctrl-C, or a service manager, reaches both processes, and this one has streams to finish.
"""

import ctypes
import gc
import os
import signal
import socket
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from quantpipe.formats.digests import Hashing
from quantpipe.serve.engine_process.host import EngineHost, FrontGoneError
from quantpipe.serve.engine_process.launch import STOP_SIGNALS
from quantpipe.serve.engine_process.messages import EngineFacts, Opened, Opening
from quantpipe.serve.engine_process.start_errors import failure_of

if TYPE_CHECKING:
    from quantpipe.engine.engine import Engine

# The status of a process is not shown to anybody: the front is told why by message.
SERVED, FAILED = 0, 1
PR_SET_PDEATHSIG = 1


def main(descriptor: int) -> NoReturn:
    """Serve the front at this socket until it is gone."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)  # held back since before this process was there
    if sys.platform == "linux":  # stopped, or stuck in a library, it would not notice the end of the connection
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    gc.disable()  # nearly all that a start makes stays
    connection = socket.socket(fileno=descriptor)
    connection.set_inheritable(False)  # or a compiler that is started here would keep it open
    host = EngineHost(connection, lambda: _end(SERVED))
    host.listen()
    try:
        _end(SERVED if _serve(host) else FAILED)
    except FrontGoneError:
        _end(SERVED)


def _serve(host: EngineHost) -> bool:
    opening = host.wait_for_opening()
    os.nice(
        opening.niceness
    )  # of this thread, and so of all that it will start; that which answers pings keeps its own
    try:
        engine = _open(opening)
        notes = tuple(engine.backend_notes)
        host.send(Opened(EngineFacts(engine.max_model_len, engine.config.backend, engine.kv_dtype, notes)))
        engine.warm_up()
    except FrontGoneError:
        raise
    except Exception as error:
        host.send(failure_of(error))
        return False
    gc.freeze()  # what is there now stays: no collection has to look at it again
    gc.enable()
    return host.serve(engine)


def _open(opening: Opening) -> "Engine":
    folder = Path(os.fsdecode(opening.folder))
    # Begun first: other cores read and hash the files while this one is busy with imports.
    hashing = Hashing(folder) if opening.is_verified else None
    from quantpipe.engine.config import EngineConfig
    from quantpipe.engine.engine import Engine
    from quantpipe.engine.tokenizer import Tokenizer
    from quantpipe.errors import RequestError
    from quantpipe.formats.artifact import require_intact
    from quantpipe.guided.compiler import GrammarCompiler

    config = EngineConfig.of(opening.settings)
    if hashing is not None:
        require_intact(folder, hashing)
    engine = Engine.open(folder, config)
    compiler = GrammarCompiler(Tokenizer.open(folder), engine.description.vocab_size, engine.description.eos_token_ids)
    with suppress(RequestError):  # each request with a grammar will be told
        compiler.load()
    engine.compiler = compiler
    return engine


def _end(status: int) -> NoReturn:
    """Without the interpreter's farewell, which would wait for threads that compute."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    main(int(sys.argv[1]))

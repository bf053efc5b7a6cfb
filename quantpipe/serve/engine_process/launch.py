"""Starting an engine's process, joined to this one by a pair of sockets. Knows no asyncio and no messages."""

import os
import signal
import site
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol, TypeAlias

import quantpipe

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)
MODULE = "quantpipe.serve.engine_process"


class EngineProcess(Protocol):
    """What the front does to the engine's process; ``subprocess.Popen`` can."""

    @property
    def pid(self) -> int: ...
    def kill(self) -> None: ...
    def wait(self, timeout: float | None = None) -> int: ...


Launch: TypeAlias = Callable[[], tuple[EngineProcess, socket.socket]]


def launch_engine(program: Sequence[str] = ("-m", MODULE)) -> tuple[EngineProcess, socket.socket]:
    """Start ``program``, arguments of this interpreter, with its end of the connection as one argument more.

    Returns the process and this end. To be called from the main thread. OSError where no process can be had.
    """
    ours, theirs = socket.socketpair()
    # Held back until the process ignores them; those that come for this process meanwhile are delivered right after.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        process = subprocess.Popen(
            [sys.executable, "-P", *program, str(theirs.fileno())],
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            env=_environment(),
        )
    except OSError:
        ours.close()
        raise
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        theirs.close()
    return process, ours


def _environment() -> dict[str, str]:
    """This one, in which the same package is found: it may have been imported from the current folder."""
    root = str(Path(quantpipe.__file__).parents[1])
    if root in (*site.getsitepackages(), site.getusersitepackages()):  # nothing there may hide the standard library
        return dict(os.environ)
    paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {"PYTHONPATH": os.pathsep.join(paths)}


def how_it_ended(status: int) -> str:
    """The end of a process in words, from what ``wait`` returned."""
    if status >= 0:
        return f"ended with exit code {status}"
    try:
        return f"was killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"was killed by signal {-status}"

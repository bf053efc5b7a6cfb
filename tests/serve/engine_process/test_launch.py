"""Processes joined to this one by a socket."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import quantpipe
from quantpipe.serve.engine_process.launch import how_it_ended, launch_engine


def test_the_process_has_its_end_of_the_connection_and_finds_the_same_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "quantpipe.py").write_text("raise SystemExit('the wrong one')")
    monkeypatch.chdir(tmp_path)
    code = "import quantpipe, socket, sys; socket.socket(fileno=int(sys.argv[1])).sendall(quantpipe.__file__.encode())"
    process, connection = launch_engine(("-c", code))
    with connection, connection.makefile("rb") as received:
        assert received.read().decode() == quantpipe.__file__
    assert process.wait(10) == 0


def test_the_package_may_come_from_the_folder_one_is_in(tmp_path: Path) -> None:
    root = Path(quantpipe.__file__).parents[1]
    code = (
        "from quantpipe.serve.engine_process.launch import launch_engine\n"
        "process, connection = launch_engine(('-c', 'import quantpipe; print(quantpipe.__file__)'))\n"
        "raise SystemExit(process.wait(10))"
    )
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, quantpipe.__file__), done.stderr


def test_signals_that_come_before_it_can_ignore_them_are_held_back_and_only_there() -> None:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    code = (
        "import signal, socket, sys; held_back = signal.pthread_sigmask(signal.SIG_BLOCK, ())\n"
        "socket.socket(fileno=int(sys.argv[1])).sendall(repr(held_back).encode())"
    )
    process, connection = launch_engine(("-c", code))
    with connection, connection.makefile("rb") as received:
        held_back = received.read().decode()
    assert process.wait(10) == 0
    assert "SIGINT" in held_back and "SIGTERM" in held_back
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before


def test_its_end_is_closed_here_so_that_its_death_is_noticed() -> None:
    process, connection = launch_engine(("-c", "pass"))
    with connection:
        connection.settimeout(10)
        assert connection.recv(1) == b""
    assert process.wait(10) == 0


def test_no_process_leaves_no_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[socket.socket] = []
    pair = socket.socketpair

    def recorded() -> tuple[socket.socket, socket.socket]:
        made.extend(pair())
        return made[0], made[1]

    monkeypatch.setattr(sys, "executable", "/no/such/interpreter")
    monkeypatch.setattr(socket, "socketpair", recorded)
    with pytest.raises(OSError):
        launch_engine()
    assert [end.fileno() for end in made] == [-1, -1]


@pytest.mark.parametrize(
    ("status", "words"),
    [(0, "ended with exit code 0"), (3, "ended with exit code 3"), (-9, "was killed by SIGKILL"), (-77, "signal 77")],
)
def test_how_it_ended_is_said_in_words(status: int, words: str) -> None:
    assert words in how_it_ended(status)

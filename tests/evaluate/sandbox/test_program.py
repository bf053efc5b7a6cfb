"""Programs that a model might write: what they must not reach, and that every one of them ends."""

import os
import platform
import socket
import threading
import time
from pathlib import Path

import pytest

from quantpipe.evaluate.sandbox.program import FILE_BYTES, Guards, Limits, guards, run_program
from quantpipe.evaluate.sandbox.syscall_filter import syscall_filter

SHORT = Limits(timeout_s=1.0)
HELD = guards()
needs_network_guard = pytest.mark.skipif(not HELD.network, reason="nothing here keeps programs from the network")
needs_process_guard = pytest.mark.skipif(not HELD.processes, reason="nothing here filters system calls")
needs_file_guard = pytest.mark.skipif(not HELD.files, reason="nothing here keeps files from being written")


def test_a_program_passes_where_its_tests_run_to_their_end() -> None:
    outcome = run_program("def f(x):\n    return x + 1", "assert f(1) == 2\nprint('ü')", SHORT)
    assert (outcome.is_passed, outcome.reason, outcome.output) == (True, "", "ü")
    assert outcome.guards == HELD


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ("def f(x):\n    return x", "AssertionError"),
        ("def f(x: return x", "SyntaxError: invalid syntax"),
        ("import sys; sys.exit(0)", "ended with exit code 0 before its tests did"),
        ("import os; os._exit(0)", "ended with exit code 0 before its tests did"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "was ended by SIGKILL"),
        ("raise KeyError('x')", "KeyError: 'x'"),
        ("\0", "source code string cannot contain null bytes"),
    ],
)
def test_a_program_that_does_not_reach_the_end_of_its_tests_fails(answer: str, reason: str) -> None:
    outcome = run_program(answer, "assert f(1) == 2", SHORT)
    assert not outcome.is_passed and reason in outcome.reason


@pytest.mark.parametrize("answer", ["while True:\n    pass", "import time\ntime.sleep(1000)", "x = 9 ** 9 ** 9"])
def test_a_program_without_end_is_ended(answer: str) -> None:
    started_s = time.monotonic()
    outcome = run_program(answer, "", SHORT)
    assert not outcome.is_passed and "took more than 1 s" in outcome.reason
    assert time.monotonic() - started_s < 30


def test_ten_gigabytes_are_not_to_be_had() -> None:
    assert run_program("x = bytearray(10 << 30)", "", SHORT).reason == "MemoryError"


def test_a_gigabyte_of_output_is_cut_and_the_program_ended() -> None:
    outcome = run_program("for _ in range(1000):\n    print('x' * 1_000_000)", "", SHORT)
    assert not outcome.is_passed and "printed more than 1 MiB" in outcome.reason
    assert len(outcome.output) < 1000


@needs_process_guard
@pytest.mark.parametrize(
    "answer",
    [
        "import os\nwhile True:\n    os.fork()",
        "import subprocess\nsubprocess.run(['true'])",
        "import os\nos.execv('/bin/true', ['true'])",
        "import os\nos.kill(os.getppid(), 9)",
        "import os\nos.kill(-1, 9)",
        "import os\nos.killpg(0, 9)",
    ],
)
def test_no_process_is_begun_or_signalled(answer: str) -> None:
    outcome = run_program(answer, "", SHORT)
    assert not outcome.is_passed and "PermissionError" in outcome.reason


def test_threads_are_allowed() -> None:
    threads = "import threading\nt = threading.Thread(target=print, args=(7,))\nt.start()\nt.join()"
    assert run_program(threads, "", SHORT).output == "7"


@needs_network_guard
def test_no_server_is_reached() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port, arrived = server.getsockname()[1], threading.Event()

        def accept() -> None:
            try:
                server.accept()[0].close()
                arrived.set()
            except OSError:
                pass

        server.settimeout(3)
        listening = threading.Thread(target=accept)
        listening.start()
        outcome = run_program(f"import socket\nsocket.create_connection(('127.0.0.1', {port}), 1)", "", SHORT)
        listening.join()
    assert not outcome.is_passed and not arrived.is_set()


@needs_file_guard
def test_files_are_written_in_the_working_folder_alone(tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.write_text("kept")
    for attempt in (f"open({str(tmp_path / 'new')!r}, 'w')", f"open({str(mine)!r}, 'w')"):
        assert not run_program(attempt, "", SHORT).is_passed
    assert not run_program(f"import os\nos.remove({str(mine)!r})", "", SHORT).is_passed
    assert [path.name for path in tmp_path.iterdir()] == ["mine"] and mine.read_text() == "kept"
    assert run_program("open('here', 'w').write('x')", "assert open('here').read() == 'x'", SHORT).is_passed


def test_files_stay_small_and_nothing_is_left_of_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    outcome = run_program(f"with open('big', 'wb') as f:\n    f.write(bytes({FILE_BYTES} + 1))", "", SHORT)
    assert not outcome.is_passed
    assert list(tmp_path.iterdir()) == []


def test_the_environment_is_not_to_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_OF_THE_PARENT", "tops")
    shown = "import os\nprint(dict(os.environ))"
    assert "SECRET" not in run_program(shown, "", SHORT).output


@needs_file_guard
@pytest.mark.skipif(not Path("/proc/self/uid_map").is_file(), reason="needs user namespaces")
def test_other_processes_are_not_to_be_seen() -> None:
    outcome = run_program(f"print(open('/proc/{os.getpid()}/environ').read())", "", SHORT)
    if not outcome.is_passed:
        assert "No such file" in outcome.reason or "Permission" in outcome.reason
    else:
        pytest.skip("this machine has no user namespaces, so /proc is the machine's own")


def test_what_is_missing_is_named() -> None:
    assert Guards(True, False, False).missing == ("processes", "files")


def test_the_filter_is_one_of_this_architecture_alone() -> None:
    assert syscall_filter(1, "riscv64") == ()
    assert syscall_filter(7, "x86_64") != syscall_filter(8, "x86_64") != syscall_filter(8, "aarch64")
    for machine in ("x86_64", "aarch64"):
        for place, (code, jump, other, _) in enumerate(program := syscall_filter(7, machine)):
            if code & 7 == 5:  # jumps stay in the program
                assert place + 1 + max(jump, other) < len(program)
    if platform.machine() in ("x86_64", "aarch64"):
        assert HELD.processes or not HELD.network

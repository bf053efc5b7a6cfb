"""Options of the server itself, as they arrive, and keys from the command line."""

import ipaddress
import socket
from pathlib import Path
from typing import Any

import pytest

from quantpipe import cli
from quantpipe.serve.admission.limits import Limits
from quantpipe.serve.engine_process.watch import WatchLimits
from quantpipe.serve.front_options import FrontOptions
from quantpipe.serve.keys import digest_of, read_keys


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[FrontOptions]:
    """What the server was given each time."""
    seen: list[FrontOptions] = []
    monkeypatch.setattr("quantpipe.serve.server.run_server", lambda *arguments: seen.append(arguments[-1]))
    return seen


def serve(*options: object) -> int:
    return cli.run(["serve", "nowhere", "--skip-verify", *map(str, options)])


def test_defaults_are_those_of_the_server(served: list[FrontOptions]) -> None:
    assert serve() == 0
    assert served == [FrontOptions(log_format="text")]


def test_options_reach_the_server(served: list[FrontOptions], tmp_path: Path) -> None:
    keys = tmp_path / "keys.yaml"
    keys.write_text(f"alice: {digest_of('s')}\n")
    limits = ["--max-open-prompts", 3, "--max-open-tokens", 4, "--max-prompt-tokens", 5, "--max-body-bytes", 6]
    assert serve(*limits, "--slow-client-s", 0.5, "--api-keys", keys, "--open-metrics", "--log-format", "json") == 0
    assert served[0].limits == Limits(3, 4, 5, 6, 0.5)
    assert served[0].keys == read_keys(keys)
    assert (served[0].are_metrics_open, served[0].log_format) == (True, "json")
    assert serve("--log-format", "none", "--stalled-s", 1, "--hung-s", 2, "--load-s", 3) == 0
    assert (served[1].log_format, served[1].watch) == (None, WatchLimits(1, 2, 3))


@pytest.mark.parametrize(
    ("options", "code", "line"),
    [
        (["--max-open-prompts", "0"], 2, "quantpipe serve: Invalid value for '--max-open-prompts'"),
        (["--slow-client-s", "0"], 2, "quantpipe serve: Invalid value for '--slow-client-s'"),
        *[
            ([option, "nan"], 2, f"quantpipe serve: Invalid value for '{option}': 'nan' is no number")
            for option in ("--slow-client-s", "--drain-s", "--stalled-s", "--hung-s", "--load-s")
        ],
        (["--load-s", "0"], 2, "quantpipe serve: Invalid value for '--load-s'"),
        (["--log-format", "xml"], 2, "quantpipe serve: Invalid value for '--log-format'"),
        (["--api-keys", "no-such-file"], 3, "no-such-file: cannot be read: No such file or directory"),
        (["--ssl-keyfile", "k.pem"], 3, "--ssl-keyfile: there is no --ssl-certfile"),
        (["--ssl-certfile", "c.pem"], 3, "--ssl-certfile: c.pem: no such file"),
        (["--ssl-certfile", __file__], 3, "cannot be used"),
    ],
)
def test_mistakes_are_one_line(
    options: list[str], code: int, line: str, served: list[FrontOptions], capsys: pytest.CaptureFixture[str]
) -> None:
    assert serve(*options) == code
    out, err = capsys.readouterr()
    assert (out, err.count("\n"), served) == ("", 1, [])
    assert line in err


def test_key_is_made_and_shown_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["serve-key", "alice"]) == 0
    secret, line = capsys.readouterr().out.splitlines()
    assert line == f"alice: {digest_of(secret)}"
    path = tmp_path / "keys.yaml"
    assert cli.run(["serve-key", "bob", "--api-keys", str(path)]) == 0
    out, err = capsys.readouterr()
    assert digest_of(out.strip()) in path.read_text()
    assert "which is kept nowhere" in err
    assert cli.run(["serve-key", "bob", "--api-keys", str(path)]) == 3
    assert "'bob' is there already" in capsys.readouterr().err
    assert cli.run(["serve-key", "a b"]) == 3
    assert "'a b' is no name" in capsys.readouterr().err


@pytest.mark.parametrize(("host", "keys", "warns"), [("127.0.0.1", None, 0), ("0.0.0.0", None, 1), ("0.0.0.0", (), 0)])
def test_warning_where_others_can_reach_a_server_without_keys(host: str, keys: Any, warns: bool) -> None:
    with socket.create_server((host, 0)) as listener:
        warning = FrontOptions(keys=keys).exposure_warning(listener)
    assert (warning is not None) == warns
    assert warning is None or (str(ipaddress.ip_address(host)) in warning and "--api-keys" in warning)

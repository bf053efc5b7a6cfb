"""Two artifacts on the command line: what reaches the server, and what is refused in one line."""

from pathlib import Path
from typing import Any

import pytest

from quantpipe import cli
from quantpipe.serve.arms.split import Split
from quantpipe.serve.shadow.options import ShadowOptions


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What the server was given each time."""
    seen: list[tuple[Any, ...]] = []
    monkeypatch.setattr("quantpipe.serve.server.run_server", lambda *arguments: seen.append(arguments))
    return seen


def serve(*arguments: str) -> int:
    return cli.run(["serve", *arguments])


def test_one_artifact_has_neither_split_nor_shadow(served: list[tuple[Any, ...]]) -> None:
    assert serve("x") == 0
    assert served[0][0] == (Path("x"),)
    assert (served[0][-1].split, served[0][-1].shadow) == (None, None)


def test_two_artifacts_are_split_or_one_is_a_shadow(served: list[tuple[Any, ...]]) -> None:
    assert serve("x", "y", "--split", "90:10") == 0
    assert served[0][0] == (Path("x"), Path("y"))
    assert (served[0][-1].split, served[0][-1].shadow) == (Split((90, 10)), None)
    assert serve("x", "y", "--split", "1:3", "--split-seed", "7") == 0
    assert served[1][-1].split == Split((1, 3), 7)
    assert serve("x", "y", "--shadow") == 0
    assert (served[2][-1].split, served[2][-1].shadow) == (None, ShadowOptions(1.0, 16, 0))
    options = ["--shadow-share", "0.1", "--shadow-max-open", "4", "--split-seed", "7"]
    assert serve("x", "y", "--shadow", *options) == 0
    assert served[3][-1].shadow == ShadowOptions(0.1, 4, 7)


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ([], "Missing argument 'ARTIFACT"),
        (["x", "y"], "two artifacts need either --split, such as 90:10, or --shadow; neither was given"),
        (
            ["x", "y", "--split", "1:1", "--shadow"],
            "two artifacts need either --split, such as 90:10, or --shadow; both",
        ),
        (["x", "y", "z", "--split", "1:1"], "3 artifacts were given"),
        (["x", "--split", "90:10"], "--split is for two artifacts, and one was given"),
        (["x", "--shadow"], "--shadow is for two artifacts"),
        (["x", "--shadow-share", "0.5"], "--shadow-share is for two artifacts"),
        (["x", "--split-seed", "0"], "--split-seed is for two artifacts"),
        (["x", "y", "--split", "1:1", "--shadow-share", "0.5"], "--shadow-share is for --shadow"),
        (["x", "y", "--split", "1:1", "--shadow-max-open", "5"], "--shadow-max-open is for --shadow"),
        (["x", "y", "--shadow", "--shadow-share", "0"], "Invalid value for '--shadow-share'"),
        (["x", "y", "--shadow", "--shadow-share", "nan"], "Invalid value for '--shadow-share'"),
        (["x", "y", "--split", "90"], "--split: '90' has 1 weights"),
        (["x", "y", "--split", "0:0"], "--split: '0:0': weights are numbers from 0 on, and not all of them 0"),
        (["x", "y", "--split", "-1:2"], "--split: '-1:2'"),
        (["x", "y", "--split", "a:b"], "--split: 'a:b' is not made of numbers"),
        (["x", "y", "--split", "90:10:5"], "--split: '90:10:5' has 3 weights"),
        (["x", "y", "--split", "nan:1"], "--split: 'nan:1'"),
    ],
)
def test_mistakes_are_one_line(
    arguments: list[str], line: str, served: list[tuple[Any, ...]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert serve(*arguments) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n"), served) == ("", 1, [])
    assert line in err

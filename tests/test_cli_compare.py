"""``quantpipe compare``: what it prints, what it refuses, and that it needs no torch."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from reports import a_report, a_result

from quantpipe import cli
from quantpipe.releases.archive import add_release
from quantpipe.reporting.writing import write_report


@pytest.fixture
def folders(tmp_path: Path) -> Path:
    for name, kl in (("one", 0.0311), ("two", 0.049)):
        report = a_report(a_result(kl), recipe_name=name)
        write_report(tmp_path / name, report)
        add_release(tmp_path / "archive", report, tmp_path / name)
    return tmp_path


def test_folders_are_compared_in_markdown(folders: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["compare", str(folders / "one"), str(folders / "two")]) == 0
    shown = capsys.readouterr()
    assert "Worse, two beside one: mean_kl." in shown.out or "regression" in shown.out
    assert "| mean_kl | 0.0311 (0.0278 .. 0.0344) | 0.049 (0.0457 .. 0.0523) | worse |" in shown.out
    assert shown.err == ""


def test_names_of_the_archive_are_compared_as_json_and_html(folders: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = folders / "page.html"
    options = ["--archive", str(folders / "archive"), "--json", "--html", str(page)]
    assert cli.run(["compare", "one", "two", *options]) == 0
    record = json.loads(capsys.readouterr().out)
    assert [each["verdict"] for each in record["releases"]] == ["UNSURE", "UNSURE"]
    assert "<svg" in page.read_text()


def test_a_trend_is_printed_and_drawn(folders: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["compare", "--trend", str(folders / "archive")]) == 0
    out = capsys.readouterr().out
    assert "-one-" in out and "-two-" in out
    assert f"plots: {folders / 'archive' / 'trend.html'}" in out
    assert "<svg" in (folders / "archive" / "trend.html").read_text()


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["compare"], 2, "give two releases or more"),
        (["compare", "one"], 2, "1 given"),
        (["compare", "--trend", "a", "b"], 2, "takes one archive"),
        (["compare", "--trend", "gone"], 3, "give the folder of an archive"),
        (["compare", "gone", "away", "--archive", "nowhere"], 3, "no such folder or file"),
    ],
)
def test_what_cannot_be_compared_is_one_line(
    arguments: list[str], code: int, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(arguments) == code
    shown = capsys.readouterr()
    assert shown.out == ""
    assert says in shown.err
    assert shown.err.count("\n") == 1


def test_comparing_imports_no_torch(folders: Path) -> None:
    code = (
        "import sys; from quantpipe import cli; "
        f"code = cli.run(['compare', {str(folders / 'one')!r}, {str(folders / 'two')!r}]); "
        "sys.exit(code or sum(name in sys.modules for name in ('torch', 'transformers', 'matplotlib')))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60, check=False).returncode == 0

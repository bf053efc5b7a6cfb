"""A release is found by its folder, by a file, or by a name in the archive."""

from pathlib import Path

import pytest
from reports import CONTEXT, a_report, a_result

from quantpipe.errors import DataError
from quantpipe.gate.record import write_gate_json
from quantpipe.releases.archive import add_release
from quantpipe.releases.opened import open_release, open_releases
from quantpipe.reporting.writing import write_report


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    for number in (1, 2):
        report = a_report(recipe_name="legal", date=f"2025-01-0{number}T03:04:05+00:00")
        write_report(tmp_path / "run", report)
        add_release(tmp_path / "archive", report, tmp_path / "run")
    return tmp_path / "archive"


def test_a_folder_and_its_files_open_the_same_report(archive: Path) -> None:
    folder = archive.parent / "run"
    opened = open_releases((str(folder), str(folder / "report.json")), archive)
    assert [each.name for each in opened] == ["run", "run (2)"]
    assert opened[0].report == opened[1].report


def test_a_folder_with_nothing_but_a_verdict_has_its_figures(tmp_path: Path) -> None:
    write_gate_json(tmp_path / "gate.json", a_result(), CONTEXT)
    for name in (tmp_path, tmp_path / "gate.json"):
        report = open_release(str(name), tmp_path).report
        assert [check.metric for check in report.checks] == ["mean_kl", "accuracy_loss_points"]
        assert report.data == {}


def test_a_recipes_name_stands_for_its_latest_release_and_an_id_may_be_cut_short(archive: Path) -> None:
    assert open_release("legal", archive).report.context.date.startswith("2025-01-02")
    assert open_release("20250101", archive).report.context.date.startswith("2025-01-01")


@pytest.mark.parametrize(
    ("name", "says"),
    [("2025010", "2 releases in .* begin so"), ("legl", "did you mean 'legal'"), ("nothing", "no such release")],
)
def test_names_that_mean_nothing_or_too_much_are_one_line(archive: Path, name: str, says: str) -> None:
    with pytest.raises(DataError, match=says) as error:
        open_release(name, archive)
    assert "\n" not in str(error.value)


def test_what_is_no_release_says_what_to_give(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"holds neither report\.json nor gate\.json"):
        open_release(str(tmp_path), tmp_path)
    with pytest.raises(DataError, match="give --archive"):
        open_release("gone", tmp_path)

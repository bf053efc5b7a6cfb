"""The index: one line for each release, whole or not there, whoever writes at the same time."""

import json
import multiprocessing
from pathlib import Path

import pytest
from reports import a_report

from quantpipe.errors import DataError
from quantpipe.releases.archive import INDEX_NAME, add_release, machine_digest, read_index
from quantpipe.reporting.json_form import read_json
from quantpipe.reporting.report import Report
from quantpipe.reporting.writing import write_report


def written(folder: Path, report: Report) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    write_report(folder, report)
    return folder


def add(archive: Path, number: int) -> None:
    report = a_report(date=f"2025-01-02T03:04:{number:02}+00:00")
    add_release(archive, report, written(archive.parent / f"run-{number}", report))


def test_a_release_is_kept_with_its_report_and_outlives_its_output(tmp_path: Path) -> None:
    report = a_report()
    output = written(tmp_path / "run", report)
    release = add_release(tmp_path / "archive", report, output)
    for path in output.iterdir():
        path.unlink()
    [found], problems = read_index(tmp_path / "archive")
    assert problems == ()
    assert found == release
    assert (found.recipe, found.verdict, found.output) == ("legal | <v2>", "UNSURE", "../run")
    assert found.figures["mean_kl"] == (0.0311, 0.0311 - 0.0033, 0.0311 + 0.0033)
    assert found.figures["p99_kl"] == (0.4321, None, None)
    assert read_json(tmp_path / "archive" / found.folder / "report.json").checks == report.checks


def test_a_line_that_was_cut_is_told_and_then_removed(tmp_path: Path) -> None:
    add(tmp_path / "archive", 1)
    index = tmp_path / "archive" / INDEX_NAME
    whole = index.read_text()
    index.write_text(whole + whole[: len(whole) // 2])
    releases, [problem] = read_index(tmp_path / "archive")
    assert len(releases) == 1
    assert problem.startswith(f"{index}:2: not a release")
    add(tmp_path / "archive", 2)
    releases, problems = read_index(tmp_path / "archive")
    assert ([each.date[17:19] for each in releases], problems) == (["01", "02"], ())


def test_a_line_that_lacks_only_its_end_is_kept(tmp_path: Path) -> None:
    add(tmp_path / "archive", 1)
    index = tmp_path / "archive" / INDEX_NAME
    index.write_text(index.read_text().rstrip("\n"))
    add(tmp_path / "archive", 2)
    assert len(read_index(tmp_path / "archive")[0]) == 2


def test_a_cut_first_line_is_removed(tmp_path: Path) -> None:
    (tmp_path / "archive").mkdir()
    (tmp_path / "archive" / INDEX_NAME).write_bytes('{"schema": "ä'.encode()[:-1])
    add(tmp_path / "archive", 1)
    assert len(read_index(tmp_path / "archive")[0]) == 1


def test_what_other_programs_wrote_between_is_told_and_left(tmp_path: Path) -> None:
    add(tmp_path / "archive", 1)
    index = tmp_path / "archive" / INDEX_NAME
    record = json.loads(index.read_text())
    del record["machine"]
    index.write_text(f"{index.read_text()}[]\n{json.dumps(record)}\n")
    _, problems = read_index(tmp_path / "archive")
    assert len(problems) == 2
    assert "machine is missing" in problems[1]
    add(tmp_path / "archive", 2)
    assert "[]" in index.read_text()


def test_runs_at_the_same_time_lose_no_line(tmp_path: Path) -> None:
    archive = tmp_path / "archive"
    archive.mkdir()
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=add, args=(archive, number)) for number in range(8)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    releases, problems = read_index(archive)
    assert problems == ()
    assert {each.date[17:19] for each in releases} == {f"{number:02}" for number in range(8)}


def test_an_archive_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    report = a_report()
    output = written(tmp_path / "run", report)
    with pytest.raises(DataError, match=r"the verdict in .* stands; set `archive`"):
        add_release(tmp_path / "file" / "archive", report, output)
    with pytest.raises(DataError, match="give the folder of an archive"):
        read_index(tmp_path)


def test_machines_are_told_apart_but_not_by_their_kernel() -> None:
    machine = {"cpu": "A", "cores": 2, "system": "Linux 6.1"}
    assert machine_digest(machine) == machine_digest(machine | {"system": "Linux 6.2"})
    assert machine_digest(machine) != machine_digest(machine | {"cores": 4})

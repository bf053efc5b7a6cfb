"""Samples of whole sources: read, filtered, mapped, and everything left out counted."""

from pathlib import Path
from typing import Any

from quantpipe.calibration.definition.sources import FileSource, PythonStdlibSource
from quantpipe.calibration.rows import RowProblems, Sample, SourceReading
from quantpipe.calibration.samples.sample_stream import read_samples


def read(folder: Path, stored: str, **keys: Any) -> tuple[list[Sample], RowProblems, SourceReading]:
    (folder / "rows.csv").write_text(stored, encoding="utf-8")
    problems, seen = RowProblems(), SourceReading()
    source = FileSource.model_validate({"path": "rows.csv", **keys})
    return list(read_samples(source, 3, folder, problems, seen)), problems, seen


def test_every_row_is_a_sample_or_counted_under_a_reason(tmp_path: Path) -> None:
    stored = "text,lang\nhello there,en\nhi,en\n,en\n\nbonjour,fr\na,b,c\n"
    rules = {"min_chars": 3, "where": {"lang": "en"}}
    samples, problems, seen = read(tmp_path, stored, filter=rules)
    assert [(sample.content, sample.source) for sample in samples] == [("hello there", 3)]
    assert seen.dropped == {"filtered": 2, "empty": 1, "field is empty": 1, "wrong number of columns": 1}
    assert seen.num_rows == 5
    assert problems.num_rows == 2


def test_a_question_in_one_column_and_its_answer_in_others(tmp_path: Path) -> None:
    fields = {"prompt": ["title", "body"], "response": "answer"}
    samples, _, _ = read(tmp_path, "title,body,answer\nT,B,A\n", fields=fields)
    assert samples[0].content == ({"role": "user", "content": "T\n\nB"}, {"role": "assistant", "content": "A"})


def test_dropped_columns_leave_and_must_be_there(tmp_path: Path) -> None:
    samples, _, _ = read(tmp_path, "text,phone\na,1\n", drop_columns=["phone"])
    assert [sample.content for sample in samples] == ["a"]


def test_limit_is_met_exactly_by_other_kinds_too(tmp_path: Path) -> None:
    seen = SourceReading()
    source = PythonStdlibSource(kind="python_stdlib", content="topics", limit=3)
    samples = list(read_samples(source, 1, tmp_path, RowProblems(), seen))
    assert [(sample.source, sample.domain) for sample in samples] == [(1, "topics")] * 3
    assert seen.num_rows == 3

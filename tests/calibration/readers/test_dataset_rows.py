"""Rows of data sets through the ``datasets`` library, from a folder that stands for the hub."""

from pathlib import Path
from typing import Any

import pytest

from quantpipe.calibration.definition.sources import DatasetSource
from quantpipe.calibration.readers import read_rows
from quantpipe.calibration.rows import Row, RowProblems, SourceReading
from quantpipe.errors import DataError


@pytest.fixture
def dataset(tmp_path: Path) -> str:
    folder = tmp_path / "owner" / "tickets"
    folder.mkdir(parents=True)
    (folder / "train.jsonl").write_text("".join(f'{{"body": "row {i}", "id": {i}}}\n' for i in range(500)))
    (folder / "test.jsonl").write_text('{"body": "held out", "id": 0}\n')
    return str(folder)


def read(tmp_path: Path, dataset: str, **keys: Any) -> tuple[list[Row], SourceReading]:
    seen = SourceReading()
    source = DatasetSource.model_validate({"dataset": dataset, "fields": {"text": "body"}, **keys})
    return list(read_rows(source, tmp_path, RowProblems(), seen, tmp_path / "work")), seen


def test_a_split_is_streamed_with_numbered_rows_and_leaves_no_cache(tmp_path: Path, dataset: str) -> None:
    (tmp_path / "work").mkdir()
    rows, seen = read(tmp_path, dataset, limit=20)
    assert [row.where for row in rows[:2]] == [f"{dataset}[train]:1", f"{dataset}[train]:2"]
    assert rows[19].values["body"] == "row 19"
    assert (len(rows), seen.num_rows, seen.is_limited) == (20, 20, True)
    assert [row.values["body"] for row in read(tmp_path, dataset, split="test")[0]] == ["held out"]
    assert list((tmp_path / "work").iterdir()) == []


def test_what_cannot_be_opened_is_one_line(tmp_path: Path, dataset: str) -> None:
    (tmp_path / "work").mkdir()
    for keys in ({"split": "dev"}, {"config": "other"}, {"dataset": f"{dataset}-none"}):
        with pytest.raises(DataError) as caught:
            read(tmp_path, **{"dataset": dataset, **keys})
        assert "correct dataset, config, split or revision" in str(caught.value)
        assert "\n" not in str(caught.value)


def test_a_column_that_is_not_there_is_named_with_those_that_are(tmp_path: Path, dataset: str) -> None:
    (tmp_path / "work").mkdir()
    with pytest.raises(DataError, match=r"no column 'bodi'; there are: body, id; did you mean 'body'\?"):
        read(tmp_path, dataset, fields={"text": "bodi"})

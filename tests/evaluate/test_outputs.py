"""Saved answers: written and read back, scored again under changed scoring, refused where the questions changed."""

from pathlib import Path
from typing import Any

import pytest

from quantpipe.errors import DataError
from quantpipe.evaluate.outputs import read_outputs, rescore, write_outputs
from quantpipe.evaluate.suite import Suite, load_suite, run_suite
from tests.evaluate.conftest import CharCodec
from tests.evaluate.test_short_run import CHOICE, EXACT, ROWS, knowing_engine
from tests.evaluate.test_short_task import write_suite


def suite_of(folder: Path, *tasks: dict[str, Any], rows: str = ROWS) -> Suite:
    return load_suite(write_suite(folder, *tasks, rows=rows))


@pytest.fixture
def saved(tmp_path: Path, codec: CharCodec) -> Path:
    suite, file = suite_of(tmp_path, CHOICE, EXACT), tmp_path / "out" / "outputs.jsonl"
    write_outputs(file, suite, "model-digest", run_suite(knowing_engine(), codec, suite))
    return file


def test_answers_come_back_as_they_were(tmp_path: Path, saved: Path, codec: CharCodec) -> None:
    suite = suite_of(tmp_path, CHOICE, EXACT)
    found = read_outputs(saved)
    assert found.result == run_suite(knowing_engine(), codec, suite)
    assert (found.model, set(found.asked)) == ("model-digest", {"letters", "says"})
    assert rescore(saved, suite) == found.result


def test_changed_targets_and_settings_of_scoring_need_no_model(tmp_path: Path, saved: Path) -> None:
    suite = suite_of(tmp_path, CHOICE, EXACT, rows=ROWS.replace("aa,xy", "aa,bc"))
    assert [item.score for item in rescore(saved, suite).items] == [1.0] * 6
    assert [item.score for item in read_outputs(saved).result.items] == [1, 0, 1, 1, 0, 1]
    assert rescore(saved, suite).suite_digest == suite.digest
    shouting = suite_of(tmp_path, EXACT, rows=ROWS.replace("bc", "BC"))
    assert [item.score for item in rescore(saved, shouting).items] == [0.0] * 3
    calm = suite_of(tmp_path, EXACT | {"disregard": ["case"]}, rows=ROWS.replace("bc", "BC"))
    assert [item.score for item in rescore(saved, calm).items] == [1.0, 0.0, 1.0]


@pytest.mark.parametrize(
    ("tasks", "message"),
    [
        ([CHOICE | {"prompt": "{{ q }}?"}], "task 'letters' was asked something else"),
        ([CHOICE | {"choices": ["xy", "bc"]}], "task 'letters' was asked something else"),
        ([EXACT | {"max_tokens": 9}], "task 'says' was asked something else"),
        ([EXACT | {"name": "new"}], "task 'new' was not asked"),
    ],
)
def test_other_questions_are_refused(tmp_path: Path, saved: Path, tasks: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(DataError, match=message):
        rescore(saved, suite_of(tmp_path, *tasks))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("quantpipe.outputs/1", "other/1", "schema is 'other/1'"),
        ('{"task": "says", "doc_id": "1"', "{", "not a model's saved answers"),
        ('"doc_id": "3"', '"doc_id": "4"', "item '3' of task 'letters' is missing"),
    ],
)
def test_damaged_files_are_refused(tmp_path: Path, saved: Path, old: str, new: str, message: str) -> None:
    text = saved.read_text()
    assert old in text
    saved.write_text(text.replace(old, new, 1))
    with pytest.raises(DataError, match=message) as raised:
        rescore(saved, suite_of(tmp_path, CHOICE, EXACT))
    assert "\n" not in str(raised.value)
    with pytest.raises(DataError, match="run the recipe first"):
        read_outputs(tmp_path / "absent.jsonl")


def test_lm_eval_tasks_are_scored_again_too(tmp_path: Path, codec: CharCodec) -> None:
    from tests.evaluate import test_suite

    (tmp_path / "suite.yaml").write_text(test_suite.SUITE_YAML)
    (tmp_path / "letters.yaml").write_text(test_suite.CHOICE_YAML)
    (tmp_path / "answers.yaml").write_text(test_suite.ANSWER_YAML)
    test_suite.write_items(tmp_path / "letters.jsonl", [test_suite.letter_item(number) for number in range(3)])
    items = [{"id": i, "domain": "d", "cluster": i, "question": "q", "accepted": [i]} for i in ("bcd", "other")]
    test_suite.write_items(tmp_path / "answers.jsonl", items)
    suite, file = load_suite(tmp_path), tmp_path / "outputs.jsonl"
    result = run_suite(test_suite.knowing_engine(), codec, suite)
    write_outputs(file, suite, "m", result)
    assert rescore(file, suite) == result
    assert [(item.prediction, item.slices) for item in result.items[2:4]] == [
        ("bc", {"domain": "abc"}),
        ("bcd!", {"domain": "d"}),
    ]
    assert result.items[0].margin is not None and result.items[0].margin > 0
    items[1]["accepted"] = ["bcd!"]
    test_suite.write_items(tmp_path / "answers.jsonl", items)
    assert [item.score for item in rescore(file, load_suite(tmp_path)).items[3:]] == [1.0, 1.0]

"""Suites from folder to paired loss, on models with known answers; and every way a suite can be wrong."""

import dataclasses
import json
import random
import re
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from quantpipe.errors import DataError
from quantpipe.evaluate.comparison import compare
from quantpipe.evaluate.items import SuiteResult
from quantpipe.evaluate.suite import load_suite, run_suite
from tests.evaluate.conftest import BigramEngine, CharCodec, random_table, speaking_table

CHOICE_YAML = """
task: letters
dataset_path: json
dataset_kwargs: {data_files: {test: letters.jsonl}}
test_split: test
output_type: multiple_choice
doc_to_text: prompt
doc_to_choice: choices
doc_to_target: label
target_delimiter: ""
metric_list:
  - {metric: acc, aggregation: mean, higher_is_better: true}
"""
ANSWER_YAML = """
task: answers
dataset_path: json
dataset_kwargs: {data_files: {test: answers.jsonl}}
test_split: test
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: accepted
generation_kwargs: {until: ["\\n"], max_gen_toks: 8}
metric_list:
  - {metric: exact_match, aggregation: mean, higher_is_better: true, ignore_case: true, ignore_punctuation: true}
"""
SUITE_YAML = """
version: 1
name: tiny
tasks:
  - {task: letters, metric: acc, num_items: 3}
  - {task: answers, metric: exact_match, num_items: 2}
"""


def letter_item(number: int, label: int = 0) -> dict[str, Any]:
    return {"id": f"l{number}", "domain": "abc", "cluster": f"c{number}", "prompt": "a", "choices": ["bc", "xy"]} | {
        "label": label
    }


def write_items(file: Path, items: Iterable[dict[str, Any]]) -> None:
    file.write_text("".join(json.dumps(item) + "\n" for item in items))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "suite.yaml").write_text(SUITE_YAML)
    (tmp_path / "letters.yaml").write_text(CHOICE_YAML)
    (tmp_path / "answers.yaml").write_text(ANSWER_YAML)
    write_items(tmp_path / "letters.jsonl", [letter_item(0), letter_item(1), letter_item(2, label=1)])
    answers = [("a0", "q", ["Bcd", "other"]), ("a1", "qq", ["never"])]
    items = [{"id": i, "domain": "speech", "cluster": i, "question": q, "accepted": a} for i, q, a in answers]
    write_items(tmp_path / "answers.jsonl", items)
    return tmp_path


def knowing_engine() -> BigramEngine:
    """Says "bcd!" after "q" and prefers "bc" to "xy" after "a"."""
    table_VV = speaking_table("qbcd!\n")
    table_VV[ord("a"), ord("b")] = -0.1
    return BigramEngine(table_VV)


def edit(file: Path, old: str, new: str) -> None:
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new, 1))


def test_items_are_scored_as_the_model_answers(folder: Path, codec: CharCodec) -> None:
    result = run_suite(knowing_engine(), codec, load_suite(folder))
    assert [(i.doc_id, i.correct) for i in result.items] == [
        ("l0", True),
        ("l1", True),
        ("l2", False),
        ("a0", True),  # "bcd!" is "Bcd" after normalisation
        ("a1", False),
    ]
    assert result.task_scores == {"letters": pytest.approx(2 / 3), "answers": 0.5}
    assert result.domain_scores == {"abc": pytest.approx(2 / 3), "speech": 0.5}
    assert result.items[3].response == "bcd!"
    likelihoods = result.items[0].response
    assert isinstance(likelihoods, tuple) and likelihoods[0] > likelihoods[1]


def test_a_run_prints_nothing_of_lm_eval_but_its_progress_is_heard(
    folder: Path, codec: CharCodec, capsys: pytest.CaptureFixture[str]
) -> None:
    import sys

    def progress(items: Iterable[Any], total: int, label: str) -> Iterator[Any]:
        yield from items
        print(f"{label}: {total}", file=sys.stderr)

    run_suite(knowing_engine(), codec, load_suite(folder), progress)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.splitlines() == ["choices scored: 2", "answers generated: 2"]


def test_a_run_leaves_the_callers_random_state_alone(folder: Path, codec: CharCodec) -> None:
    before = (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())
    run_suite(knowing_engine(), codec, load_suite(folder))
    assert (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()) == before


def test_changed_items_under_the_same_path_are_noticed(folder: Path, codec: CharCodec) -> None:
    first = load_suite(folder)
    before = run_suite(knowing_engine(), codec, first)
    write_items(folder / "letters.jsonl", [letter_item(0), letter_item(1, label=1), letter_item(2, label=1)])
    second = load_suite(folder)
    after = run_suite(knowing_engine(), codec, second)
    assert second.digest != first.digest
    assert [item.correct for item in after.items[:3]] == [True, False, False]
    with pytest.raises(DataError, match="the suite changed between the two runs"):
        compare(before, after)


def test_the_digest_does_not_depend_on_where_the_suite_lies(
    folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    copy = tmp_path_factory.mktemp("elsewhere") / "copy"
    shutil.copytree(folder, copy)
    assert load_suite(copy).digest == load_suite(folder).digest


def test_a_model_against_itself_loses_nothing(folder: Path, codec: CharCodec) -> None:
    suite = load_suite(folder)
    loss = compare(run_suite(knowing_engine(), codec, suite), run_suite(knowing_engine(), codec, suite)).loss()
    assert (loss.value, loss.num_samples) == (0.0, suite.num_items)
    assert loss.low < 0 < loss.high


def test_a_worse_model_loses_the_items_it_gets_wrong(folder: Path, codec: CharCodec) -> None:
    suite = load_suite(folder)
    base = run_suite(knowing_engine(), codec, suite)
    silent = run_suite(BigramEngine(speaking_table("q\n")), codec, suite)
    lost = sum(b.correct and not c.correct for b, c in zip(base.items, silent.items, strict=True))
    gained = sum(c.correct and not b.correct for b, c in zip(base.items, silent.items, strict=True))
    assert lost >= 1
    assert compare(base, silent).loss().value == pytest.approx(100 * (lost - gained) / 5)


def test_different_prompt_tokens_are_refused(folder: Path, codec: CharCodec) -> None:
    class Shifted(CharCodec):
        def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
            return [1, *super().encode(text)]

    suite = load_suite(folder)
    base, cand = run_suite(knowing_engine(), codec, suite), run_suite(knowing_engine(), Shifted(), suite)
    with pytest.raises(DataError, match="item letters/l0: the two models were given different prompt tokens"):
        compare(base, cand)


def test_missing_or_exchanged_items_are_refused(folder: Path, codec: CharCodec) -> None:
    result = run_suite(knowing_engine(), codec, load_suite(folder))
    shorter = dataclasses.replace(result, items=result.items[:-1])
    with pytest.raises(DataError, match="5 items of the baseline, 4 of the candidate"):
        compare(result, shorter)
    exchanged = SuiteResult(result.suite, result.suite_digest, (result.items[1], result.items[0], *result.items[2:]))
    with pytest.raises(DataError, match="item letters/l0 of the baseline is paired with letters/l1"):
        compare(result, exchanged)


def test_broken_logits_fail_instead_of_choosing_the_first_answer(folder: Path, codec: CharCodec) -> None:
    with pytest.raises(DataError, match="log-likelihood nan"):
        run_suite(BigramEngine(np.full_like(random_table(0), np.nan)), codec, load_suite(folder))


@pytest.mark.parametrize(
    ("file", "old", "new", "message"),
    [
        ("suite.yaml", "num_items: 3", "num_items: 4", "3 items, 4 declared"),
        (
            "suite.yaml",
            "num_items: 3",
            "num_itmes: 3",
            "suite.yaml:5:34: tasks[0]: unknown key 'num_itmes'; did you mean 'num_items'?",
        ),
        ("suite.yaml", "name: tiny", "naem: tiny", "suite.yaml:3:1: unknown key 'naem'; did you mean 'name'?"),
        ("suite.yaml", "version: 1", "version: 2", "suite.yaml:2:10: version: found 2 (a whole number); allowed: 1"),
        ("suite.yaml", "task: letters", "task: leters", "did you mean 'letters'?"),
        ("suite.yaml", "task: answers", "task: letters", "metric 'exact_match' is not in its metric_list"),
        ("suite.yaml", "metric: acc", "metric: f1", "tasks[0].metric: unknown metric 'f1'"),
        ("letters.yaml", "metric: acc", "metric: acurracy", "unknown metric 'acurracy'"),
        ("letters.yaml", "dataset_path: json", "dataset_path: squad", "needs local items"),
        ("letters.yaml", "doc_to_text: prompt", "doc_to_text: !function x.y", "!function"),
        ("letters.yaml", "test: letters.jsonl", "test: absent.jsonl", "absent.jsonl: cannot be read"),
        ("letters.jsonl", '"label": 0', '"label": 2', "item 'l0': the right answer 2 is not among its 2 choices"),
        ("letters.jsonl", '["bc", "xy"]', '["bc", "bc"]', "two or more different ones"),
        ("letters.jsonl", '"id": "l1"', '"id": "l0"', "item 'l0' is there 2 times"),
        ("letters.jsonl", '"id": "l1"', '"id": "a0"', "item 'a0' is there 2 times"),
        ("letters.jsonl", '"cluster": "c1", ', "", "letters.jsonl:2: 'cluster' is missing"),
        ("letters.jsonl", '{"id": "l2"', '"id": "l2"', "letters.jsonl:3: not JSON"),
        ("letters.yaml", "doc_to_target: label", "doc_to_target: lable", "did you mean 'label'?"),
        ("answers.yaml", "{{question}}", "{{question", "lm-eval cannot build it"),
        ("answers.jsonl", '["never"]', "[]", "item 'a1': no accepted answer"),
        ("answers.jsonl", '"question": "qq"', '"question": ""', "item 'a1': the prompt is empty"),
    ],
)
def test_what_is_wrong_in_a_suite_is_named(folder: Path, file: str, old: str, new: str, message: str) -> None:
    edit(folder / file, old, new)
    with pytest.raises(DataError, match=re.escape(message)) as raised:
        load_suite(folder)
    assert "\n" not in str(raised.value)


def test_an_empty_data_file_and_a_missing_suite_are_errors(folder: Path) -> None:
    (folder / "letters.jsonl").write_text("")
    with pytest.raises(DataError, match="0 items, 3 declared"):
        load_suite(folder)
    with pytest.raises(DataError, match=r"suite\.yaml: no such file"):
        load_suite(folder / "absent")

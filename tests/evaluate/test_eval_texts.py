"""Which texts of a suite and of a held-out text are compared with calibration rows."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quantpipe.calibration.checks.leakage import EvalText, LeakageIndex
from quantpipe.errors import DataError
from quantpipe.evaluate.eval_texts import eval_texts
from quantpipe.evaluate.suite import Suite, load_suite

ANSWER = "It sets the yeast free, which then slowly turns sugar into gas."
CHOICES = {"output_type": "multiple_choice", "doc_to_choice": "choices", "doc_to_target": "label"}
ANSWERS = {"output_type": "generate_until", "doc_to_target": "answers", "generation_kwargs": {"until": ["\n"]}}
ITEM = {"id": "i1", "domain": "bread", "cluster": "c"}


@pytest.fixture
def make_suite(tmp_path: Path) -> Callable[..., Suite]:
    """Write and load a suite of one task over the given items."""

    def make(kind: dict[str, Any], prompt: str, *items: dict[str, Any]) -> Suite:
        metric = "acc" if kind is CHOICES else "exact_match"
        task = {
            "task": "tiny",
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": {"test": "items.jsonl"}},
            "test_split": "test",
            "doc_to_text": prompt,
            "metric_list": [{"metric": metric}],
            **kind,
        }
        suite = {"version": 1, "name": "tiny", "tasks": [{"task": "tiny", "metric": metric, "num_items": len(items)}]}
        (tmp_path / "tiny.yaml").write_text(json.dumps(task))
        (tmp_path / "suite.yaml").write_text(json.dumps(suite))
        (tmp_path / "items.jsonl").write_text("".join(json.dumps(item) + "\n" for item in items))
        return load_suite(tmp_path)

    return make


def test_question_alone_and_with_its_right_answer(make_suite: Callable[..., Suite], tmp_path: Path) -> None:
    first = {**ITEM, "prompt": "The capital of France is", "choices": [" Paris", " Rome"], "label": 0}
    second = {**first, "id": "i2", "prompt": "The capital of Italy is", "label": 1}
    assert eval_texts(make_suite(CHOICES, "prompt", first, second), None) == [
        EvalText(str(tmp_path), "items.jsonl:1", "The capital of France is"),
        EvalText(str(tmp_path), "items.jsonl:1", "The capital of France is  Paris"),
        EvalText(str(tmp_path), "items.jsonl:2", "The capital of Italy is"),
        EvalText(str(tmp_path), "items.jsonl:2", "The capital of Italy is  Rome"),
    ]


def test_long_answer_counts_without_its_question_too(make_suite: Callable[..., Suite]) -> None:
    item = {**ITEM, "question": "What does kneading do?", "answers": ["Nothing", ANSWER]}
    texts = [each.text for each in eval_texts(make_suite(ANSWERS, "{{question}}", item), None)]
    question = "What does kneading do?"
    assert texts == [question, f"{question} Nothing", f"{question} {ANSWER}", ANSWER]


def test_fixed_parts_of_a_prompt_are_left_out(make_suite: Callable[..., Suite]) -> None:
    prompt = (
        "{% if domain == 'bread' %}Q: Which bird is a symbol of peace? A: Dove{% endif %} {{context}} Q: {{question}}"
    )
    item = {**ITEM, "context": "Bread rises.", "question": "Why does it?", "answers": ["Gas"], "note": "never asked"}
    texts = [each.text for each in eval_texts(make_suite(ANSWERS, prompt, item), None)]
    assert texts == ["Bread rises.", "Why does it?", "Bread rises. Why does it? Gas"]


def test_group_of_an_item_is_kept(make_suite: Callable[..., Suite]) -> None:
    item = {**ITEM, "question": "Why?", "answers": ["Gas"], "group": 17}
    texts = eval_texts(make_suite(ANSWERS, "{{question}}", item), None)
    assert {each.group for each in texts} == {"17"}
    leak = LeakageIndex(texts).find("another text of the same customer", "17")
    assert leak is not None
    assert leak.kind == "group"


def words_from(start: int, stop: int) -> str:
    return " ".join(f"w{i}" for i in range(start, stop))


def test_any_copied_run_of_24_words_of_a_held_out_text_is_found(tmp_path: Path) -> None:
    file = tmp_path / "story.txt"
    file.write_text("\n".join(words_from(i, i + 10) for i in range(0, 200, 10)))
    index = LeakageIndex(eval_texts(None, file))
    for start in range(200 - 24):
        leak = index.find(f"{words_from(500, 600)} {words_from(start, start + 24)} {words_from(600, 700)}")
        assert leak is not None, start
        assert leak.row.startswith("story.txt:")
    assert index.find(words_from(500, 600)) is None


def test_rows_of_a_held_out_folder_are_file_and_line(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_text("Title\n\nOne paragraph of nine words stands in this line.\n")
    (tmp_path / "a.txt").write_text("x y z\n")
    texts = eval_texts(None, tmp_path)
    assert [(each.row, each.text) for each in texts] == [
        ("b.txt:3", "One paragraph of nine words stands in this line."),
        ("b.txt:1", "title one paragraph of nine words stands in this line"),
    ]


def test_headings_and_empty_texts_are_no_evidence(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("= Plot =\n\n\n")
    (tmp_path / "b.txt").write_text("")
    assert eval_texts(None, tmp_path) == []
    assert eval_texts(None, None) == []


def test_held_out_text_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"none\.txt: not a text file"):
        eval_texts(None, tmp_path / "none.txt")


def test_shipped_suite_gives_texts_of_every_item() -> None:
    folder = Path(__file__).parents[2] / "evals" / "quickstart"
    suite = load_suite(folder)
    texts = eval_texts(suite, folder / "held_out")
    assert len({each.row for each in texts if each.set == str(folder)}) == suite.num_items
    assert len({each.row.split(":")[0] for each in texts if each.set != str(folder)}) == 14


def test_short_form_gives_questions_with_each_accepted_answer_and_examples(tmp_path: Path) -> None:
    rows = [{"id": i, "q": f"Question {i}?", "target": [f"yes {i}", f"sure {i}"], "who": "c"} for i in range(3)]
    (tmp_path / "q.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    file = tmp_path / "s.yaml"
    file.write_text(
        "version: 1\nname: s\ntasks:\n  - {name: t, kind: exact, file: q.jsonl, prompt: '{{ q }}', cluster: who,\n"
        "     few_shot: {num: 1, seed: 0}}\n"
    )
    texts = eval_texts(load_suite(file), None)
    found = {text.text for text in texts}
    assert {text for i in range(3) for text in (f"Question {i}? yes {i}",)} <= found
    assert sum("sure" in text for text in found) == 2  # an example shows its first answer alone
    assert {text.group for text in texts if text.row.startswith("q.jsonl")} == {"c"}
    assert {text.set for text in texts} == {str(file)}

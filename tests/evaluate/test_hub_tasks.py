"""lm-eval's own tasks by name: refused quickly where the hub is out of reach, and asked like any other where not."""

import re
import time
from pathlib import Path

import pytest
from lm_eval.tasks import TaskManager

from quantpipe.errors import DataError
from quantpipe.evaluate.hub_tasks import read_own_task
from quantpipe.evaluate.lm_run import rescore_lm_task, run_lm_tasks
from quantpipe.evaluate.suite import load_suite
from quantpipe.evaluate.suite_file import OwnTask
from tests.evaluate.conftest import CharCodec
from tests.evaluate.test_suite import ANSWER_YAML, CHOICE_YAML, knowing_engine, letter_item, write_items

SUITE = "version: 1\nname: s\ntasks:\n  - {{lm_eval: {name}, metric: acc}}\n"


@pytest.fixture
def manager(tmp_path: Path) -> TaskManager:
    """Knows tasks whose data lie on the disk, with absolute paths."""
    write_items(tmp_path / "letters.jsonl", [letter_item(number, label=number % 2) for number in range(5)])
    for yaml, name in ((CHOICE_YAML, "letters"), (ANSWER_YAML, "answers")):
        text = yaml.replace("answers.jsonl", "letters.jsonl").replace("letters.jsonl", str(tmp_path / "letters.jsonl"))
        (tmp_path / f"{name}.yaml").write_text(text)
    validation = (tmp_path / "letters.yaml").read_text().replace("test_split: test", "validation_split: test")
    (tmp_path / "unlabelled.yaml").write_text(validation.replace("task: letters", "task: unlabelled"))
    (tmp_path / "group.yaml").write_text("group: both\ntask: [letters, answers]\n")
    return TaskManager(include_path=str(tmp_path), include_defaults=False)


def read(manager: TaskManager, **keys: object) -> object:
    entry = OwnTask.model_validate({"lm_eval": "letters", "metric": "acc", **keys})
    return read_own_task(entry, "s.yaml:4:14", manager, needs_hub=False)


def test_a_task_is_asked_and_scored(manager: TaskManager, codec: CharCodec) -> None:
    task = read(manager, num_items=3, seed=1)
    results = run_lm_tasks(knowing_engine(), codec, [task])["letters"]  # type: ignore[list-item]
    assert [item.doc_id for item in results] == [str(place) for place in task.places]  # type: ignore[attr-defined]
    assert [item.score for item in results] == [float(int(item.doc_id) % 2 == 0) for item in results]
    assert {item.prediction for item in results} == {"bc"}
    assert len({item.cluster for item in results}) == 3 and all(item.margin is not None for item in results)
    assert rescore_lm_task(task, results) == results  # type: ignore[arg-type]
    assert run_lm_tasks(knowing_engine(), codec, [task])["letters"] == results  # type: ignore[list-item]


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"lm_eval": "leters"}, "lm-eval has no task 'leters'; did you mean 'letters'?"),
        ({"lm_eval": "both"}, "'both' is a group; name its tasks one by one"),
        ({"lm_eval": "unlabelled"}, "'unlabelled' has no test split; set split: validation"),
        ({"split": "validation"}, "'letters' has no validation split; set split: test"),
        ({"metric": "exact_match"}, "'letters' has no metric 'exact_match' (it has: acc)"),
        ({"num_items": 6}, "6 items, and its test split has 5"),
    ],
)
def test_what_cannot_be_asked_is_named(manager: TaskManager, keys: dict[str, object], message: str) -> None:
    with pytest.raises(DataError, match=re.escape(f"s.yaml:4:14: {message}")):
        read(manager, **keys)


def test_a_hub_out_of_reach_is_said_in_one_line_and_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    file = tmp_path / "s.yaml"
    file.write_text(SUITE.format(name="arc_easy"))
    started_s = time.monotonic()
    with pytest.raises(
        DataError, match=r"s\.yaml:4:15: tasks\[0\]\.lm_eval: .* the hub, which is out of reach"
    ) as raised:
        load_suite(file)
    assert "\n" not in str(raised.value) and time.monotonic() - started_s < 60
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(DataError, match="HF_HUB_OFFLINE forbids asking it; run online, or put the items into a file"):
        load_suite(file)
    file.write_text(SUITE.format(name="arc_esay"))
    with pytest.raises(DataError, match="lm-eval has no task 'arc_esay'; did you mean 'arc_easy'"):
        load_suite(file)

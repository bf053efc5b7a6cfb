"""Tasks of the short form, from file to items; and all that can be wrong with one, before any model is loaded."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from quantpipe.errors import DataError
from quantpipe.evaluate.short_task import ShortTask
from quantpipe.evaluate.suite import load_suite

ROWS = (
    "ticket_id,text,intent,lang,customer_id\n"
    "t1,Where is my invoice?,billing,en,c1\n"
    "t2,Das Paket fehlt,delivery,de,c2\n"
    "t3,The parcel is late,delivery,en,c2\n"
    't4,"Hello, you",other,,c3\n'
)
TASK: dict[str, Any] = {
    "name": "intent",
    "kind": "choice",
    "file": "intents.csv",
    "map": {"id": "ticket_id", "target": "intent", "language": "lang"},
    "prompt": "Classify: {{ text }}\nIntent:",
    "choices": ["billing", "delivery", "other"],
    "slices": ["language"],
    "cluster": "customer_id",
}


def write_suite(folder: Path, *tasks: dict[str, Any], rows: str = ROWS) -> Path:
    (folder / "intents.csv").write_text(rows, encoding="utf-8")
    file = folder / "support.yaml"
    own = json.loads(json.dumps(tasks))  # what tasks share would be written as aliases
    file.write_text(yaml.safe_dump({"version": 1, "name": "support", "tasks": own}, sort_keys=False))
    return file


def task_of(folder: Path, rows: str = ROWS, **changed: Any) -> ShortTask:
    keys = {key: value for key, value in (TASK | changed).items() if value is not None}
    [task] = load_suite(write_suite(folder, keys, rows=rows)).tasks
    assert isinstance(task, ShortTask)
    return task


def test_rows_become_items_by_the_mapping(tmp_path: Path) -> None:
    task = task_of(tmp_path)
    assert [(i.id, i.target, i.cluster, i.slices["language"]) for i in task.items] == [
        ("t1", "billing", "c1", "en"),
        ("t2", "delivery", "c2", "de"),
        ("t3", "delivery", "c2", "en"),
        ("t4", "other", "c3", "(none)"),
    ]
    assert task.items[3].prompt == "Classify: Hello, you\nIntent:"
    assert task.items[1].where == f"{tmp_path / 'intents.csv'}:3"
    assert {item.domain for item in task.items} == {"intent"}
    assert [item.cluster for item in task_of(tmp_path, cluster=None).items] == ["t1", "t2", "t3", "t4"]
    assert task_of(tmp_path, map={**TASK["map"], "domain": "lang"}).items[1].domain == "de"


@pytest.mark.parametrize("form", ["tsv", "jsonl", "json", "parquet"])
def test_every_format_gives_the_same_items(tmp_path: Path, form: str) -> None:
    lines = [line.split(",") for line in ROWS.replace('"Hello, you"', "Hello").splitlines()]
    objects = [dict(zip(lines[0], values, strict=True)) for values in lines[1:]]
    file = tmp_path / f"intents.{form}"
    if form == "tsv":
        file.write_text("".join("\t".join(values) + "\n" for values in lines))
    elif form == "parquet":
        import pyarrow
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(objects), file)
    else:
        texts = [json.dumps(each) for each in objects]
        file.write_text(f"[{', '.join(texts)}]" if form == "json" else "\n".join(texts))
    items = task_of(tmp_path, file=file.name).items
    expected = task_of(tmp_path, rows=ROWS.replace('"Hello, you"', "Hello")).items
    assert [(i.id, i.prompt, i.target, i.slices) for i in items] == [
        (i.id, i.prompt, i.target, i.slices) for i in expected
    ]


def test_examples_are_left_out_of_the_items_or_come_from_another_file(tmp_path: Path) -> None:
    task = task_of(tmp_path, few_shot={"num": 1, "seed": 3})
    [shot] = task.shots
    assert task.num_items == 3 and shot.prompt not in [item.prompt for item in task.items]
    (tmp_path / "more.csv").write_text(ROWS.replace("Where is", "Who has"))
    other = task_of(tmp_path, few_shot={"num": 2, "file": "more.csv"})
    assert other.num_items == 4 and len(other.shots) == 2
    assert task_of(tmp_path, few_shot={"num": 1, "seed": 3}).shots == task.shots


def test_items_are_chosen_by_seed_and_keep_their_order(tmp_path: Path) -> None:
    chosen = [[i.id for i in task_of(tmp_path, num_items=2, seed=seed).items] for seed in range(6)]
    assert all(ids == sorted(ids) and len(ids) == 2 for ids in chosen)
    assert len({tuple(ids) for ids in chosen}) > 1
    assert chosen[0] == [i.id for i in task_of(tmp_path, num_items=2, seed=0).items]


def test_choices_may_be_a_column_and_the_target_a_place(tmp_path: Path) -> None:
    rows = [{"id": i, "q": "?", "options": ["a", "b", f"c{i}"], "target": 2} for i in range(2)]
    (tmp_path / "q.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    keys = {"name": "q", "kind": "choice", "file": "q.jsonl", "prompt": "{{ q }}", "choices": "options"}
    [task] = load_suite(write_suite(tmp_path, keys)).tasks
    assert isinstance(task, ShortTask)
    assert [item.choices[2] for item in task.items] == ["c0", "c1"]


@pytest.mark.parametrize("change", ["row", "prompt", "choices", "few_shot", "cluster", "num_items", "system"])
def test_the_digest_changes_with_everything_that_a_result_depends_on(tmp_path: Path, change: str) -> None:
    before = load_suite(write_suite(tmp_path, TASK)).digest
    changed: dict[str, Any] = {
        "prompt": {"prompt": "Classify {{ text }}:"},
        "choices": {"choices": ["delivery", "billing", "other"]},
        "few_shot": {"few_shot": {"num": 1}},
        "cluster": {"cluster": "ticket_id"},
        "num_items": {"num_items": 3},
        "system": {"chat": True, "system": "Be brief."},
        "row": {},
    }[change]
    rows = ROWS.replace("late", "lost") if change == "row" else ROWS
    assert load_suite(write_suite(tmp_path, TASK | changed, rows=rows)).digest != before


def test_the_digest_of_a_schema_in_a_file_changes_with_the_file(tmp_path: Path) -> None:
    keys = {
        "name": "j",
        "kind": "json_schema",
        "file": "intents.csv",
        "map": {"id": "ticket_id"},
        "prompt": "{{ text }}",
    }
    digests = []
    for kind in ("object", "array"):
        (tmp_path / "s.json").write_text(json.dumps({"type": kind}))
        digests.append(load_suite(write_suite(tmp_path, {**keys, "json_schema": "s.json"})).digest)
    assert digests[0] != digests[1]


BAD = [
    (
        {"rows": "ticket_id,text,intent,lang,customer_id\n"},
        "tasks[0].file: FOLDER/intents.csv gives no row",
    ),
    ({"rows": ROWS[: ROWS.index("t2")]}, "gives one item; at least 2 are needed"),
    ({"rows": ""}, "is empty"),
    ({"rows": ROWS.replace("t3", "t1")}, "intents.csv:4: item 't1' is there twice, first at FOLDER/intents.csv:2"),
    (
        {"rows": ROWS.replace(",billing,", ",biling,")},
        "intents.csv:2: item 't1': the target 'biling' is not",
    ),
    ({"rows": ROWS.replace(",en,c1", ",en")}, "intents.csv:2: the row has 4 columns"),
    ({"rows": ROWS.replace("t1,", ",")}, "intents.csv:2: field 'ticket_id', the id: found nothing"),
    ({"rows": ROWS.replace(",c1", ",")}, "intents.csv:2: item 't1': found nothing where a value belongs"),
    ({"file": "absent.csv"}, "support.yaml:6:9: tasks[0].file: FOLDER/absent.csv: no such file"),
    ({"file": "notes.txt"}, "tasks[0].file: a text file has no columns"),
    ({"file": "notes.doc"}, "names no format"),
    ({"encoding": "utf-99"}, "unknown encoding 'utf-99'"),
    ({"map": {**TASK["map"], "target": "intnet"}}, "no column 'intnet'"),
    ({"map": {**TASK["map"], "langauge": "lang"}}, "nothing uses a field 'langauge'; did you mean 'language'?"),
    ({"prompt": "{{ txet }}"}, "no column 'txet'"),
    ({"prompt": "{{ text"}, "support.yaml:11:11: tasks[0].prompt:1: not a Jinja template"),
    ({"prompt": "{{ text.nothing.more }}"}, "item 't1': the prompt cannot be rendered"),
    ({"prompt": "{% if text == '' %}{{ text }}{% endif %}"}, "item 't1': the prompt is empty"),
    ({"prompt": "{% for i in range(999999) %}x{% endfor %}{{ text }}"}, "the prompt cannot be rendered"),
    ({"num_items": 5}, "tasks[0].num_items: 5 items, and there are 4 rows for them"),
    ({"few_shot": {"num": 9}}, "tasks[0].few_shot: num 9, and there are 4 rows"),
    ({"few_shot": {"num": 3}}, "gives one item"),
    ({"few_shot": {"nmu": 3}}, "tasks[0].few_shot: unknown key 'nmu'; did you mean 'num'?"),
    ({"choices": ["a", "a"]}, "tasks[0].choices: choices are two or more, all different"),
    ({"choices": 3}, "tasks[0].choices: found 3 (a whole number)"),
    ({"choices": "text"}, "item 't1': field 'text' holds no list of choices"),
    ({"slcies": ["language"]}, "support.yaml:21:3: tasks[0]: unknown key 'slcies'; did you mean 'slices'?"),
    ({"slices": ["language", "region"]}, "no column 'region'"),
    ({"kind": "choise"}, "support.yaml:5:9: tasks[0].kind: unknown kind 'choise'; did you mean 'choice'?"),
    ({"kind": None}, "tasks[0]: missing: a kind, a task, or an lm_eval"),
    ({"kind": None, "knid": "choice"}, "did you mean 'kind'?"),
    ({"system": "Be brief."}, "system needs chat: true"),
    ({"chat": True, "answer_prefix": " "}, "answer_prefix is for plain prompts"),
    ({"name": "a b"}, "tasks[0].name: found 'a b' (text); allowed: letters"),
    ({"kind": "regex", "choices": None, "pattern": "(["}, "tasks[0].pattern: found '([', not a regular expression"),
    (
        {"kind": "json_schema", "choices": None, "json_schema": {"type": "objekt"}},
        "tasks[0].json_schema: not a JSON schema",
    ),
    ({"kind": "json_schema", "choices": None, "json_schema": "absent.json"}, "absent.json: cannot be read as JSON"),
    (
        {"kind": "json_schema", "choices": None, "json_schema": {"$ref": "http://127.0.0.1:9/x"}},
        "tasks[0].json_schema: not a JSON schema",
    ),
    (
        {"kind": "judge", "choices": None, "url": "http://h/v1", "model": "m", "judge_prompt": "{{ answer"},
        "tasks[0].judge_prompt:1: not a Jinja template",
    ),
    ({"kind": "exact", "choices": None, "max_tokens": 0}, "tasks[0].max_tokens: found 0; allowed: 1 or more"),
    ({"kind": "exact", "choices": None, "disregard": ["colour"]}, "unknown disregard 'colour'"),
    ({"kind": "regex", "choices": None, "pattern": "x", "few_shot": {"num": 1}}, "a pattern is no answer"),
]


@pytest.mark.parametrize(("changed", "message"), BAD, ids=[message[:60] for _, message in BAD])
def test_what_is_wrong_is_one_line_that_says_where(tmp_path: Path, changed: dict[str, Any], message: str) -> None:
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(DataError, match=re.escape(message.replace("FOLDER", str(tmp_path)))) as raised:
        task_of(tmp_path, **changed)
    assert "\n" not in str(raised.value)


def test_two_mistakes_in_the_file_are_said_at_once(tmp_path: Path) -> None:
    with pytest.raises(DataError) as raised:
        load_suite(write_suite(tmp_path, TASK | {"kind": "nothing"}, TASK | {"name": "b", "num_items": 0}))
    assert [line.split(": ")[1] for line in str(raised.value).splitlines()] == ["tasks[0].kind", "tasks[1].num_items"]


def test_tasks_have_names_of_their_own_and_may_share_a_file(tmp_path: Path) -> None:
    assert load_suite(write_suite(tmp_path, TASK, TASK | {"name": "again"})).num_items == 8
    with pytest.raises(DataError, match="task 'intent' is there 2 times"):
        load_suite(write_suite(tmp_path, TASK, TASK))

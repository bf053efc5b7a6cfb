"""The committed documents about suites say what the code says."""

from pathlib import Path

from quantpipe.cli import run
from quantpipe.evaluate.kinds.table import KINDS
from quantpipe.evaluate.suite_file import LocalTask, OwnTask
from quantpipe.evaluate.suite_reference import kind_rows, own_keys, suite_reference

ROOT = Path(__file__).parents[2]


def test_the_committed_key_reference_is_up_to_date() -> None:
    committed = (ROOT / "evals" / "README.md").read_text(encoding="utf-8")
    assert committed == suite_reference(), "run: quantpipe schema --suite --markdown > evals/README.md"


def test_every_key_has_a_meaning() -> None:
    rows = [line.split(" | ") for line in suite_reference().splitlines() if line.startswith("| `")]
    assert all(row[-1].removesuffix(" |").strip() for row in rows)
    found = {row[0].removeprefix("| ").strip("`") for row in rows}
    keys = {name for kind in KINDS.values() for name in kind.keys.model_fields}
    assert keys | set(LocalTask.model_fields) | set(OwnTask.model_fields) <= found


def test_the_table_of_kinds_in_the_docs_is_the_codes() -> None:
    text = (ROOT / "docs" / "evals.md").read_text(encoding="utf-8")
    shown = [line for line in text.splitlines() if line.startswith("| `")]
    assert shown == kind_rows()
    assert all(own_keys(name) for name in KINDS)


def test_the_schema_of_every_form_of_a_task_is_printed(capsys: object) -> None:
    assert run(["schema", "--suite"]) == 0

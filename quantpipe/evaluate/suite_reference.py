"""What a suite file may hold, for people: the key reference in Markdown, made from the schema."""

from typing import Any

from pydantic import BaseModel

from quantpipe.evaluate.kinds.kind import TaskKeys, TextKeys
from quantpipe.evaluate.kinds.table import KINDS
from quantpipe.evaluate.suite_file import LocalTask, OwnTask, SuiteHeader
from quantpipe.recipe.reference import key_tables

ASKS = {"choices": "the log-likelihood of each choice", "text": "text, greedily"}
_INTRODUCTION = """\
# Suites: the key reference

A suite is a YAML file here, or a folder with a `suite.yaml`; `docs/evals.md` says how it works. Made from the schema by
`quantpipe schema --suite --markdown > evals/README.md`; do not edit it by hand.

Unknown keys are errors. Paths start at the suite's file.
"""


def suite_reference() -> str:
    """Every key with its type, default and meaning, as Markdown."""
    parts = [_INTRODUCTION, *_tables(SuiteHeader, "The suite")]
    parts += _tables(TaskKeys, "A task of any kind")
    parts += _tables(TextKeys, "A task whose answer is written", TaskKeys)
    for name, kind in KINDS.items():
        parts += _tables(kind.keys, f"A task of kind {name}", _shared(name))
    parts += _tables(LocalTask, "An lm-eval task beside the suite")
    parts += _tables(OwnTask, "A task that comes with lm-eval")
    return "\n".join(parts)


def kind_rows() -> list[str]:
    """The rows of a table of all kinds: name, what is asked for, when an answer is right, and keys of its own."""
    rows = []
    for name, kind in KINDS.items():
        own = ", ".join(f"`{key}`" for key in own_keys(name))
        rows.append(f"| `{name}` | {ASKS[kind.asks]} | {kind.says} | {own} |")
    return rows


def own_keys(name: str) -> list[str]:
    """The keys that only this kind has."""
    return [key for key in KINDS[name].keys.model_fields if key not in _shared(name).model_fields and key != "kind"]


def suite_schemas() -> dict[str, Any]:
    """JSON schema of each form of a task, by what says which it is."""
    forms: dict[str, type[BaseModel]] = {"task": LocalTask, "lm_eval": OwnTask}
    forms |= {f"kind: {name}": kind.keys for name, kind in KINDS.items()}
    return {name: form.model_json_schema() for name, form in forms.items()}


def _shared(name: str) -> type[TaskKeys]:
    return TextKeys if KINDS[name].asks == "text" else TaskKeys


def _tables(section: type[BaseModel], heading: str, without: type[BaseModel] | None = None) -> list[str]:
    schema = section.model_json_schema()
    shared = {} if without is None else without.model_fields
    schema["properties"] = {name: key for name, key in schema["properties"].items() if name not in shared}
    if not schema["properties"]:
        return []
    return list(key_tables(schema, heading))

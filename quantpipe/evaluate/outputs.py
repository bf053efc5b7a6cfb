"""What a model answered, item by item, as a file: JSON Lines, one for each model. And scores made from it again.

The first line says which model, which suite and what was asked; each other line is an item.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from quantpipe.errors import DataError
from quantpipe.evaluate.items import ItemResult, SuiteResult
from quantpipe.evaluate.short_run import score_task
from quantpipe.evaluate.short_task import ShortTask
from quantpipe.evaluate.suite import Suite, Task
from quantpipe.gate.record import write_text_atomically
from quantpipe.report import Progress, no_progress

SCHEMA = "quantpipe.outputs/1"


@dataclass(frozen=True)
class SavedOutputs:
    """One model's answers. ``asked`` is a digest, by task, of what it was given; ``model`` that of the model."""

    model: str
    asked: dict[str, str]
    result: SuiteResult


def write_outputs(path: Path, suite: Suite, model: str, result: SuiteResult) -> None:
    """Write a model's answers, atomically. DataError where the disk refuses."""
    header = {
        "schema": SCHEMA,
        "suite": suite.name,
        "suite_digest": suite.digest,
        "model": model,
        "asked": {task.name: asked_digest(task) for task in suite.tasks},
    }
    lines = [header, *(asdict(item) for item in result.items)]
    text = "".join(f"{json.dumps(line, ensure_ascii=False, allow_nan=False)}\n" for line in lines)
    write_text_atomically(path, text)


def read_outputs(path: Path) -> SavedOutputs:
    """The reverse of ``write_outputs``. DataError where the file is missing or damaged."""
    try:
        header, *rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        if header["schema"] != SCHEMA:
            raise ValueError(f"schema is '{header['schema']}', not '{SCHEMA}'")
        items = tuple(_item(row) for row in rows)
        result = SuiteResult(header["suite"], header["suite_digest"], items)
        return SavedOutputs(header["model"], header["asked"], result)
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}; run the recipe first") from error
    except (ValueError, KeyError, TypeError) as error:
        found = " ".join(str(error).split())
        raise DataError(f"{path}: not a model's saved answers: {found}; run the recipe again") from error


def rescore(path: Path, suite: Suite, progress: Progress = no_progress) -> SuiteResult:
    """The saved answers scored as the suite says now, without a model.

    DataError where the suite has come to ask something else: targets, tolerances and the like may change, prompts not.
    """
    saved = read_outputs(path)
    items = {(item.task, item.doc_id): item for item in saved.result.items}
    found: list[ItemResult] = []
    for task in suite.tasks:
        if saved.asked.get(task.name) != asked_digest(task):
            what = "was asked something else" if task.name in saved.asked else "was not asked"
            raise DataError(f"{path}: task '{task.name}' {what} when these answers were given; run the recipe again")
        try:
            own = [items[task.name, item_id] for item_id in task.ids]
        except KeyError as error:
            raise DataError(f"{path}: item {error.args[0][1]!r} of task '{task.name}' is missing; run again") from error
        found += _rescored(task, own, progress)
    return SuiteResult(suite.name, suite.digest, tuple(found))


def asked_digest(task: Task) -> str:
    """Over what a model is given, and nothing by which its answers are scored."""
    content = json.dumps(task.asked, sort_keys=True, ensure_ascii=False, default=str)
    return hashlib.sha256(content.encode()).hexdigest()


def _rescored(task: Task, saved: Sequence[ItemResult], progress: Progress) -> list[ItemResult]:
    if isinstance(task, ShortTask):
        responses, digests = [item.response for item in saved], [item.prompt_digest for item in saved]
        return score_task(task, responses, digests, progress)
    from quantpipe.evaluate.lm_run import rescore_lm_task  # lm-eval takes seconds to import

    return rescore_lm_task(task, saved)


def _item(row: dict[str, Any]) -> ItemResult:
    response = row["response"]
    return ItemResult(**{**row, "response": response if isinstance(response, str) else tuple(map(float, response))})

"""Suites of tasks: read from a folder, and run on an engine.

A suite is a folder: ``suite.yaml`` names the tasks; each task is an lm-eval YAML file beside it with JSON Lines items.
"""

import hashlib
import json
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any, Literal

import yaml
from lm_eval.evaluator import evaluate
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from quantpipe.errors import DataError, suggest
from quantpipe.evaluate.items import ItemResult, SuiteResult
from quantpipe.evaluate.lm import EngineLM
from quantpipe.evaluate.served import ServedModel, TextCodec
from quantpipe.evaluate.tasks import (
    EvalTask,
    ItemMetric,
    lm_eval_contained,
    lm_eval_task,
    read_task,
    read_task_configs,
)
from quantpipe.report import Item, Progress, no_progress

SUITE_NAME = "suite.yaml"


class TaskEntry(BaseModel):
    """One task of a suite: its lm-eval name, the metric that says whether an item is right, and how many items."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    task: str
    metric: ItemMetric
    num_items: int = Field(ge=1)


class SuiteFile(BaseModel):
    """What ``suite.yaml`` holds."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    version: Literal[1]
    name: str
    tasks: list[TaskEntry] = Field(min_length=1)


@dataclass(frozen=True)
class Suite:
    """Tasks that were read and checked. ``digest`` changes with any task, item or metric."""

    name: str
    folder: Path
    tasks: tuple[EvalTask, ...]
    digest: str

    @property
    def num_items(self) -> int:
        """Items over all tasks: how many a comparison must have."""
        return sum(len(task.docs) for task in self.tasks)


def load_suite(folder: Path) -> Suite:
    """Read a suite folder and check every task and item. DataError where anything is missing or inconsistent."""
    spec = _read_suite_file(folder / SUITE_NAME)
    configs = read_task_configs(folder)
    tasks = tuple(read_task(folder, entry.task, entry.metric, entry.num_items, configs) for entry in spec.tasks)
    _require_unique(f"{folder}: task", [task.name for task in tasks])
    _require_unique(f"{folder}: item", [str(doc["id"]) for task in tasks for doc in task.docs])
    content = json.dumps([[t.name, t.metric, t.config, t.docs] for t in tasks], sort_keys=True, ensure_ascii=False)
    return Suite(spec.name, folder, tasks, hashlib.sha256(content.encode()).hexdigest())


def run_suite(engine: ServedModel, tokenizer: TextCodec, suite: Suite, progress: Progress = no_progress) -> SuiteResult:
    """Ask an engine every item through lm-eval's evaluator. DataError where an item does not come back as 0 or 1."""
    with _lm_eval_silenced(progress) as heard_progress:
        lm = EngineLM(engine, tokenizer, heard_progress)
        loaded = {"tasks": {task.name: lm_eval_task(task) for task in suite.tasks}}
        samples_of = evaluate(lm, loaded, bootstrap_iters=0, log_samples=True)["samples"]
    items = tuple(_item(task, sample, lm) for task in suite.tasks for sample in samples_of[task.name])
    if [(i.task, i.doc_id) for i in items] != [(t.name, d["id"]) for t in suite.tasks for d in t.docs]:
        raise DataError(f"{suite.folder}: {len(items)} results for {suite.num_items} items, or in another order")
    return SuiteResult(suite.name, suite.digest, items)


def _read_suite_file(file: Path) -> SuiteFile:
    try:
        return SuiteFile.model_validate(yaml.safe_load(file.read_text(encoding="utf-8")))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise DataError(f"{file}: cannot be read: {' '.join(str(error).split())}") from error
    except ValidationError as error:
        # A misspelt key is also a missing one: name the misspelling.
        first = min(error.errors(), key=lambda each: each["type"] != "extra_forbidden")
        key = ".".join(str(part) for part in first["loc"]) or "(the file)"
        if first["type"] == "extra_forbidden":
            known = SuiteFile.model_fields if len(first["loc"]) == 1 else TaskEntry.model_fields
            raise DataError(f"{file}: {key}: unknown key{suggest(str(first['loc'][-1]), known)}") from error
        raise DataError(f"{file}: {key}: {first['msg']}; found {first['input']!r}") from error


def _item(task: EvalTask, sample: Mapping[str, Any], lm: EngineLM) -> ItemResult:
    """One logged sample as an item result."""
    doc, score = sample["doc"], float(sample[task.metric])
    if score not in (0.0, 1.0):
        raise DataError(f"{task.name}: item '{doc['id']}': {task.metric} is {score}; an item is right (1) or wrong (0)")
    responses = sample["filtered_resps"]
    return ItemResult(
        task=task.name,
        doc_id=doc["id"],
        domain=doc["domain"],
        cluster=doc["cluster"],
        score=score,
        prompt_digest=_prompt_digest(sample["arguments"], lm),
        response=responses[0] if isinstance(responses[0], str) else tuple(float(each[0]) for each in responses),
    )


def _prompt_digest(arguments: Sequence[tuple[str, Any]], lm: EngineLM) -> str:
    """Over the token ids of each context and continuation, or of the context and how it is to be continued."""
    asked = [
        lm.encode_pair(context, rest) if isinstance(rest, str) else (lm.tok_encode(context), rest)
        for context, rest in arguments
    ]
    return hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()


def _require_unique(what: str, names: Sequence[str]) -> None:
    name, count = Counter(names).most_common(1)[0]
    if count > 1:
        raise DataError(f"{what} '{name}' is there {count} times; names must be unique")


@contextmanager
def _lm_eval_silenced(progress: Progress) -> Iterator[Progress]:
    """Keep lm-eval's log lines and bars off the terminal; the progress handed out still reaches standard error."""
    stderr = sys.stderr

    def heard(items: Iterable[Item], total: int, label: str) -> Iterator[Item]:
        with redirect_stderr(stderr):
            yield from progress(items, total, label)

    with lm_eval_contained(), redirect_stderr(StringIO()):
        yield heard

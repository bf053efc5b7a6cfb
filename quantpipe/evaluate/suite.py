"""Suites of tasks: read and checked, and run on an engine.

A suite is a YAML file, or a folder with a ``suite.yaml``: lm-eval tasks beside it, lm-eval's own by name, and tasks of
the short form, which go straight to the engine.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantpipe.engine.tokenizer import Tokenizer
from quantpipe.errors import DataError
from quantpipe.evaluate.asking import Asker
from quantpipe.evaluate.eval_task import EvalTask, HubTask
from quantpipe.evaluate.items import ItemResult, SuiteResult
from quantpipe.evaluate.kinds.table import KINDS
from quantpipe.evaluate.served import ServedModel, TextCodec
from quantpipe.evaluate.short_run import chat_template, prompt_text, run_short_tasks
from quantpipe.evaluate.short_task import ShortTask, read_short_task
from quantpipe.evaluate.suite_file import LocalTask, OwnTask, SuiteFile, read_suite_file
from quantpipe.report import Progress, no_progress

Task = EvalTask | HubTask | ShortTask


@dataclass(frozen=True)
class Suite:
    """Tasks that were read and checked. ``digest`` changes with any task, item or metric."""

    name: str
    folder: Path
    tasks: tuple[Task, ...]
    digest: str

    @property
    def num_items(self) -> int:
        """Items over all tasks: how many a comparison must have."""
        return sum(task.num_items for task in self.tasks)


def load_suite(path: Path) -> Suite:
    """Read a suite, a file or a folder, and check every task and item.

    DataError where anything is missing or inconsistent, or data of the hub are out of reach.
    """
    suite_file = read_suite_file(path)
    tasks = tuple(_tasks(suite_file))
    where = suite_file.folder if suite_file.file != path else path
    _require_unique(f"{where}: task", [task.name for task in tasks])
    _require_unique(f"{where}: item", [str(doc["id"]) for t in tasks if isinstance(t, EvalTask) for doc in t.docs])
    content = json.dumps([task.content for task in tasks], sort_keys=True, ensure_ascii=False, default=str)
    return Suite(suite_file.name, where, tasks, hashlib.sha256(content.encode()).hexdigest())


def check_suite(suite: Suite, tokenizer_folder: Path) -> None:
    """What a run needs beside the suite's files: a chat template, a sandbox, a judge. DataError for what is missing."""
    short_tasks = [task for task in suite.tasks if isinstance(task, ShortTask)]
    tokenizer = Tokenizer.open(tokenizer_folder) if short_tasks else None
    for task in short_tasks:
        assert tokenizer is not None  # there are tasks that need it
        template = chat_template(task, tokenizer)
        prompt_text(task, task.items[0], template)
        if task.kind.prepare is not None:
            task.kind.prepare(task.keys, task.place)


def run_suite(engine: ServedModel, tokenizer: TextCodec, suite: Suite, progress: Progress = no_progress) -> SuiteResult:
    """Ask an engine every item. DataError where one cannot be asked, or does not come back with a score."""
    found: dict[str, list[ItemResult]] = {}
    lm_tasks = [task for task in suite.tasks if not isinstance(task, ShortTask)]
    if lm_tasks:
        from quantpipe.evaluate.lm_run import run_lm_tasks  # lm-eval takes seconds to import

        found |= run_lm_tasks(engine, tokenizer, lm_tasks, progress)
    short_tasks = [task for task in suite.tasks if isinstance(task, ShortTask)]
    if short_tasks:
        found |= run_short_tasks(short_tasks, Asker(engine, tokenizer, progress), tokenizer, progress)
    items = tuple(item for task in suite.tasks for item in found[task.name])
    return SuiteResult(suite.name, suite.digest, items)


def _tasks(suite_file: SuiteFile) -> Iterator[Task]:
    folder, entries = suite_file.folder, suite_file.entries
    if any(isinstance(entry, LocalTask) for entry in entries):
        from quantpipe.evaluate.tasks import read_task, read_task_configs  # imports lm-eval

        configs = read_task_configs(folder)
    for index, entry in enumerate(entries):
        place = suite_file.place(index)
        if isinstance(entry, LocalTask):
            yield read_task(folder, entry.task, entry.metric, entry.num_items, configs, entry.slices)
        elif isinstance(entry, OwnTask):
            from quantpipe.evaluate.hub_tasks import read_own_task

            yield read_own_task(entry, place("lm_eval"))
        else:
            kind: Any = getattr(entry, "kind")  # noqa: B009 - each kind's section has it, their common one not
            yield read_short_task(entry, KINDS[kind], folder, place)


def _require_unique(what: str, names: Sequence[str]) -> None:
    if not names:
        return
    name, count = Counter(names).most_common(1)[0]
    if count > 1:
        raise DataError(f"{what} '{name}' is there {count} times; names must be unique")

"""lm-eval tasks with local data: YAML and JSON Lines in, checked items out. Runs no code from there.

Answers and choices are fields of the items (``doc_to_target``, ``doc_to_choice`` name them); prompts may be templates.
"""

import json
import logging
import random
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml
from datasets import Dataset, DatasetDict
from lm_eval.api.registry import METRIC_REGISTRY
from lm_eval.api.task import Task
from lm_eval.tasks import TaskManager

from quantpipe.errors import DataError, suggest
from quantpipe.evaluate.eval_task import ITEM_FIELDS
from quantpipe.evaluate.eval_task import EvalTask as EvalTask


def read_task_configs(folder: Path) -> dict[str, dict[str, Any]]:
    """The lm-eval tasks that lie in a folder, by name. DataError for a YAML file that does not parse."""
    for file in sorted(folder.glob("**/*.yaml")):
        try:  # lm-eval's own index leaves such files out silently
            yaml.safe_load(file.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            raise DataError(f"{file}: cannot be read: {' '.join(str(error).split())}") from error
    index = TaskManager(include_path=str(folder), include_defaults=False).task_index
    return {name: dict(entry.cfg) for name, entry in index.items() if entry.cfg}


def read_task(
    folder: Path,
    name: str,
    metric: str,
    num_items: int,
    configs: Mapping[str, dict[str, Any]],
    slices: tuple[str, ...] = (),
) -> EvalTask:
    """One task with its items. DataError where the task, its data or an item is missing or inconsistent."""
    where = f"{folder}: task '{name}'"
    if name not in configs:
        raise DataError(f"{where} is in no YAML file of the folder{suggest(name, configs)}")
    config = configs[name]
    metrics = [str(entry.get("metric")) for entry in config.get("metric_list") or []]
    for found in metrics:
        if found not in METRIC_REGISTRY:  # lm-eval would look for it on the network
            raise DataError(f"{where}: metric_list: unknown metric '{found}'{suggest(found, METRIC_REGISTRY)}")
    if metric not in metrics:
        raise DataError(f"{where}: metric '{metric}' is not in its metric_list (there: {', '.join(metrics) or 'none'})")
    docs = tuple(_read_docs(_data_file(folder, where, config), where))
    if len(docs) != num_items:
        raise DataError(f"{where}: {len(docs)} items, {num_items} declared; correct num_items or the data")
    task = EvalTask(name, metric, folder, config, docs, slices)
    _check_items(task, where)
    return task


def lm_eval_task(task: EvalTask) -> Task:
    """A fresh lm-eval task over the items in memory: lm-eval's data cache on disk, which can be stale, is not used."""
    split = task.config["test_split"]

    def items_in_memory(**_: Any) -> DatasetDict:
        return DatasetDict({split: Dataset.from_list([dict(doc) for doc in task.docs])})

    manager = TaskManager(include_path=str(task.folder), include_defaults=False)
    with lm_eval_contained():
        return manager.load([{**task.config, "custom_dataset": items_in_memory}])["tasks"][task.name]


@contextmanager
def lm_eval_contained() -> Iterator[None]:
    """Keep lm-eval's log lines to errors, and its draws for task names out of the caller's random state."""
    logger, random_state = logging.getLogger("lm_eval"), random.getstate()
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
        random.setstate(random_state)


def _data_file(folder: Path, where: str, config: Mapping[str, Any]) -> Path:
    """The one JSON Lines file of the task's test split."""
    data_files = (config.get("dataset_kwargs") or {}).get("data_files")
    split = config.get("test_split")
    if config.get("dataset_path") != "json" or not isinstance(data_files, dict) or split not in data_files:
        raise DataError(
            f"{where}: needs local items: dataset_path: json, test_split: <split> and "
            "dataset_kwargs: {data_files: {<split>: <file>.jsonl}}"
        )
    return folder / str(data_files[split])


def _read_docs(file: Path, where: str) -> Iterable[dict[str, Any]]:
    try:
        lines = file.read_text(encoding="utf-8").removesuffix("\n").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{where}: {file}: cannot be read: {error}") from error
    for number, line in enumerate(lines if lines != [""] else [], start=1):
        try:
            doc = json.loads(line)
        except json.JSONDecodeError as error:
            raise DataError(f"{file}:{number}: not JSON: {error}") from error
        missing = [field for field in ITEM_FIELDS if not isinstance(doc, dict) or not isinstance(doc.get(field), str)]
        if missing:
            raise DataError(f"{file}:{number}: '{missing[0]}' is missing or not a string")
        yield doc


def _check_items(task: EvalTask, where: str) -> None:
    """Every item has a prompt, and its right answer is among the choices or not empty."""
    kind = task.config.get("output_type")
    if kind not in ("multiple_choice", "generate_until"):
        raise DataError(f"{where}: output_type '{kind}' (known: generate_until, multiple_choice)")
    for doc in task.docs:  # before lm-eval sees them: it fails on a wrong label without saying where
        item = f"{where}: item '{doc['id']}'"
        for name in task.slices:
            if name not in doc:
                raise DataError(f"{item}: has no field '{name}', a slice{suggest(name, doc)}")
        target = _field(doc, task, "doc_to_target", item)
        if kind == "multiple_choice":
            _check_choice(_field(doc, task, "doc_to_choice", item), target, item)
        elif not target:
            raise DataError(f"{item}: no accepted answer")
    try:
        built = lm_eval_task(task)
        prompts = [built.doc_to_text(doc) for doc in task.docs]
    except Exception as error:  # whatever the YAML makes lm-eval do
        raise DataError(f"{where}: lm-eval cannot build it: {' '.join(str(error).split())}") from error
    if "" in prompts:
        raise DataError(f"{where}: item '{task.docs[prompts.index('')]['id']}': the prompt is empty")


def _field(doc: Mapping[str, Any], task: EvalTask, key: str, item: str) -> Any:
    """The value of the item's field that a key of the task names."""
    name = str(task.config.get(key))
    if name not in doc:
        raise DataError(f"{item}: has no field '{name}', which the task's {key} names{suggest(name, doc)}")
    return doc[name]


def _check_choice(choices: Any, label: Any, item: str) -> None:
    if not isinstance(choices, list) or len(choices) < 2 or len(set(map(str, choices))) != len(choices):
        raise DataError(f"{item}: choices {choices} are not a list of two or more different ones")
    if not isinstance(label, int) or not 0 <= label < len(choices):
        raise DataError(f"{item}: the right answer {label!r} is not among its {len(choices)} choices, counted from 0")

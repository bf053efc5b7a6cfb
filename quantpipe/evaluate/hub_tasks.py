"""Tasks that come with lm-eval, by name. Their data lie on the Hugging Face hub: whether it answers is asked first."""

import os
import random
from typing import Any

from lm_eval.tasks import TaskManager

from quantpipe.errors import DataError, nearest
from quantpipe.evaluate.eval_task import HubTask
from quantpipe.evaluate.lm import check_generation
from quantpipe.evaluate.suite_file import OwnTask
from quantpipe.evaluate.tasks import lm_eval_contained
from quantpipe.report import random_state_kept

with random_state_kept():  # it draws a number as it is imported
    import httpx


HUB = "https://huggingface.co"
HUB_TIMEOUT_S = 5.0
OFFLINE_VARIABLES = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE")
OUTPUT_TYPES = ("multiple_choice", "generate_until")


def require_hub(where: str) -> None:
    """Raise DataError, in seconds, where the hub is out of reach or the environment says not to ask it."""
    for name in OFFLINE_VARIABLES:
        if os.environ.get(name, "").upper() in ("1", "ON", "YES", "TRUE"):
            raise DataError(f"{where}: its data lie on the hub, and {name} forbids asking it; {_INSTEAD}")
    try:
        httpx.head(os.environ.get("HF_ENDPOINT", HUB), timeout=HUB_TIMEOUT_S)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise DataError(f"{where}: its data lie on the hub, which is out of reach ({reason}); {_INSTEAD}") from None


_INSTEAD = "run online, or put the items into a file and use a kind"


def read_own_task(entry: OwnTask, where: str, manager: TaskManager | None = None, needs_hub: bool = True) -> HubTask:
    """The task with its items, downloaded. DataError where it is unknown, out of reach or cannot be compared by item.

    ``manager`` knows the tasks (None: those of lm-eval); ``needs_hub``: whether their data lie on the hub.
    """
    with lm_eval_contained():
        known = manager or TaskManager()
    found = known.task_index.get(entry.lm_eval)
    if found is None:
        meant = nearest(entry.lm_eval, known.task_index)
        hint = f"; did you mean '{meant}'?" if meant else ""
        raise DataError(f"{where}: lm-eval has no task '{entry.lm_eval}'{hint}")
    if entry.lm_eval not in known.all_subtasks:
        raise DataError(f"{where}: '{entry.lm_eval}' is a group; name its tasks one by one")
    if needs_hub:
        require_hub(where)
    try:
        with lm_eval_contained():
            built = known.load([entry.lm_eval])["tasks"][entry.lm_eval]
    except Exception as error:  # whatever the task's code, the hub or a data set's script raise
        reason = (str(error).splitlines() or [type(error).__name__])[0][:200]
        raise DataError(f"{where}: lm-eval cannot load '{entry.lm_eval}': {reason}") from error
    _check(entry, built, where)
    docs = list(built.eval_docs)
    num_items = entry.num_items or len(docs)
    if not 2 <= num_items <= len(docs):
        raise DataError(
            f"{where}: {num_items} items, and its {entry.split} split has {len(docs)}; at least 2 are needed"
        )
    places = tuple(sorted(random.Random(entry.seed).sample(range(len(docs)), num_items)))
    config = built.dump_config()
    return HubTask(entry.lm_eval, entry.metric, built, config, places, tuple(dict(docs[i]) for i in places))


def _check(entry: OwnTask, built: Any, where: str) -> None:
    splits = [
        name for name, has in (("test", built.has_test_docs()), ("validation", built.has_validation_docs())) if has
    ]
    asked = splits[0] if splits else None  # as lm-eval itself takes it
    if asked is None:
        raise DataError(f"{where}: '{entry.lm_eval}' has neither a test nor a validation split")
    if asked != entry.split:
        text = f"has no {entry.split} split" if entry.split not in splits else "is asked on its test split"
        raise DataError(f"{where}: '{entry.lm_eval}' {text}; set split: {asked}")
    if built.OUTPUT_TYPE not in OUTPUT_TYPES:
        raise DataError(f"{where}: output_type '{built.OUTPUT_TYPE}' (known: {', '.join(sorted(OUTPUT_TYPES))})")
    metrics = sorted(built.aggregation())
    if entry.metric not in metrics:
        raise DataError(f"{where}: '{entry.lm_eval}' has no metric '{entry.metric}' (it has: {', '.join(metrics)})")
    if built.OUTPUT_TYPE == "generate_until":
        try:
            check_generation(built.config.generation_kwargs or {})
        except DataError as error:
            raise DataError(f"{where}: {error}") from error

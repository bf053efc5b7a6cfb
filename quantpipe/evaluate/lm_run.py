"""lm-eval tasks asked of an engine, through lm-eval's evaluator; and scored again from saved answers."""

import hashlib
import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr
from io import StringIO
from typing import Any

from lm_eval.evaluator import evaluate

from quantpipe.errors import DataError
from quantpipe.evaluate.eval_task import EvalTask, HubTask
from quantpipe.evaluate.items import ItemResult
from quantpipe.evaluate.kinds.choice import best_choice
from quantpipe.evaluate.kinds.kind import Response
from quantpipe.evaluate.lm import EngineLM
from quantpipe.evaluate.served import ServedModel, TextCodec
from quantpipe.evaluate.tasks import lm_eval_contained, lm_eval_task
from quantpipe.report import Item, Progress, no_progress

LmTask = EvalTask | HubTask


def run_lm_tasks(
    engine: ServedModel, tokenizer: TextCodec, tasks: Sequence[LmTask], progress: Progress = no_progress
) -> dict[str, list[ItemResult]]:
    """Every item's result, by task. DataError where an item does not come back as 0 or 1."""
    with _lm_eval_silenced(progress) as heard_progress:
        lm = EngineLM(engine, tokenizer, heard_progress)
        built = {task.name: _built(task) for task in tasks}
        places = {task.name: list(task.places) for task in tasks if isinstance(task, HubTask)}
        samples_of: dict[str, list[dict[str, Any]]] = {}
        for chosen in (True, False):  # lm-eval takes choices of items for all tasks of a run or for none
            some = {name: own for name, own in built.items() if (name in places) == chosen}
            if some:
                asked = {name: places[name] for name in some} if chosen else None
                found = evaluate(lm, {"tasks": some}, samples=asked, bootstrap_iters=0, log_samples=True)
                samples_of |= found["samples"]
    results = {}
    for task in tasks:
        samples = samples_of[task.name]
        if len(samples) != task.num_items:
            raise DataError(f"{task.name}: {len(samples)} results for {task.num_items} items")
        results[task.name] = [_item(task, place, built[task.name], sample, lm) for place, sample in enumerate(samples)]
    return results


def rescore_lm_task(task: LmTask, saved: Sequence[ItemResult]) -> list[ItemResult]:
    """The saved answers under the task's metric as it is now, in the order of the items."""
    built, rescored = _built(task), []
    for place, item in enumerate(saved):
        doc, response = task.docs[place], item.response
        with _lm_eval_silenced(no_progress):
            results = [response] if isinstance(response, str) else [(value, False) for value in response]
            found = built.process_results(dict(doc), results)
        score = _score(task, item.doc_id, found)
        rescored.append(_result(task, place, built, score, item.prompt_digest, response))
    return rescored


def _built(task: LmTask) -> Any:
    return task.built if isinstance(task, HubTask) else lm_eval_task(task)


def _item(task: LmTask, place: int, built: Any, sample: Mapping[str, Any], lm: EngineLM) -> ItemResult:
    """One logged sample as an item result."""
    doc, responses = sample["doc"], sample["filtered_resps"]
    if isinstance(task, EvalTask) and doc["id"] != task.docs[place]["id"]:
        raise DataError(f"{task.name}: item '{doc['id']}' came back in the place of '{task.docs[place]['id']}'")
    score = _score(task, _id(task, place), sample)
    response = responses[0] if isinstance(responses[0], str) else tuple(float(each[0]) for each in responses)
    return _result(task, place, built, score, _prompt_digest(sample["arguments"], lm), response)


def _result(task: LmTask, place: int, built: Any, score: float, digest: str, response: Response) -> ItemResult:
    doc = task.docs[place]
    prediction, margin = (response, None) if isinstance(response, str) else _chosen(task, built, doc, response)
    return ItemResult(
        task=task.name,
        doc_id=_id(task, place),
        domain=doc["domain"] if isinstance(task, EvalTask) else task.name,
        cluster=doc["cluster"] if isinstance(task, EvalTask) else f"{task.name}/{_id(task, place)}",
        score=score,
        prompt_digest=digest,
        response=response,
        prediction=prediction,
        margin=margin,
        slices={name: str(doc[name]) for name in ("domain", *task.slices)} if isinstance(task, EvalTask) else {},
    )


def _id(task: LmTask, place: int) -> str:
    return str(task.docs[place]["id"]) if isinstance(task, EvalTask) else str(task.places[place])


def _score(task: LmTask, item_id: str, found: Mapping[str, Any]) -> float:
    score = float(found[task.metric])
    if score not in (0.0, 1.0):
        raise DataError(f"{task.name}: item '{item_id}': {task.metric} is {score}; an item is right (1) or wrong (0)")
    return score


def _chosen(task: LmTask, built: Any, doc: Mapping[str, Any], values: Sequence[float]) -> tuple[str, float]:
    """The choice that the task's metric takes, and by how many nats it was ahead (per character or byte for those)."""
    choices = [str(choice) for choice in built.doc_to_choice(dict(doc))]
    compared = [value / _length(choice, task.metric) for value, choice in zip(values, choices, strict=True)]
    scored = best_choice(choices, compared, 0, is_per_character=False)
    return scored.prediction, scored.margin or 0.0


def _length(choice: str, metric: str) -> int:
    return max({"acc_norm": len(choice), "acc_bytes": len(choice.encode())}.get(metric, 1), 1)


def _prompt_digest(arguments: Sequence[tuple[str, Any]], lm: EngineLM) -> str:
    """Over the token ids of each context and continuation, or of the context and how it is to be continued."""
    asked = [
        lm.encode_pair(context, rest) if isinstance(rest, str) else (lm.tok_encode(context), rest)
        for context, rest in arguments
    ]
    return hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()


@contextmanager
def _lm_eval_silenced(progress: Progress) -> Iterator[Progress]:
    """Keep lm-eval's log lines and bars off the terminal; the progress handed out still reaches standard error."""
    stderr = sys.stderr

    def heard(items: Iterable[Item], total: int, label: str) -> Iterator[Item]:
        with redirect_stderr(stderr):
            yield from progress(items, total, label)

    with lm_eval_contained(), redirect_stderr(StringIO()):
        yield heard

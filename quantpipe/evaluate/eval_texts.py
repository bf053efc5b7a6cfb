"""What a model is evaluated on, as texts that calibration rows are compared with. Asks no model anything."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from quantpipe.calibration.checks.leakage import NGRAM_WORDS, EvalText
from quantpipe.calibration.text.words import words
from quantpipe.evaluate.divergence import read_text, text_files
from quantpipe.evaluate.eval_task import ITEM_FIELDS, EvalTask, HubTask
from quantpipe.evaluate.kinds.kind import ANSWER, Item
from quantpipe.evaluate.short_task import ShortTask
from quantpipe.evaluate.suite import Suite, Task

WINDOW_WORDS = 32  # of held-out text; half of one in common is a leak, so a copied run of 24 words is always found
GROUP_FIELD = "group"


def eval_texts(suite: Suite | None, held_out_text: Path | None) -> list[EvalText]:
    """All texts of a suite's items and of a held-out text (a file, or a folder of ``.txt`` files).

    Of an item: each field that its prompt is made from, the question with each right answer behind it, and a right
    answer alone where it has eight words or more. An item's field ``group``, if it has one, is its customer or thread.
    Of a held-out text: paragraphs of 8 to 32 words, and runs of 32 words that overlap by half. DataError where the text
    cannot be read.
    """
    texts = [] if suite is None else [each for task in suite.tasks for each in _task_texts(task, str(suite.folder))]
    if held_out_text is not None:
        for file in text_files(held_out_text):
            lines = read_text(file).split("\n")
            parts = (*_paragraphs(lines), *_windows(lines))
            texts += [EvalText(str(held_out_text), f"{file.name}:{line}", text) for line, text in parts]
    return texts


def _task_texts(task: Task, name: str) -> Iterator[EvalText]:
    if isinstance(task, ShortTask):
        return _short_texts(task, name)
    return _hub_texts(task, name) if isinstance(task, HubTask) else _local_texts(task, name)


def _short_texts(task: ShortTask, name: str) -> Iterator[EvalText]:
    """Each item's question, with each right answer behind it; examples as well."""
    for item in task.items:
        place = Path(item.where).name
        for text in (item.prompt, *(f"{item.prompt} {answer}" for answer in _short_answers(item))):
            yield EvalText(name, place, text, item.cluster if task.keys.cluster is not None else None)
    for shot in task.shots:
        yield EvalText(name, f"{task.name}: an example", f"{shot.prompt} {shot.answer}")


def _short_answers(item: Item) -> list[str]:
    target = item.fields.get(ANSWER, item.target)
    if isinstance(target, int) and item.choices:
        target = item.choices[target]
    return [str(each) for each in (target if isinstance(target, (list, tuple)) else [target]) if each is not None]


def _hub_texts(task: HubTask, name: str) -> Iterator[EvalText]:
    """Each item's prompt, as lm-eval makes it."""
    for place, doc in zip(task.places, task.docs, strict=True):
        yield EvalText(name, f"{task.name}:{place}", str(task.built.doc_to_text(dict(doc))))


def _local_texts(task: EvalTask, name: str) -> Iterator[EvalText]:
    file = Path(str(task.config["dataset_kwargs"]["data_files"][task.config["test_split"]])).name
    prompt_fields = _prompt_fields(task)
    for row, doc in enumerate(task.docs, start=1):
        group = doc.get(GROUP_FIELD)
        for text in _item_texts(task, doc, prompt_fields):
            yield EvalText(name, f"{file}:{row}", text, None if group is None else str(group))


def _item_texts(task: EvalTask, doc: Mapping[str, Any], prompt_fields: list[str]) -> Iterator[str]:
    asked = [doc[name] for name in prompt_fields if isinstance(doc.get(name), str)]
    yield from asked
    for answer in _right_answers(task, doc):
        yield " ".join((*asked, answer))
        if len(words(answer)) >= NGRAM_WORDS:  # a shorter one, such as "Paris", says nothing without its question
            yield answer


def _right_answers(task: EvalTask, doc: Mapping[str, Any]) -> list[str]:
    target = doc[task.config["doc_to_target"]]
    if task.config["output_type"] == "multiple_choice":
        return [str(doc[task.config["doc_to_choice"]][target])]
    return [str(each) for each in target] if isinstance(target, list) else [str(target)]


def _prompt_fields(task: EvalTask) -> list[str]:
    """The fields that the prompt is made from: the one that ``doc_to_text`` names, or all that its template reads."""
    from jinja2 import Environment, TemplateSyntaxError, meta

    prompt, names = str(task.config["doc_to_text"]), list(dict.fromkeys(name for doc in task.docs for name in doc))
    if prompt in names:
        return [prompt]
    try:
        read = meta.find_undeclared_variables(Environment().parse(prompt))
    except TemplateSyntaxError:  # lm-eval built the prompts with it: what it reads cannot be told, so all of them
        read = set(names)
    return [name for name in names if name in read and name not in ITEM_FIELDS]


def _paragraphs(lines: list[str]) -> Iterator[tuple[int, str]]:
    """The number of the first line, and the text, of each paragraph of 8 to 32 words."""
    paragraph: list[str] = []
    for number, line in enumerate([*lines, ""], start=1):
        if line.strip():
            paragraph.append(line)
        elif paragraph:
            if NGRAM_WORDS <= len(words("\n".join(paragraph))) <= WINDOW_WORDS:
                yield number - len(paragraph), "\n".join(paragraph)
            paragraph = []


def _windows(lines: list[str]) -> Iterator[tuple[int, str]]:
    """The number of the line it starts in, and the words, of each run of 32 words; the last may have fewer."""
    numbered = [(number, word) for number, line in enumerate(lines, start=1) for word in words(line)]
    for start in range(0, max(len(numbered) - WINDOW_WORDS // 2, 1), WINDOW_WORDS // 2):
        window = numbered[start : start + WINDOW_WORDS]
        if len(window) >= NGRAM_WORDS:
            yield window[0][0], " ".join(word for _, word in window)

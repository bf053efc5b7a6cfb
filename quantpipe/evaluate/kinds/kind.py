"""What a kind of task is: its keys in the suite file, what it asks, and how an answer becomes a score.

Knows no engine and no file format. The docstrings under the fields are the reference of the suite file.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, Protocol

from pydantic import Field, model_validator

from quantpipe.calibration.definition.mapping import Text, Texts, canonical
from quantpipe.recipe.section import Count, Section, Seed

Response = str | tuple[float, ...]
TaskName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=100)]
ID, TARGET, ANSWER, DOMAIN = "id", "target", "answer", "domain"
MOST_QUOTED_CHARS = 60


class FewShot(Section):
    """Examples with their answers before each question."""

    num: Count
    """How many; the same ones, in the same order, for every item."""
    file: Text | None = None
    """File that they are taken from, with the columns of the task's own. Absent: the task's file, whose rows are then
    no items."""
    seed: Seed = 0
    """Which rows are taken."""
    separator: str = "\n\n"
    """What is written behind each example, where the task is not `chat`."""


class TaskKeys(Section):
    """What a task of every kind may say."""

    name: TaskName
    """Name of the task in reports."""
    file: Text
    """CSV, TSV, JSON Lines, JSON or Parquet file, relative to the suite's file; each also with `.gz`."""
    encoding: Text = "utf-8"
    """How the file's text is encoded."""
    delimiter: Annotated[str, Field(min_length=1, max_length=1)] | None = None
    """What separates columns of a CSV file. Absent: a tab in `.tsv`, otherwise a comma."""
    map: dict[Text, Text] = Field(default_factory=dict)
    """Our field -> their column: `{id: ticket_id, target: intent}`. Fields: `id`, `target`, what the kind needs,
    `answer` (what few-shot examples answer), `domain` (by which reports group), or any that prompt, slices or cluster
    name. Absent: columns are called as our fields."""
    prompt: Text
    """The question: Jinja over the row's fields, in a sandbox."""
    chat: bool = False
    """Whether the prompt goes through the model's chat template, as the user's message."""
    system: Text | None = None
    """The system message; needs `chat`."""
    answer_prefix: str | None = None
    """What stands between prompt and answer, in examples and before choices. Absent: a space, nothing with `chat`."""
    few_shot: FewShot | None = None
    """Examples before each question. Absent: none."""
    slices: Texts = ()
    """Fields by which results are also shown and judged."""
    cluster: Text | None = None
    """Field that items which depend on each other share, such as a customer. Absent: every item stands for itself."""
    num_items: Count | None = None
    """How many items are asked, chosen by `seed`. Absent: all."""
    seed: Seed = 0
    """Which items are chosen."""

    @model_validator(mode="after")
    def _chat_only(self) -> "TaskKeys":
        if self.system is not None and not self.chat:
            raise ValueError("system needs chat: true; plain prompts have no system message")
        if self.chat and self.answer_prefix is not None:
            raise ValueError("answer_prefix is for plain prompts; the chat template says where an answer begins")
        return self

    @property
    def prefix(self) -> str:
        """What stands between prompt and answer."""
        return ("" if self.chat else " ") if self.answer_prefix is None else self.answer_prefix

    def item_fields(self) -> tuple[str, ...]:
        """Fields beside ``id`` that every row must have for this kind."""
        return (TARGET,)

    def other_files(self) -> tuple[str, ...]:
        """Files beside the rows that scores depend on, relative to the suite's file."""
        return ()

    def choices_of(self, fields: Mapping[str, Any]) -> tuple[str, ...]:
        """The choices of a row; none where the model is to write. ValueError where they are no list of choices."""
        return ()

    def shot_answer(self, target: Any) -> str:
        """What an example answers, by its target. ValueError where that cannot be told."""
        return text_of(target)


class TextKeys(TaskKeys):
    """What a task may say whose answer is written: greedily, up to a stop string."""

    max_tokens: Count = 64
    """Most tokens of an answer."""
    stop: Texts | None = None
    """Strings that end an answer, and are no part of it. Absent: the end of the line, none with `chat`."""

    @property
    def stops(self) -> tuple[str, ...]:
        """Strings that end an answer."""
        return (() if self.chat else ("\n",)) if self.stop is None else self.stop


@dataclass(frozen=True)
class Item:
    """One question: ``where`` (``file:row``) is how an error names it, ``fields`` what its row holds by our names."""

    id: str
    where: str
    prompt: str
    target: Any = None
    fields: Mapping[str, Any] = field(default_factory=dict)
    choices: tuple[str, ...] = ()
    cluster: str = ""
    domain: str = ""
    slices: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Scored:
    """``score`` from 0 to 1, what the answer comes to, and for choices by how many nats the best was ahead."""

    score: float
    prediction: str
    margin: float | None = None


class Scorer(Protocol):
    """How the answers of one task are scored."""

    def check(self, item: Item) -> None:
        """Raise ValueError for an item that no answer could be right for, or that cannot be scored."""

    def score(self, item: Item, response: Response) -> Scored:
        """What an answer is worth: generated text, or the log-likelihood of each choice."""


@dataclass(frozen=True)
class Kind:
    """``asks``: for log-likelihoods of choices, or for text. ``says`` is the documentation's sentence about it.

    ``open`` takes the task's keys, the folder that paths start from, and what begins an error about a key. It raises
    DataError for keys that cannot be used, and ``prepare`` does so, before anything long, for what this machine or a
    server does not provide. ``num_threads``: how many answers may be scored side by side.
    """

    keys: type[TaskKeys]
    asks: Literal["choices", "text"]
    says: str
    open: Callable[[Any, Path, Callable[[str], str]], Scorer]
    prepare: Callable[[Any, Callable[[str], str]], None] | None = None
    num_threads: int = 1


def text_of(value: Any) -> str:
    """A single value of a row as text. ValueError where it is empty or no single value."""
    if isinstance(value, (list, tuple, dict)):
        raise ValueError(f"found a {'mapping' if isinstance(value, dict) else 'list'} where one value belongs")
    text = canonical(value)
    if not text:
        raise ValueError("found nothing where a value belongs")
    return text


def texts_of(value: Any) -> tuple[str, ...]:
    """One value of a row or a list of them, as texts. ValueError where there is none."""
    values = value if isinstance(value, (list, tuple)) else (value,)
    if not values:
        raise ValueError("found an empty list where a value belongs")
    return tuple(text_of(each) for each in values)


def written(response: Response) -> str:
    """The generated text."""
    assert isinstance(response, str)  # who runs a kind asks what it asks for
    return response


def quoted(text: str) -> str:
    """A text as an error shows it."""
    return repr(text if len(text) <= MOST_QUOTED_CHARS else f"{text[:MOST_QUOTED_CHARS]}...")

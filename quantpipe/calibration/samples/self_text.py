"""What is asked of a model that writes its own calibration text, and what comes back. Knows no model and no engine.

A build gets a ``WriteText`` from above: calibration runs nothing that generates.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from quantpipe.calibration.definition.sources import SelfSource
from quantpipe.calibration.rows import Message
from quantpipe.errors import DataError


@dataclass(frozen=True)
class SelfTextRequest:
    """How much to write and how.

    ``max_tokens`` bounds one sample; ``openers`` are (language, beginning) pairs that samples start with in turn, none
    where the model begins freely. The same request gives the same texts.
    """

    num_samples: int
    max_tokens: int
    temperature: float
    top_p: float
    openers: tuple[tuple[str, str], ...]
    seed: int


@dataclass(frozen=True)
class WrittenText:
    """One sample: a conversation from a chat model, plain text (may be empty) from another. Already redacted."""

    content: str | tuple[Message, ...]
    language: str


WriteText = Callable[[SelfTextRequest], Iterator[WrittenText]]


def request_of(source: SelfSource, seed: int) -> SelfTextRequest:
    """What a source of kind self asks for; ``seed`` is the build's, so another seed has other texts."""
    most = max((len(beginnings) for beginnings in source.openers.values()), default=0)
    openers = tuple(
        (language, beginnings[turn % len(beginnings)])
        for turn in range(most)
        for language, beginnings in source.openers.items()
        if beginnings
    )
    num_samples = min(source.num_samples, source.limit or source.num_samples)
    return SelfTextRequest(num_samples, source.max_tokens, source.temperature, source.top_p, openers, seed)


def read_self(source: SelfSource, seed: int, write: WriteText | None) -> Iterator[tuple[str, WrittenText]]:
    """The model's texts with what each is called, ``self:1`` and so on; texts may be empty.

    Raises DataError where nobody can write: without a model only other sources can be read.
    """
    if write is None:
        raise DataError(f"{source.label}: kind self needs the model that writes; give one with --model or --recipe")
    for number, text in enumerate(write(request_of(source, seed)), start=1):
        yield f"{source.label}:{number}", text

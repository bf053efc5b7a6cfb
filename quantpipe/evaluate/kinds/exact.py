"""``exact``: the answer equals an accepted one, apart from what the task disregards."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from quantpipe.evaluate.kinds.kind import Item, Kind, Response, Scored, TextKeys, quoted, texts_of, written
from quantpipe.evaluate.kinds.normal_answer import Disregards, normal_answer


class ExactKeys(TextKeys):
    """A task of the kind `exact`; the target is an answer, or a list of accepted ones."""

    kind: Literal["exact"]
    """`exact`."""
    disregard: Disregards = ()
    """What does not count: `case`, `punctuation`, `articles` (English), `unicode` (compatibility forms, such as full
    width). White space around and between words never counts."""

    def shot_answer(self, target: Any) -> str:
        return texts_of(target)[0]


@dataclass(frozen=True)
class ExactScorer:
    """Compares normalised texts."""

    keys: ExactKeys

    def check(self, item: Item) -> None:
        for text in texts_of(item.target):
            if not normal_answer(text, self.keys.disregard):
                raise ValueError(f"nothing is left of the target {quoted(text)} without what is disregarded")

    def score(self, item: Item, response: Response) -> Scored:
        found = normal_answer(written(response), self.keys.disregard)
        accepted = {normal_answer(text, self.keys.disregard) for text in texts_of(item.target)}
        return Scored(float(found in accepted), found)


def _open(keys: ExactKeys, folder: Path, place: Callable[[str], str]) -> ExactScorer:
    return ExactScorer(keys)


KIND = Kind(ExactKeys, "text", "the answer equals an accepted one", _open)

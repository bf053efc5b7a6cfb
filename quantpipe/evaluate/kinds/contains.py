"""``contains``: the answer has one of the wanted texts in it, or all of them."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from quantpipe.evaluate.kinds.kind import Item, Kind, Response, Scored, TextKeys, quoted, texts_of, written
from quantpipe.evaluate.kinds.normal_answer import Disregards, normal_answer


class ContainsKeys(TextKeys):
    """A task of the kind `contains`; the target is a text, or a list of them."""

    kind: Literal["contains"]
    """`contains`."""
    wanted: Literal["any", "all"] = "any"
    """Whether `any` text of a target is enough, or `all` must be there."""
    disregard: Disregards = ("case",)
    """What does not count, as for `exact`."""

    def shot_answer(self, target: Any) -> str:
        return texts_of(target)[0]


@dataclass(frozen=True)
class ContainsScorer:
    """Looks for normalised texts; the prediction is what was found of them."""

    keys: ContainsKeys

    def check(self, item: Item) -> None:
        for text in texts_of(item.target):
            if not normal_answer(text, self.keys.disregard):
                raise ValueError(f"nothing is left of the target {quoted(text)} without what is disregarded")

    def score(self, item: Item, response: Response) -> Scored:
        text, wanted = normal_answer(written(response), self.keys.disregard), texts_of(item.target)
        found = [each for each in wanted if normal_answer(each, self.keys.disregard) in text]
        is_right = len(found) == len(wanted) if self.keys.wanted == "all" else bool(found)
        return Scored(float(is_right), ", ".join(found))


def _open(keys: ContainsKeys, folder: Path, place: Callable[[str], str]) -> ContainsScorer:
    return ContainsScorer(keys)


KIND = Kind(ContainsKeys, "text", "the answer has a wanted text in it", _open)

"""``regex``: the answer matches a pattern, and where that has a group, the group is the target."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import regex
from pydantic import AfterValidator

from quantpipe.errors import DataError
from quantpipe.evaluate.kinds.kind import TARGET, Item, Kind, Response, Scored, TextKeys, text_of, texts_of, written

MOST_SECONDS = 5.0  # for one answer: some patterns take for ever


def _legal(pattern: str) -> str:
    _compiled(pattern)
    return pattern


def _compiled(pattern: str) -> Any:
    try:
        return regex.compile(pattern)
    except regex.error as error:
        raise ValueError(f"found {pattern!r}, not a regular expression: {error}; correct it") from None


class RegexKeys(TextKeys):
    """A task of the kind `regex`."""

    kind: Literal["regex"]
    """`regex`."""
    pattern: Annotated[str, AfterValidator(_legal)] | None = None
    """Regular expression (of Python's `regex` library) for all items. With a group in it, what the first group matched
    must be the target. Absent: the target is an item's own pattern."""
    place: Literal["anywhere", "whole"] = "anywhere"
    """Whether the pattern must match `anywhere` in the answer, or the `whole` of it without spaces around."""

    @property
    def has_group(self) -> bool:
        """Whether a part of the match is compared with the target."""
        return self.pattern is not None and _compiled(self.pattern).groups > 0

    def item_fields(self) -> tuple[str, ...]:
        return (TARGET,) if self.pattern is None or self.has_group else ()

    def shot_answer(self, target: Any) -> str:
        raise ValueError("a pattern is no answer; map a column to answer")


@dataclass(frozen=True)
class RegexScorer:
    """Searches the answer; the prediction is what matched."""

    keys: RegexKeys

    def check(self, item: Item) -> None:
        if self.keys.pattern is None:
            _compiled(text_of(item.target))
        elif self.keys.has_group:
            texts_of(item.target)

    def score(self, item: Item, response: Response) -> Scored:
        pattern = _compiled(text_of(item.target) if self.keys.pattern is None else self.keys.pattern)
        text = written(response).strip()
        search = pattern.fullmatch if self.keys.place == "whole" else pattern.search
        try:
            match = search(text, timeout=MOST_SECONDS)
        except TimeoutError:
            text = f"the pattern takes more than {MOST_SECONDS:g} s on an answer; simplify it"
            raise DataError(f"{item.where}: item {item.id!r}: {text}") from None
        if match is None:
            return Scored(0.0, "")
        if not self.keys.has_group:
            return Scored(1.0, match[0])
        found = (match[1] or "").strip()
        return Scored(float(found in texts_of(item.target)), found)


def _open(keys: RegexKeys, folder: Path, place: Callable[[str], str]) -> RegexScorer:
    return RegexScorer(keys)


KIND = Kind(RegexKeys, "text", "the answer matches a pattern, and a group in it is the target", _open)

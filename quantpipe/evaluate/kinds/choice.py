"""``choice``: the most likely of several given answers, by the log-likelihood of each behind the prompt."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import PlainValidator

from quantpipe.calibration.definition.mapping import ONE_OR_MORE
from quantpipe.errors import suggest
from quantpipe.evaluate.kinds.kind import TARGET, Item, Kind, Response, Scored, TaskKeys, quoted, text_of, texts_of
from quantpipe.recipe.document import describe


def _choices(value: Any) -> tuple[str, ...] | str:
    if isinstance(value, str) and value:
        return value
    if not isinstance(value, (list, tuple)) or not all(isinstance(each, str) for each in value):
        raise ValueError(f"found {describe(value)}; allowed: a list of texts, or the name of a field with such a list")
    _check(value)
    return tuple(value)


class ChoiceKeys(TaskKeys):
    """A task of the kind `choice`."""

    kind: Literal["choice"]
    """`choice`."""
    choices: Annotated[tuple[str, ...] | str, PlainValidator(_choices), ONE_OR_MORE]
    """The choices, or the name of a field that holds a row's list of them."""
    length: Literal["any", "characters"] = "any"
    """`any`: the likeliest choice wins; `characters`: the likeliest per character, for choices of unlike length."""

    def item_fields(self) -> tuple[str, ...]:
        return (TARGET, self.choices) if isinstance(self.choices, str) else (TARGET,)

    def choices_of(self, fields: Mapping[str, Any]) -> tuple[str, ...]:
        if not isinstance(self.choices, str):
            return self.choices
        found = fields[self.choices]
        if not isinstance(found, (list, tuple)):
            raise ValueError(f"field {self.choices!r} holds no list of choices")
        choices = texts_of(found)
        _check(choices)
        return choices


def _check(choices: Sequence[str]) -> None:
    if len(choices) < 2 or len(set(choices)) < len(choices) or not all(choice.strip() for choice in choices):
        raise ValueError("choices are two or more, all different, none empty")


@dataclass(frozen=True)
class ChoiceScorer:
    """The best choice must be the target: its text, or its place counted from 0."""

    keys: ChoiceKeys

    def check(self, item: Item) -> None:
        _right(item)

    def score(self, item: Item, response: Response) -> Scored:
        assert not isinstance(response, str)  # one log-likelihood for each choice
        return best_choice(item.choices, response, _right(item), self.keys.length == "characters")


def best_choice(choices: Sequence[str], values: Sequence[float], right: int, is_per_character: bool) -> Scored:
    """The likeliest choice, the first of equals; its margin in nats, per character where so compared."""
    lengths = [max(len(choice), 1) if is_per_character else 1 for choice in choices]
    compared = [value / length for value, length in zip(values, lengths, strict=True)]
    best = compared.index(max(compared))
    others = compared[:best] + compared[best + 1 :]
    return Scored(float(best == right), choices[best], compared[best] - max(others))


def _right(item: Item) -> int:
    target, choices = item.target, item.choices
    if isinstance(target, int) and not isinstance(target, bool) and 0 <= target < len(choices):
        return target
    text = text_of(target)
    if text not in choices:
        raise ValueError(f"the target {quoted(text)} is not among its {len(choices)} choices{suggest(text, choices)}")
    return choices.index(text)


def _open(keys: ChoiceKeys, folder: Path, place: Callable[[str], str]) -> ChoiceScorer:
    return ChoiceScorer(keys)


KIND = Kind(ChoiceKeys, "choices", "the choice with the highest log-likelihood is the target", _open)

"""What came of asking one model the items of a suite. Knows neither how they were asked nor how they are compared."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class ItemResult:
    """One item's outcome: ``score`` from 0 to 1, which is 0 or 1 where an item is either right or wrong.

    ``prompt_digest`` covers the token ids of all that was asked about it. ``response`` is the generated text, or the
    log-likelihood of each choice; ``prediction`` is what it comes to: the choice, or the answer that was compared.
    ``margin`` is by how much, in nats, the best choice was ahead of the next; None where there are no choices.
    ``slices`` are the item's fields by which results are also shown and judged, such as its language.
    """

    task: str
    doc_id: str
    domain: str
    cluster: str
    score: float
    prompt_digest: str
    response: str | tuple[float, ...]
    prediction: str = ""
    margin: float | None = None
    slices: Mapping[str, str] = field(default_factory=dict)

    @property
    def correct(self) -> bool:
        """Whether it is wholly right."""
        return self.score == 1.0


@dataclass(frozen=True)
class SuiteResult:
    """All items of one model, in the order of the suite."""

    suite: str
    suite_digest: str
    items: tuple[ItemResult, ...]

    @property
    def task_scores(self) -> dict[str, float]:
        """Mean score by task."""
        return _means((item.task, item.score) for item in self.items)

    @property
    def domain_scores(self) -> dict[str, float]:
        """Mean score by domain."""
        return _means((item.domain, item.score) for item in self.items)


def _means(scores: Iterable[tuple[str, float]]) -> dict[str, float]:
    by_name: dict[str, list[float]] = {}
    for name, score in scores:
        by_name.setdefault(name, []).append(score)
    return {name: sum(scores) / len(scores) for name, scores in by_name.items()}

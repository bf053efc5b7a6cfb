"""Two models' results on the same items, side by side: the whole suite, a task, or a slice. Runs nothing."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from quantpipe.errors import DataError
from quantpipe.evaluate.intervals import DEFAULT_CONFIDENCE
from quantpipe.evaluate.items import ItemResult, SuiteResult
from quantpipe.evaluate.paired import exact_mcnemar_p, own_accuracy, paired_accuracy, paired_recovery
from quantpipe.gate.judge import Measurement

NEAR_TIE_NATS = 0.1  # the best choice is less than 1.11 times as likely as the next: any rounding may turn it
Pair = tuple[ItemResult, ItemResult]


class OtherPromptsError(DataError):
    """Two models were given different tokens for the same item."""


@dataclass(frozen=True)
class Comparison:
    """Items of a suite as (baseline, candidate), in the order of the suite. Counts are of items."""

    pairs: tuple[Pair, ...]

    def select(self, task: str | None = None, slices: Mapping[str, str] | None = None) -> "Comparison":
        """Only the items of a task, and of them those that have these fields."""
        wanted = (slices or {}).items()
        return Comparison(
            tuple(
                pair
                for pair in self.pairs
                if task in (None, pair[0].task) and all(pair[0].slices.get(name) == value for name, value in wanted)
            )
        )

    def of_domain(self, domain: str) -> "Comparison":
        """Only the items of a domain."""
        return Comparison(tuple(pair for pair in self.pairs if pair[0].domain == domain))

    def loss(self, confidence: float = DEFAULT_CONFIDENCE) -> Measurement:
        """Points lost (``paired_accuracy``)."""
        return paired_accuracy(self._base_scores, self._cand_scores, self._clusters, confidence)

    def recovery(self, confidence: float = DEFAULT_CONFIDENCE) -> Measurement:
        """Share of the baseline's accuracy that is left (``paired_recovery``)."""
        return paired_recovery(self._base_scores, self._cand_scores, self._clusters, confidence)

    def own(self, confidence: float = DEFAULT_CONFIDENCE) -> Measurement:
        """The candidate's own accuracy (``own_accuracy``)."""
        return own_accuracy(self._cand_scores, self._clusters, confidence)

    @cached_property
    def lost(self) -> tuple[Pair, ...]:
        """Items on which the candidate scores less."""
        return tuple(pair for pair in self.pairs if pair[1].score < pair[0].score)

    @cached_property
    def gained(self) -> tuple[Pair, ...]:
        """Items on which it scores more."""
        return tuple(pair for pair in self.pairs if pair[1].score > pair[0].score)

    @property
    def num_changed(self) -> int:
        """Items with another prediction, whether both are right, both wrong, or one of each."""
        return sum(base.prediction != cand.prediction for base, cand in self.pairs)

    @property
    def num_near_ties(self) -> int:
        """Flips between choices of which neither model preferred one by much."""
        return sum(is_near_tie(pair) for pair in (*self.lost, *self.gained))

    @property
    def mcnemar_p(self) -> float:
        """Of the exact test on flips both ways."""
        return exact_mcnemar_p(len(self.lost), len(self.gained))

    @property
    def num_clusters(self) -> int:
        """Independent groups of items."""
        return len(set(self._clusters))

    @property
    def _base_scores(self) -> list[float]:
        return [base.score for base, _ in self.pairs]

    @property
    def _cand_scores(self) -> list[float]:
        return [cand.score for _, cand in self.pairs]

    @property
    def _clusters(self) -> list[str]:
        return [base.cluster for base, _ in self.pairs]


def is_near_tie(pair: Pair) -> bool:
    """Whether both models were all but undecided between the choices."""
    return all(item.margin is not None and item.margin < NEAR_TIE_NATS for item in pair)


def compare(base: SuiteResult, cand: SuiteResult) -> Comparison:
    """Pair what both models made of a suite. DataError unless both were asked exactly the same, in one
    order: OtherPromptsError where only the tokens differ."""
    if len(base.items) != len(cand.items):
        raise DataError(f"{base.suite}: {len(base.items)} items of the baseline, {len(cand.items)} of the candidate")
    if base.suite_digest != cand.suite_digest:
        raise DataError(f"{base.suite}: the suite changed between the two runs; run baseline and candidate again")
    for ours, theirs in zip(base.items, cand.items, strict=True):
        where = f"{base.suite}: item {ours.task}/{ours.doc_id}"
        if (ours.task, ours.doc_id, ours.cluster) != (theirs.task, theirs.doc_id, theirs.cluster):
            raise DataError(f"{where} of the baseline is paired with {theirs.task}/{theirs.doc_id} of the candidate")
        if ours.prompt_digest != theirs.prompt_digest:
            text = "the two models were given different prompt tokens; use the same tokenizer"
            raise OtherPromptsError(f"{where}: {text}")
    return Comparison(tuple(zip(base.items, cand.items, strict=True)))


def unknown_scope(items: Sequence[ItemResult], task: str | None, slices: Mapping[str, str]) -> str | None:
    """Why no item can be meant: a task or a slice that nobody has. None where some item has each."""
    tasks = dict.fromkeys(item.task for item in items)
    if task is not None and task not in tasks:
        return f"task: no item is of task '{task}' (known: {', '.join(tasks) or 'none'})"
    for name, value in slices.items():
        values = dict.fromkeys(item.slices[name] for item in items if name in item.slices)
        if value not in values:
            fields = dict.fromkeys(field for item in items for field in item.slices)
            known = f"its values: {', '.join(values)}" if values else f"known fields: {', '.join(fields) or 'none'}"
            return f"slice: no item has {name} '{value}' ({known})"
    return None

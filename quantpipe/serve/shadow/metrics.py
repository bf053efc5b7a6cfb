"""What is counted of a shadow: how its answers compare, in Prometheus form and for people. Never any text."""

from collections import Counter
from collections.abc import Sequence
from typing import Literal

from prometheus_client import CollectorRegistry, Histogram
from prometheus_client import Counter as PrometheusCounter

from quantpipe.serve.recent import RecentValues
from quantpipe.serve.request_metrics import LENGTHS, TPOT_S, TTFT_S
from quantpipe.serve.shadow.comparison import ChoiceComparison, ChoiceRecord

POSITIONS = (0, *LENGTHS)
Outcome = Literal["compared", "not_comparable", "dropped", "abandoned", "failed"]


class ShadowMetrics:
    """Counts requests by outcome, and of those that both arms answered what came of it.

    ``recent`` holds, of the last minute, ``ttft_s`` and ``tpot_s`` of both arms, by label.
    """

    def __init__(self, registry: CollectorRegistry, labels: tuple[str, str]) -> None:
        self.outcomes: Counter[str] = Counter()
        self.texts: Counter[str] = Counter()
        self.reasons: Counter[str] = Counter()
        self.num_tokens: Counter[str] = Counter()
        self.first_differences = RecentValues()
        self.recent = {name: {label: RecentValues() for label in labels} for name in ("ttft_s", "tpot_s")}
        self._labels = labels

        def counter(name: str, text: str, *labels: str) -> PrometheusCounter:
            return PrometheusCounter(f"quantpipe:shadow_{name}", text, labels, registry=registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...], labels: tuple[str, ...]) -> Histogram:
            return Histogram(f"quantpipe:shadow_{name}", text, labels, buckets=buckets, registry=registry)

        self._outcomes = counter("requests", "Requests that a shadow was to answer, too", "outcome")
        self._texts = counter("texts", "Choices of both arms, compared", "result")
        self._reasons = counter("finish_reasons", "Why the choices of both arms ended, compared", *labels)
        text = "Tokens before the first that differs, of choices that differ"
        self._differences = histogram("first_difference_tokens", text, POSITIONS, ())
        self._lengths = histogram("generation_tokens", "Tokens of choices of both arms", LENGTHS, ("arm",))
        text = "Handed to the engine to first text, of choices of both arms"
        self._ttft = histogram("time_to_first_token_seconds", text, TTFT_S, ("arm",))
        text = "After the first text, of choices of both arms"
        self._tpot = histogram("time_per_output_token_seconds", text, TPOT_S, ("arm",))

    def count(self, outcome: Outcome) -> None:
        """A request had this outcome."""
        self.outcomes[outcome] += 1
        self._outcomes.labels(outcome).inc()

    def observe_times(self, answers: Sequence[Sequence[ChoiceRecord]]) -> None:
        """Both arms answered a request: the choices of each, in the order of their labels."""
        for label, choices in zip(self._labels, answers, strict=True):
            for choice in choices:
                self.num_tokens[label] += choice.num_tokens
                self._lengths.labels(label).observe(choice.num_tokens)
                self._ttft.labels(label).observe(choice.ttft_s)
                self.recent["ttft_s"][label].add(choice.ttft_s)
                if choice.tpot_s is not None:
                    self._tpot.labels(label).observe(choice.tpot_s)
                    self.recent["tpot_s"][label].add(choice.tpot_s)

    def observe_texts(self, choices: Sequence[ChoiceComparison]) -> None:
        """The answers can be compared, too."""
        for choice in choices:
            text = "equal" if choice.is_text_equal else "different"
            self.texts[text] += 1
            self.reasons["/".join(choice.reasons)] += 1
            self._texts.labels(text).inc()
            self._reasons.labels(*choice.reasons).inc()
            if choice.first_difference is not None:
                self._differences.observe(choice.first_difference)
                self.first_differences.add(choice.first_difference)

"""What is counted of the ways that requests take to arms."""

from collections import Counter
from collections.abc import Mapping

from prometheus_client import CollectorRegistry
from prometheus_client import Counter as PrometheusCounter

from quantpipe.serve.arms.router import ChosenBy


class RoutingMetrics:
    """Requests by the arm that took them, and why it was that one."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._numbers: dict[str, Counter[str]] = {}
        self._routed = PrometheusCounter(
            "quantpipe:routed_requests", "Requests that an arm took", ("arm", "by"), registry=registry
        )

    def count(self, arm: str, by: ChosenBy) -> None:
        """An arm took a request."""
        self._numbers.setdefault(arm, Counter())[by] += 1
        self._routed.labels(arm, by).inc()

    def numbers(self, arm: str) -> Mapping[str, int]:
        """Those of one arm so far, by reason."""
        return self._numbers.get(arm, Counter())

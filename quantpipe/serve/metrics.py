"""What the server counts, in Prometheus form. Names after ``quantpipe:`` are those that vLLM uses.

Where there are two arms, the label ``arm`` tells whose a series is; where there is one, no series has it.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client import Counter as PrometheusCounter
from prometheus_client.core import GaugeMetricFamily, Metric

from quantpipe.serve.engine_metrics import EngineCollector, EngineReader
from quantpipe.serve.exchange import Exchange
from quantpipe.serve.request_metrics import RequestFamilies, RequestMetrics


class OpenCollector:
    """What admission counts: the requests between their arrival and the end of their response."""

    def __init__(self, read_open: Callable[[], tuple[int, int]]) -> None:
        self._read_open = read_open

    def collect(self) -> Iterator[Metric]:
        """The families, as prometheus_client wants them."""
        num_prompts, num_tokens = self._read_open()
        yield GaugeMetricFamily("quantpipe:open_prompts", "Prompts being answered, each sample counted", num_prompts)
        yield GaugeMetricFamily("quantpipe:open_tokens", "Their tokens, with those they may yet get", num_tokens)


class ServerMetrics:
    """Counters of one server, in a ``registry`` of their own. ``requests`` are those of each of its ``engines``.

    ``read_open`` gives how many prompts and tokens are open.
    """

    def __init__(self, engines: Sequence[EngineReader], read_open: Callable[[], tuple[int, int]]) -> None:
        self.errors: Counter[str] = Counter()
        self.registry = CollectorRegistry()
        self.registry.register(EngineCollector(engines))
        self.registry.register(OpenCollector(read_open))
        self._labels = ("arm",) if len(engines) > 1 else ()
        families = RequestFamilies(self.registry, self._labels)
        self.requests = tuple(RequestMetrics(families, engine.arm if self._labels else None) for engine in engines)
        self._arms = {engine.arm: own for engine, own in zip(engines, self.requests, strict=True)}
        self._errors = self._counter("request_errors", "Requests that ended with an error", "code")
        self._responses = self._counter("http_responses", "Responses", "status")
        self._ignored = PrometheusCounter(
            "quantpipe:ignored_fields", "Fields that mean nothing here", registry=self.registry
        )

    def count_ignored(self, num_fields: int) -> None:
        """A request had so many fields that were ignored."""
        self._ignored.inc(num_fields)

    def exposition(self) -> bytes:
        """The text that Prometheus scrapes."""
        return bytes(generate_latest(self.registry))

    def count_exchange(self, exchange: Exchange) -> None:
        """A request was answered, or its client is gone. One that never came to an arm has an empty label."""
        labels = (exchange.arm or "",) if self._labels else ()
        if exchange.status is not None:
            self._responses.labels(str(exchange.status), *labels).inc()
        if exchange.error is not None:
            self.errors[exchange.error] += 1
            self._errors.labels(exchange.error, *labels).inc()
        if exchange.first_s is not None:
            self._arms.get(exchange.arm, self.requests[0]).count_prompt_tokens(exchange.num_prompt_tokens)

    def _counter(self, name: str, text: str, label: str) -> PrometheusCounter:
        return PrometheusCounter(f"quantpipe:{name}", text, (label, *self._labels), registry=self.registry)

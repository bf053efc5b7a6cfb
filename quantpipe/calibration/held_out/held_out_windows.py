"""Windows of equal length out of rows of several domains, in proportion to what each domain has.

Knows rows as candidates, and a domain by its name and share. A domain that runs dry leaves what it lacks to windows of
several domains, made of what is left of those that are dry, and then to the others.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

from quantpipe.calibration.rows import Sample
from quantpipe.calibration.sampling.candidates import Candidates
from quantpipe.calibration.sampling.pool import Entry, Pool, ranking
from quantpipe.calibration.sampling.quotas import divide

SEVERAL = "several domains"
MOST_DOMAINS = 256  # rows of any further domain count as of several


@dataclass(frozen=True)
class HeldOutWindow:
    """Token ids to evaluate on, all of one domain; of rows that fill no window of their own, of several."""

    domain: str
    token_ids: tuple[int, ...]


class DomainPools:
    """The pool of each domain, domains in an order that follows from a hash of their names.

    Of more than ``MOST_DOMAINS`` the first in this order have a pool of their own, whatever order the rows come in.
    """

    def __init__(self, max_chars: int) -> None:
        self.has_more = False  # than have a pool of their own
        self._max_chars = max_chars
        self._rank = ranking(0)
        self._ranks: dict[str, int] = {}
        self._pools: dict[str, Pool[Sample]] = {}
        self._several: Pool[Sample] = Pool(max_chars)

    def pool(self, domain: str) -> Pool[Sample]:
        """Where rows of this domain belong."""
        if domain in self._pools:
            return self._pools[domain]
        if len(self._pools) == MOST_DOMAINS:
            self.has_more = True
            last = max(self._ranks, key=self._ranks.__getitem__)
            if self._rank(domain) > self._ranks[last]:
                return self._several
            self._several.absorb(self._pools.pop(last))
            del self._ranks[last]
        self._ranks[domain] = self._rank(domain)
        self._pools[domain] = Pool(self._max_chars)
        return self._pools[domain]

    def items(self) -> Iterator[tuple[str, Pool[Sample]]]:
        """Names and pools; the last is that of several domains, where there are too many."""
        for name in sorted(self._pools, key=self._ranks.__getitem__):
            yield name, self._pools[name]
        if self.has_more:
            yield SEVERAL, self._several


@dataclass
class Cutter:
    """Rows of one domain in, windows out; ``rest`` holds the tokens that fill no window yet."""

    domain: str
    share: float
    waiting: deque[Entry[Sample]]
    candidates: Candidates
    window_tokens: int
    is_truncating: bool
    rest: list[int] = field(default_factory=list)
    used: list[Sample] = field(default_factory=list)
    windows: list[HeldOutWindow] = field(default_factory=list)
    is_dry: bool = False
    is_measured: bool = False
    label: str = SEVERAL

    def cut(self, num_windows: int) -> None:
        """Add so many to ``windows``, or as many as there are rows for; then it is dry."""
        for _ in range(num_windows):
            while len(self.rest) < self.window_tokens:
                if not self.waiting:
                    self.is_dry = True
                    return
                self._take_row()
            self.windows.append(HeldOutWindow(self.label, tuple(self.rest[: self.window_tokens])))
            self.rest = [] if self.is_truncating else self.rest[self.window_tokens :]
            self.is_measured = True

    def _take_row(self) -> None:
        sample = self.waiting[0].item
        candidate = self.candidates.prepare(self.waiting.popleft())
        if candidate is not None:
            self.label = candidate.domain if sample.domain == self.domain else SEVERAL  # as it was redacted
            self.rest += candidate.token_ids.tolist()
            self.used.append(sample)


def cut_windows(cutters: Sequence[Cutter], num_windows: int, window_tokens: int) -> list[HeldOutWindow]:
    """At most ``num_windows``, by largest remainders of the shares; one of each domain in turn, those of several last.

    Fewer where all are dry. Which domains have equal remainders' windows follows from the order of the cutters.
    """
    several: list[HeldOutWindow] = []
    left_over: deque[tuple[Cutter, int]] = deque()
    while (num_left := num_windows - len(several) - sum(len(cutter.windows) for cutter in cutters)) > 0:
        wet = [cutter for cutter in cutters if not cutter.is_dry]
        if not wet:
            break
        for cutter, amount in zip(wet, divide(num_left, [cutter.share for cutter in wet]), strict=True):
            cutter.cut(amount)
            if cutter.is_dry:
                left_over += ((cutter, token_id) for token_id in cutter.rest)
        num_left = num_windows - len(several) - sum(len(cutter.windows) for cutter in cutters)
        several += _joined(left_over, min(num_left, len(left_over) // window_tokens), window_tokens)
    return [*_in_turns(cutter.windows for cutter in cutters), *several]


def _joined(left_over: deque[tuple[Cutter, int]], num_windows: int, window_tokens: int) -> Iterator[HeldOutWindow]:
    for _ in range(num_windows):
        tokens = [left_over.popleft() for _ in range(window_tokens)]
        for cutter, _ in tokens:
            cutter.is_measured = True
        yield HeldOutWindow(SEVERAL, tuple(token_id for _, token_id in tokens))


def _in_turns(windows: Iterable[Sequence[HeldOutWindow]]) -> Iterator[HeldOutWindow]:
    for turn in zip_longest(*windows):
        yield from (window for window in turn if window is not None)

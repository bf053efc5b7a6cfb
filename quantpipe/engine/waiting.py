"""The queue of sequences that wait to be admitted, in the order of a policy. Knows no blocks and no running ones."""

from bisect import bisect_left, insort
from collections.abc import Iterator

from quantpipe.engine.policies import Policy
from quantpipe.engine.request import Sequence

# When a sequence is due; its number and index decide between equals, so that sequences are never compared.
Place = tuple[float, int, int, Sequence]


def place_of(seq: Sequence, policy: Policy, now_s: float) -> Place:
    return policy(seq, now_s), seq.number, seq.index, seq


class WaitingQueue:
    """Sequences in the order in which they are due. Long prompts stand in a lane of their own.

    ``long_prompt_tokens`` is what makes a prompt long if exceeded; None: none is.
    """

    def __init__(self, policy: Policy, long_prompt_tokens: int | None) -> None:
        self._policy = policy
        self._long_prompt_tokens = long_prompt_tokens
        self._short: list[Place] = []
        self._long: list[Place] = []
        self._places: dict[Sequence, Place] = {}
        self._begin_until_s: dict[Sequence, float] = {}  # of those that may not wait for ever

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, seq: Sequence) -> bool:
        return seq in self._places

    def __iter__(self) -> Iterator[Sequence]:
        return (place[-1] for place in sorted(self._places.values()))

    def is_long(self, seq: Sequence) -> bool:
        return self._long_prompt_tokens is not None and seq.num_prompt_tokens > self._long_prompt_tokens

    def push(self, seq: Sequence, now_s: float) -> None:
        place = place_of(seq, self._policy, now_s)
        self._places[seq] = place
        insort(self._lane(seq), place)
        request = seq.request
        if request.max_queue_s is not None and seq.queued_s is None:  # one that was begun is not given up any more
            self._begin_until_s[seq] = request.arrival_s + request.max_queue_s

    def remove(self, seq: Sequence) -> None:
        """ValueError where it is not here."""
        place = self._places.pop(seq, None)
        if place is None:
            raise ValueError("the sequence neither waits nor runs")
        self._begin_until_s.pop(seq, None)
        lane = self._lane(seq)
        del lane[bisect_left(lane, place)]

    def overdue(self, now_s: float) -> list[Sequence]:
        """Who should have been begun by now, or not at all."""
        return [seq for seq, until_s in self._begin_until_s.items() if until_s <= now_s]

    def head(self, now_s: float, takes_long: bool) -> Sequence | None:
        """Who is due first, among those with short prompts only unless ``takes_long``. None where nobody is."""
        lanes = (self._short, self._long) if takes_long else (self._short,)
        first = min((place for lane in lanes if (place := self._first(lane, now_s)) is not None), default=None)
        return None if first is None else first[-1]

    def _first(self, lane: list[Place], now_s: float) -> Place | None:
        while lane:
            seq = lane[0][-1]
            if self._policy(seq, now_s) <= lane[0][0]:
                return lane[0]
            # Time has made it due later (never earlier, so whoever stands behind it can wait): to its new place.
            self.remove(seq)
            self.push(seq, now_s)
        return None

    def _lane(self, seq: Sequence) -> list[Place]:
        return self._long if self.is_long(seq) else self._short

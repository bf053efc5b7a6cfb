"""Who goes first. Knows requests and their progress; no blocks, no queue.

A policy says when a sequence is *due*, a time of the engine's clock, and who is due first goes first. That is a score
with age credit built in: as everyone comes nearer to being due at the same pace, waiting changes no order, and what
arrives later is, all else equal, due later.

Every policy gives a sequence between 0 and ``MAX_CREDIT_S`` seconds from its arrival, and its service class at most
``max(QOS_DELAY_S.values())`` on top. So whoever arrives ``OVERTAKING_S`` or more after a sequence never goes before it:
under no policy and no load does anyone starve.

Two more rules keep the schedule calm. A due time changes only when its sequence makes progress, or once when it is
late; and as time passes it never becomes earlier, so that in a sorted queue only the head has to be looked at again.
"""

from collections.abc import Callable

from quantpipe.engine.request import PRIORITIES, QosClass, Sequence

QOS_DELAY_S: dict[QosClass, float] = {"interactive": 0.0, "standard": 5.0, "batch": 60.0}
MAX_CREDIT_S = 600.0
OVERTAKING_S = MAX_CREDIT_S + max(QOS_DELAY_S.values())

# One step of priority is outweighed by that many seconds of waiting.
PRIORITY_STEP_S = 15.0

# Under ``shortest``, a sequence whose remaining work takes a second longer waits for those that arrive so much later.
SHORTNESS = 4.0
# Prompt tokens are read many at a time: what one costs, next to a generated token.
PROMPT_TOKEN_COST = 0.1

# Under ``deadline``: what a sequence without one is given, and how far one that has missed its own is put off.
NO_DEADLINE_S = 60.0
LATE_S = 120.0
MAX_DEADLINE_S = MAX_CREDIT_S - LATE_S

Policy = Callable[[Sequence, float], float]


def remaining_s(seq: Sequence) -> float:
    """The time to the last token if it ran now: from what is expected of it, and from the pace when it arrived.

    Only progress changes it: never preemption, nor what others do.
    """
    num_generated, expected = seq.num_generated_tokens, seq.expected_new_tokens
    if num_generated >= expected:  # longer than expected: as long again, as lengths have heavy tails
        expected = min(2 * num_generated, seq.request.params.max_tokens)
    num_unread = max(0, seq.num_prompt_tokens - seq.num_seen_tokens)
    return (PROMPT_TOKEN_COST * num_unread + max(0, expected - num_generated)) * seq.token_s


def _first_come(seq: Sequence, now_s: float) -> float:
    """In order of arrival."""
    return _ready_s(seq)


def _priority(seq: Sequence, now_s: float) -> float:
    """Lower priorities first."""
    return _ready_s(seq) + PRIORITY_STEP_S * (seq.request.priority - PRIORITIES[0])


def _shortest(seq: Sequence, now_s: float) -> float:
    """Those with the least left to do first."""
    return _ready_s(seq) + min(SHORTNESS * remaining_s(seq), MAX_CREDIT_S)


def _deadline(seq: Sequence, now_s: float) -> float:
    """The least slack first: due when it must run without pause from then on. Who has missed its deadline comes last.

    But not who will probably miss it: estimates are pessimistic under load, and taking them at their word made most of
    a crowd hopeless on arrival.
    """
    deadline_s = seq.request.deadline_s
    if deadline_s is None:
        return _ready_s(seq) + NO_DEADLINE_S
    deadline_s = min(deadline_s, MAX_DEADLINE_S)
    is_late = seq.request.arrival_s + deadline_s < now_s
    return _ready_s(seq) + (deadline_s + LATE_S if is_late else max(0.0, deadline_s - remaining_s(seq)))


def _ready_s(seq: Sequence) -> float:
    return seq.request.arrival_s + QOS_DELAY_S[seq.request.qos]


POLICIES: dict[str, Policy] = {
    "fcfs": _first_come,
    "priority": _priority,
    "shortest": _shortest,
    "deadline": _deadline,
}
# Where a due time never changes.
STATIC_POLICIES = frozenset({"fcfs", "priority"})

"""Which figures of two releases may be compared, and why others may not. A difference that is unknown counts as one."""

from quantpipe.gate.metrics import concurrency_of
from quantpipe.releases.archive import machine_digest
from quantpipe.releases.opened import Judged
from quantpipe.reporting.contents import slice_of
from quantpipe.reporting.report import Report

EVALS, FIDELITY, BENCH, COUNTS = "evals", "fidelity", "bench", "counts"
ASKED = {EVALS: "suite", FIDELITY: "held-out text", BENCH: "bench"}
CALLED = {EVALS: "suite", FIDELITY: "held-out text", BENCH: "bench section"}


def group_of(metric: str) -> str:
    """What a figure rests on."""
    place = slice_of(metric)
    plain = metric if place is None else place[0]
    if plain.startswith("manifest"):
        return COUNTS
    if concurrency_of(plain) is not None:
        return BENCH
    return EVALS if plain.startswith("accuracy") else FIDELITY


def obstacle(group: str, first: Report, other: Report) -> str | None:
    """Why figures of a group do not compare; None where they do."""
    if group == COUNTS:
        return None
    if group == BENCH and machine_digest(first.context.machine) != machine_digest(other.context.machine):
        return f"another machine ({other.context.machine.get('cpu')}; {first.context.machine.get('cpu')} before)"
    if first.context.base_digest != other.context.base_digest:
        return "another base model"
    ours, theirs = first.data.get(ASKED[group]), other.data.get(ASKED[group])
    if ours is None or theirs is None:
        return f"it is not known whether the {CALLED[group]} is the same"
    return None if ours == theirs else f"another {CALLED[group]}"


def versions_changed(first: Report, other: Report) -> list[str]:
    """What served differently: ``torch 2.13.0 -> 2.14.0``, ``engine.backend cpu -> torch``."""
    changes = []
    for prefix, ours, theirs in (
        ("", first.context.versions, other.context.versions),
        ("engine.", first.context.engine, other.context.engine),
    ):
        for name in dict.fromkeys((*ours, *theirs)):
            before, after = ours.get(name, "absent"), theirs.get(name, "absent")
            if before != after:
                changes.append(f"{prefix}{name} {before} -> {after}")
    return changes


def kinship(first: Judged, other: Judged) -> str:
    """What the second release is to the first, in a sentence."""
    ours, theirs = first.report.context, other.report.context
    changes = versions_changed(first.report, other.report)
    if ours.artifact_digest == theirs.artifact_digest:
        if not changes:
            return f"{other.name} is the same artifact as {first.name}, with the same versions: what differs is noise."
        return (
            f"{other.name} is the same artifact as {first.name}, served otherwise ({', '.join(changes)}): what differs "
            "is the runtime's doing."
        )
    if ours.recipe_digest == theirs.recipe_digest:
        with_what = f", with {', '.join(changes)}" if changes else ""
        return f"{other.name} is another artifact of the same recipe as {first.name}{with_what}."
    return f"{other.name} is another artifact than {first.name}, of another recipe."

"""The parts of a GPU check: what each does, what it may cost, and how they run one after the other.

A part yields rows; its time is looked at between two of them. So a check that is stopped, or that meets a slow GPU,
leaves what it had found.
"""

import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Literal

import torch

from quantpipe.doctor.record import PartResult, Record, Row, State
from quantpipe.errors import RecipeError, suggest

Needs = Literal["nothing", "kernels", "gpu"]
NEEDS_GPU = "needs a GPU, and kernels are interpreted on the CPU here"
FOUND_NOTHING = "it gave no row, so nothing was checked; this is a bug, report it"


@dataclass(frozen=True)
class Part:
    """On a GPU ``budget_s`` bounds it between two rows. ``run`` raises ``AbsentError`` where it lacks what it needs.

    What it ``needs`` is nothing; kernels that run, if only in the interpreter; or a GPU.
    """

    name: str
    title: str
    budget_s: float
    needs: Needs
    run: Callable[[torch.device], Iterator[Row]]


class AbsentError(Exception):
    """A part lacks something that is no fault of this machine's; the message says what."""


def _facts(device: torch.device) -> Iterator[Row]:
    from quantpipe.doctor.facts import machine_facts

    for fact in machine_facts():
        yield {"subject": fact.subject, "found": fact.found, "state": fact.state}


def _kernels(device: torch.device) -> Iterator[Row]:
    from quantpipe.doctor.cases import cases_for
    from quantpipe.doctor.kernel_rows import kernel_rows

    yield from kernel_rows(cases_for(device), device)


def _sanitizer(device: torch.device) -> Iterator[Row]:
    from quantpipe.doctor.sanitizer import sanitizer_rows

    yield from sanitizer_rows()


def _ceilings(device: torch.device) -> Iterator[Row]:
    from quantpipe.doctor.speed.ceilings import ceiling_rows
    from quantpipe.doctor.speed.timer import GpuTimer

    yield from ceiling_rows(device, GpuTimer(device))


def _rooflines(device: torch.device) -> Iterator[Row]:
    from quantpipe.doctor.speed.rooflines import EIGHT_BILLION, roofline_rows
    from quantpipe.doctor.speed.timer import GpuTimer

    yield from roofline_rows(device, GpuTimer(device), EIGHT_BILLION)


def _step(device: torch.device) -> Iterator[Row]:
    from quantpipe.doctor.speed.decode_step import step_rows
    from quantpipe.doctor.speed.random_model import SMALL

    yield from step_rows(device, SMALL)


def _end_to_end(device: torch.device) -> Iterator[Row]:
    from quantpipe.doctor.speed.end_to_end import end_to_end_rows
    from quantpipe.doctor.speed.random_model import EIGHT_BILLION

    yield from end_to_end_rows(device, EIGHT_BILLION)


def _sweep(device: torch.device) -> Iterator[Row]:
    from quantpipe.doctor.speed.rooflines import EIGHT_BILLION
    from quantpipe.doctor.speed.sweep import sweep_rows
    from quantpipe.doctor.speed.timer import GpuTimer

    yield from sweep_rows(device, GpuTimer(device), EIGHT_BILLION)


# In the order in which they run: what is right comes before what is fast. The budgets add up to less than 8 minutes.
PARTS: dict[str, Part] = {
    part.name: part
    for part in (
        Part("facts", "Versions and devices", 10, "nothing", _facts),
        Part("kernels", "Kernels against float64", 110, "kernels", _kernels),
        Part("step", "A decode step in a graph", 30, "gpu", _step),
        Part("ceilings", "What copies and matrix products reach", 15, "gpu", _ceilings),
        Part("rooflines", "Kernels beside those ceilings", 80, "gpu", _rooflines),
        Part("end_to_end", "Tokens per second of an 8B shape", 90, "gpu", _end_to_end),
        Part("sanitizer", "compute-sanitizer over the kernels", 95, "gpu", _sanitizer),
        Part("sweep", "Launches that beat the table's", 40, "gpu", _sweep),
    )
}


def chosen(only: Collection[str], skip: Collection[str]) -> list[Part]:
    """The parts that are asked for, in their order. RecipeError for a name that is none, and where none is left."""
    for option, names in (("--only", only), ("--skip", skip)):
        for name in names:
            if name not in PARTS:
                raise RecipeError(f"doctor: {option}: unknown part '{name}'{suggest(name, PARTS)}")
    parts = [part for name, part in PARTS.items() if (not only or name in only) and name not in skip]
    if not parts:
        raise RecipeError("doctor: --skip: no part is left to run; name fewer")
    return parts


def run_part(part: Part, device: torch.device) -> PartResult:
    """Run one part to its end, or as far as its time goes. What it raises is its result, not the end of the check."""
    if part.needs == "gpu" and device.type != "cuda":
        return PartResult("absent", reason=NEEDS_GPU)
    started_s, rows = time.monotonic(), list[Row]()
    state: State = "passed"
    reason = ""
    try:
        for row in part.run(device):
            rows.append(row)
            if device.type == "cuda" and time.monotonic() - started_s > part.budget_s:
                reason = f"its {part.budget_s:.0f} s were spent after {len(rows)} rows; run it alone with --only"
                state = "stopped"
                break
    except AbsentError as error:
        state, reason = "absent", str(error)
    except Exception as error:  # a kernel that cannot run is a finding like one that is wrong
        state, reason = "failed", f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    if state == "passed" and not rows:
        state, reason = "failed", FOUND_NOTHING
    if any(row.get("ok") is False for row in rows):
        state, reason = "failed", reason or f"{sum(row.get('ok') is False for row in rows)} rows are wrong"
    return PartResult(state, time.monotonic() - started_s, reason, rows)


def run_parts(
    parts: list[Part], device: torch.device, record: Record, tell: Callable[[Part, PartResult], None]
) -> bool:
    """Run what is not done yet and write each result down; whether nothing failed."""
    for part in parts:
        if not record.is_done(part.name):
            record.put(part.name, run_part(part, device))
        tell(part, record.parts[part.name])
    return all(record.parts[part.name].state != "failed" for part in parts)

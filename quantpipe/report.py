"""What a run tells its user while it works. Knows nothing of what is being done.

Everything goes to standard error, so that standard output holds results only.
"""

import random
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Protocol, TypeVar

Item = TypeVar("Item")


class Progress(Protocol):
    """Wraps an iterable and shows how far it has come; ``total`` counts the items, ``label`` says what they are."""

    def __call__(self, items: Iterable[Item], total: int, label: str) -> Iterator[Item]: ...


def no_progress(items: Iterable[Item], total: int, label: str) -> Iterator[Item]:
    """A Progress that shows nothing."""
    return iter(items)


@contextmanager
def random_state_kept() -> Iterator[None]:
    """Python's own generator is the caller's: what libraries draw from it within this, it gives again afterwards."""
    state = random.getstate()
    try:
        yield
    finally:
        random.setstate(state)


class Reporter:
    """Stage headings, notes and progress bars with the time left, on standard error."""

    def __init__(self, quiet: bool = False) -> None:
        with random_state_kept():  # rich draws a number as it is imported
            from rich.console import Console

            self.console = Console(stderr=True, quiet=quiet, highlight=False, soft_wrap=True)
        self._started_s = time.monotonic()

    def stage(self, text: str) -> None:
        """Announce the next stage, with the seconds since the run began."""
        from rich.markup import escape

        elapsed_s = time.monotonic() - self._started_s
        self.console.print(f"[bold cyan]{elapsed_s:6.1f} s[/]  [bold]{escape(text)}[/]")

    def note(self, text: str) -> None:
        """One line of detail under the current stage."""
        self.console.print(f"          {text}", markup=False)

    def progress(self, items: Iterable[Item], total: int, label: str) -> Iterator[Item]:
        """Yield ``items``; on a terminal draw a bar with the time left, elsewhere stay silent until the end."""
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as Bar

        started_s = time.monotonic()
        columns = (TextColumn("          {task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Bar(*columns, console=self.console, transient=True, disable=not self.console.is_terminal) as bar:
            yield from bar.track(items, total=total, description=label)
        self.note(f"{label}: {total} in {time.monotonic() - started_s:.1f} s")

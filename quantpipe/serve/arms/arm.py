"""One of the models that a server answers with, and what it is called."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from quantpipe.engine.tokenizer import Tokenizer
from quantpipe.errors import DataError
from quantpipe.serve.engine_process.client import EngineClient

if TYPE_CHECKING:
    from quantpipe.serve.served_facts import ServedFacts

LABELS = ("a", "b")


@dataclass(frozen=True)
class Arm:
    """``label`` is what metrics, logs and headers call it, ``name`` the model that clients may ask for.

    ``read_facts`` gives what is known by now of its folder, to be shown.
    """

    label: str
    name: str
    engine: EngineClient
    tokenizer: Tokenizer
    read_facts: Callable[[], "ServedFacts | None"] = lambda: None


def arm_names(folders: Sequence[Path]) -> tuple[str, ...]:
    """The folders' names, with as much of what lies above as tells them apart; the same folder twice gets labels.

    Raises DataError for a name that is another arm's label, and could mean either.
    """
    paths = [folder.resolve() for folder in folders]
    if len(set(paths)) < len(paths):
        return tuple(f"{path.name}-{label}" for path, label in zip(paths, LABELS, strict=False))
    num_parts = 1
    while len(set(names := ["/".join(path.parts[-num_parts:]) for path in paths])) < len(paths):
        num_parts += 1
    for name, own in zip(names, LABELS, strict=False):
        if len(paths) > 1 and name in LABELS and name != own:
            raise DataError(f"serve: {name}: the folder of arm {own} is called like the other arm; rename it")
    return tuple(names)

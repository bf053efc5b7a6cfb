"""What a ``set.yaml`` may hold, for people and editors: JSON schema and key reference."""

from pathlib import Path
from typing import Any

from quantpipe.calibration.definition.set_definition import Header
from quantpipe.calibration.definition.sources import Source
from quantpipe.recipe.reference import key_tables

_INTRODUCTION = """\
# Calibration sets: the key reference

Each folder here is a set: `set.yaml`, its texts, and a card that says what is in it. A recipe names the folder, or
holds the same keys itself (`version` and `name` may then be left out); `docs/calibration.md` says how it works. Made
from the schema by `quantpipe schema --calibration-set --markdown > calibration/README.md`; do not edit it by hand.

Unknown keys are errors. Paths start at the folder of the set, or of the recipe.
"""


class SetFile(Header):
    """One set. A source is a file where it has a `path`, a Hugging Face data set where it has a `dataset`, otherwise
    what its `kind` says."""

    sources: tuple[Source, ...]
    """Where samples come from."""


def set_schema() -> dict[str, Any]:
    """JSON schema of a ``set.yaml``."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **SetFile.model_json_schema()}


def set_reference() -> str:
    """Every key with its type, default and meaning, as Markdown."""
    return "\n".join([_INTRODUCTION, *key_tables(set_schema(), "The set")])


def write_set_reference(path: Path) -> None:
    """Write ``set_reference()`` to ``path``, normally ``calibration/README.md``."""
    path.write_text(set_reference(), encoding="utf-8")

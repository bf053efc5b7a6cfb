"""The limits that a run judges by: their two forms in a recipe, and who can do without them.

`quantpipe quantize` can; `run` and `gate` cannot.
"""

from typing import Annotated, Any

from pydantic import Discriminator, Field, Tag

from quantpipe.errors import RecipeError
from quantpipe.gate.limits import GateLimit, Limit

MAPPING_TAG, LIST_TAG = "mapping", "list"


def _form(value: Any) -> str:
    """Which of the two forms is meant; what is neither is no mapping."""
    return LIST_TAG if isinstance(value, list | tuple) else MAPPING_TAG


GateSection = Annotated[
    Annotated[dict[str, Limit], Field(min_length=1), Tag(MAPPING_TAG)]
    | Annotated[tuple[GateLimit, ...], Field(strict=False, min_length=1), Tag(LIST_TAG)],
    Discriminator(_form),
]


def gate_limits(gate: dict[str, Limit] | tuple[GateLimit, ...]) -> tuple[GateLimit, ...]:
    """The limits of either form, in order."""
    return gate if isinstance(gate, tuple) else tuple(GateLimit.of(name, limit) for name, limit in gate.items())


def require_gate(gate: object, recipe_name: str | None) -> None:
    """Raise RecipeError where a recipe holds no limits to judge by; ``recipe_name`` is its file, if it was read."""
    if gate:
        return
    where = "" if recipe_name is None else f"{recipe_name}:1:1: "
    text = "missing, and nothing is judged without limits; add gate: {mean_kl: {max: 0.05}} with an evaluate section"
    raise RecipeError(f"{where}gate: {text}, or make the artifact alone with quantpipe quantize")

"""The limits that a run judges by: what `quantpipe quantize` can do without, and `run` and `gate` cannot."""

from quantpipe.errors import RecipeError
from quantpipe.recipe.schema import Recipe


def require_gate(recipe: Recipe) -> None:
    """Raise RecipeError where a recipe holds no limits to judge by."""
    if recipe.gate:
        return
    where = "" if recipe.document is None else f"{recipe.document.name}:1:1: "
    text = "missing, and nothing is judged without limits; add gate: {mean_kl: {max: 0.05}} with an evaluate section"
    raise RecipeError(f"{where}gate: {text}, or make the artifact alone with quantpipe quantize")

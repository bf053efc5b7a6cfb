"""Whether sequences that a recipe asks for are ones that its model can read. Knows no model, only how far it reads."""

from quantpipe.errors import RecipeError


def check_length(key: str, num_tokens: int, limit: int | None, named: str = "max_position_embeddings") -> None:
    """Raise RecipeError where ``key`` asks for sequences of more tokens than the model reads (None: any number).

    ``named``: the setting that ``limit`` is the value of.
    """
    if limit is not None and num_tokens > limit:
        raise RecipeError(
            f"{key}: {num_tokens:,} tokens are more than the {limit:,} that the model reads ({named}); lower it to at "
            f"most {limit:,}"
        )

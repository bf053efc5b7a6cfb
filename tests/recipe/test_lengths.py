import pytest

from quantpipe.errors import RecipeError
from quantpipe.recipe.lengths import check_length


@pytest.mark.parametrize("limit", [None, 512, 513])
def test_what_the_model_reads_is_taken(limit: int | None) -> None:
    check_length("calibration.sequence_length", 512, limit)


def test_the_refusal_names_both_numbers_and_the_setting() -> None:
    message = (
        r"^evaluate\.divergence\.window_tokens: 2,048 tokens are more than the 512 that the model reads "
        r"\(engine\.max_model_len\); lower it to at most 512$"
    )
    with pytest.raises(RecipeError, match=message):
        check_length("evaluate.divergence.window_tokens", 2048, 512, "engine.max_model_len")

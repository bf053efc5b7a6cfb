"""The line in the log of a request that a shadow followed. Has no text of either answer."""

import logging
from collections.abc import Sequence

from quantpipe.serve.shadow.comparison import AnswerRecord, ChoiceComparison
from quantpipe.serve.shadow.metrics import Outcome

logger = logging.getLogger("quantpipe.access.shadow")  # below that of requests: logged as they are


def log_shadow(
    request_id: str,
    outcome: Outcome,
    answers: Sequence[AnswerRecord] = (),
    choices: Sequence[ChoiceComparison] = (),
    error: str | None = None,
) -> None:
    """Lists have an entry for each arm, or for each choice that was compared. Times are those of the first choice."""
    if not logger.isEnabledFor(logging.INFO):
        return
    differences = [choice.first_difference for choice in choices]
    fields: dict[str, object] = {"request_id": request_id, "outcome": outcome, "error": error}
    if answers:
        first = [answer.choices[0] for answer in answers]
        fields |= {
            "completion_tokens": [sum(choice.num_tokens for choice in answer.choices) for answer in answers],
            "ttft_s": [round(choice.ttft_s, 4) for choice in first],
            "tpot_s": [None if choice.tpot_s is None else round(choice.tpot_s, 5) for choice in first],
        }
    if choices:
        fields |= {
            "equal_texts": sum(choice.is_text_equal for choice in choices),
            "num_choices": len(choices),
            "first_differences": [position for position in differences if position is not None],
            "finish_reasons": ["/".join(choice.reasons) for choice in choices],
        }
    logger.info("shadow", extra={"fields": fields})

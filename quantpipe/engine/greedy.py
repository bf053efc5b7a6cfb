"""Steps that only want the most likely tokens: the backend finds those, and logits need not exist.

The rule is the sampler's: the lowest id of the largest logits, and none where the largest is not finite.
"""

from quantpipe.engine.step import Advance, Step


def wants_most_likely(step: Step) -> bool:
    """Whether every token that the step chooses is the most likely one, and nothing more is asked of its logits."""
    return all(not advance.num_logit_rows or _is_plain(advance) for advance in step.advances)


def _is_plain(advance: Advance) -> bool:
    seq, params = advance.seq, advance.seq.request.params
    return (
        params.temperature == 0
        and params.logprobs is None
        and not advance.draft_ids
        and not seq.request.is_scored
        and not seq.sampled().is_adjusted
    )

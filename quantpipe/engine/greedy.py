"""Steps that only want the most likely tokens: the backend finds those, and logits need not exist.

The rule is the sampler's: the lowest id of the largest logits, and none where the largest is not finite.
"""

from quantpipe.engine.step import Step


def wants_most_likely(step: Step) -> bool:
    """Whether every token that the step chooses is the most likely one, and nothing more is asked of its logits."""
    for seq, _, _, num_rows, draft_ids in step.advances:
        if num_rows and (draft_ids or seq.plain_from is None or len(seq.token_ids) < seq.plain_from):
            return False
    return True

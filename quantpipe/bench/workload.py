"""Which prompts a bench sends: exact lengths, reproducible from a seed. Knows token ids, not engines or text."""

import random
from collections.abc import Collection, Sequence

from quantpipe.errors import DataError


def text_prompts(
    token_source: Sequence[int], num_prompts: int, prompt_tokens: int, seed: int
) -> tuple[tuple[int, ...], ...]:
    """``num_prompts`` windows of exactly ``prompt_tokens`` ids out of a tokenized text, each from another place.

    Windows may overlap but never start together, so no two share a prefix by construction. DataError if the text is
    too short for that.
    """
    num_starts = len(token_source) - prompt_tokens + 1
    if num_starts < num_prompts:
        raise DataError(
            f"bench: a text of {len(token_source):,} tokens has no {num_prompts:,} windows of {prompt_tokens:,} tokens;"
            " give a longer text or lower bench.prompt_tokens"
        )
    starts = random.Random(seed).sample(range(num_starts), num_prompts)
    return tuple(tuple(token_source[start : start + prompt_tokens]) for start in starts)


def vocabulary_text(vocab_size: int, special_ids: Collection[int], num_tokens: int, seed: int) -> tuple[int, ...]:
    """Uniformly drawn ids without special tokens, for where there is no text. Timing only: it reads as noise."""
    ordinary_ids = sorted(set(range(vocab_size)) - set(special_ids))
    if not ordinary_ids:
        raise DataError(f"bench: a vocabulary of {vocab_size:,} ids holds special tokens only; give a text instead")
    return tuple(random.Random(seed).choices(ordinary_ids, k=num_tokens))

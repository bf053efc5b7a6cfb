"""Which guesses hold: exactly the sampler's own choices, in distribution and seed by seed."""

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare

from quantpipe.engine.candidates import candidates
from quantpipe.engine.sampled import Sampled
from quantpipe.engine.sampler import sample
from quantpipe.engine.sampling_params import SamplingParams
from quantpipe.engine.speculative.verify import Verification, verify

VOCAB = 12
Floats = npt.NDArray[np.float32]


def verified(logits_RV: Floats, draft_ids: tuple[int, ...], sampled: Sampled, row: int = 0) -> Verification:
    own = Verification(draft_ids, row, sampled)
    verify(logits_RV, [own])
    return own


def greedy_rows(*best: int) -> Floats:
    logits_RV = np.zeros((len(best), VOCAB), dtype=np.float32)
    logits_RV[np.arange(len(best)), best] = 1
    return logits_RV


@pytest.mark.parametrize(
    ("draft_ids", "chosen"),
    [((4, 5, 6), [4, 5, 6, 7]), ((4, 5, 9), [4, 5, 6]), ((9, 5, 6), [4]), ((4, 9, 6), [4, 5]), ((5, 4, 6), [4])],
)
def test_greedy_keeps_the_longest_prefix_that_is_most_likely_and_one_more(
    draft_ids: tuple[int, ...], chosen: list[int]
) -> None:
    own = verified(greedy_rows(4, 5, 6, 7), draft_ids, Sampled(SamplingParams()))
    assert own.chosen == chosen
    assert own.num_accepted == len(chosen) - 1


def test_rows_behind_a_wrong_guess_are_no_concern() -> None:
    logits_RV = greedy_rows(4, 5, 6)
    logits_RV[2] = np.nan
    assert verified(logits_RV, (4, 9), Sampled(SamplingParams())).chosen == [4, 5]
    own = verified(logits_RV, (4, 5), Sampled(SamplingParams()))
    assert (own.chosen, own.num_accepted) == ([4, 5, None], 2)
    logits_RV[0] = np.nan
    own = verified(logits_RV, (4, 5), Sampled(SamplingParams()))
    assert (own.chosen, own.num_accepted) == ([None], 0)


all_params = st.builds(
    SamplingParams,
    max_tokens=st.just(16),
    temperature=st.sampled_from([0.0, 0.7, 2.0]),
    top_k=st.sampled_from([0, 3]),
    top_p=st.sampled_from([0.6, 1.0]),
    min_p=st.sampled_from([0.0, 0.1]),
    min_tokens=st.integers(0, 8),
    stop_token_ids=st.lists(st.integers(0, VOCAB - 1), max_size=2).map(tuple),
    repetition_penalty=st.sampled_from([1.0, 1.4]),
    presence_penalty=st.sampled_from([0.0, 1.0]),
    frequency_penalty=st.sampled_from([0.0, 0.8]),
    logit_bias=st.dictionaries(st.integers(0, VOCAB - 1), st.floats(-5, 5), max_size=2),
)
places = st.tuples(
    all_params,
    st.lists(st.integers(0, VOCAB - 1), max_size=6),
    st.lists(st.integers(0, 3), max_size=5),
    st.integers(0, 99),
)


@settings(deadline=None)
@given(st.lists(places, min_size=1, max_size=4), st.integers(0, 1000))
def test_choices_are_the_samplers_one_after_the_other_for_many_sequences_at_once(
    sequences: list[tuple[SamplingParams, list[int], list[int], int]], seed: int
) -> None:
    logits_RV = np.random.default_rng(seed).normal(0, 2, (64, VOCAB)).astype(np.float32)
    verifications, expected, row = [], [], 0
    for params, generated, wrong_places, own_seed in sequences:
        sampled = Sampled(params, [1, 2, 3], own_seed, [0]).after(generated)
        drafts: list[int] = []
        chosen, is_right = [], True
        for place in range(5):
            [token_id] = sample(logits_RV[row + place][None], [sampled.after(drafts)])
            if is_right:
                chosen.append(token_id)
            assert token_id is not None
            drafts.append((token_id + 1) % VOCAB if place in wrong_places else token_id)
            is_right = is_right and place not in wrong_places
        verifications.append(Verification(tuple(drafts[:4]), row, sampled))
        expected.append(chosen)
        row += 5
    verify(logits_RV, verifications)
    assert [own.chosen for own in verifications] == expected


@pytest.mark.parametrize("draft_id", [3, 7, 11])
def test_first_token_has_the_samplers_distribution_whatever_was_guessed(draft_id: int) -> None:
    """The rule: a guess d is accepted with probability p(d); else the token is one of the others, p renormalised."""
    logits_V = np.random.default_rng(1).normal(0, 1.5, VOCAB).astype(np.float32)
    params = SamplingParams(
        temperature=1.3, top_k=8, top_p=0.97, presence_penalty=0.5, logit_bias={3: 0.7}, repetition_penalty=1.1
    )
    generated = [5, 3]
    template = Sampled(params, [1, 7], 0, [0]).after(generated)
    left = candidates(template.adjust(logits_V), params)
    probabilities = np.zeros(VOCAB)
    probabilities[np.arange(VOCAB) if left.ids_K is None else left.ids_K] = left.weight_K / left.weight_K.sum(
        dtype=np.float64
    )
    num_draws = 1500
    verifications = [
        Verification((draft_id,), 0, Sampled(params, [1, 7], seed, [0]).after(generated)) for seed in range(num_draws)
    ]
    verify(np.stack([logits_V, logits_V]), verifications)
    counts = np.bincount([int(own.chosen[0] or 0) for own in verifications], minlength=VOCAB)
    num_accepted = sum(own.num_accepted for own in verifications)
    possible = probabilities > 0
    assert not counts[~possible].any()
    # Fixed seeds: no chance of failing but by a change of the draws.
    assert chisquare(counts[possible], probabilities[possible] * num_draws).pvalue > 0.01
    spread = np.sqrt(probabilities[draft_id] * (1 - probabilities[draft_id]) / num_draws)
    assert abs(num_accepted / num_draws - probabilities[draft_id]) <= 3 * spread


def test_second_token_has_the_distribution_of_its_own_row_where_the_guess_held() -> None:
    rng = np.random.default_rng(2)
    logits_RV = rng.normal(0, 1, (2, VOCAB)).astype(np.float32)
    params = SamplingParams(temperature=1.0, frequency_penalty=1.0)
    guess = int(logits_RV[0].argmax())
    second = candidates(Sampled(params).after([guess]).adjust(logits_RV[1]), params)
    probabilities = second.weight_K / second.weight_K.sum(dtype=np.float64)
    counts = np.zeros(VOCAB)
    for seed in range(3000):
        own = verified(logits_RV, (guess,), Sampled(params, seed=seed))
        if own.num_accepted:
            assert own.chosen[1] is not None
            counts[own.chosen[1]] += 1
    assert counts.sum() > 300
    assert chisquare(counts, probabilities * counts.sum()).pvalue > 0.01

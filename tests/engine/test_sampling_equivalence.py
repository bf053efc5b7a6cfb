"""With every sampling parameter, a request's tokens are those of a plain loop over its own history, whatever else runs.

The loop recomputes everything from the whole history for each token; the engine batches, chunks, preempts and keeps
its counts token by token.
"""

import dataclasses
from random import Random
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quantpipe.engine.config import EngineConfig
from quantpipe.engine.engine import Engine
from quantpipe.engine.request import FinishReason
from quantpipe.engine.sampled import Sampled
from quantpipe.engine.sampler import sample
from quantpipe.engine.sampling_params import SamplingParams

EOS = 3
token_ids = st.integers(0, 30)
all_params = st.builds(
    SamplingParams,
    max_tokens=st.integers(10, 18),
    min_tokens=st.integers(0, 10),
    temperature=st.sampled_from([0.0, 0.8, 3.0]),
    top_k=st.sampled_from([0, 5]),
    top_p=st.sampled_from([0.7, 1.0]),
    min_p=st.sampled_from([0.0, 0.05]),
    repetition_penalty=st.sampled_from([1.0, 1.3]),
    presence_penalty=st.sampled_from([0.0, 1.0]),
    frequency_penalty=st.sampled_from([0.0, 0.7]),
    logit_bias=st.dictionaries(token_ids, st.floats(-100, 8), max_size=3),
    stop_token_ids=st.lists(token_ids, max_size=1).map(tuple),
    seed=st.integers(0, 2**64),
)
plans = st.lists(
    st.tuples(st.lists(token_ids, min_size=1, max_size=20).map(tuple), all_params, st.integers(0, 9)),
    min_size=1,
    max_size=7,
)


def plain_loop(fake_model: SimpleNamespace, prompt_ids: tuple[int, ...], params: SamplingParams) -> tuple[int, ...]:
    generated: list[int] = []
    while len(generated) < params.max_tokens:
        logits_V = fake_model.dense_logits([*prompt_ids, *generated]).numpy()
        own = Sampled(params, prompt_ids, params.seed or 0, [EOS]).after(generated)
        [token_id] = sample(logits_V[None], [own])
        assert token_id is not None
        generated.append(token_id)
        if token_id == EOS or token_id in params.stop_token_ids:
            break
    return tuple(generated)


@settings(max_examples=30, deadline=None)
@given(
    plans,
    st.integers(0, 5),
    st.integers(1, 5),
    st.integers(0, 9),
    st.sampled_from(["peak", "greedy"]),
    st.none() | st.sampled_from([0.0, 0.3]),
    st.randoms(use_true_random=False),
)
def test_tokens_are_those_of_a_plain_loop_in_any_batch_and_order_guessed_or_not_and_after_preemption(
    fake_model: SimpleNamespace,
    schedule: list[tuple[tuple[int, ...], SamplingParams, int]],
    spare_blocks: int,
    max_num_seqs: int,
    spare_tokens: int,
    admission: str,
    wrong_frac: float | None,
    random: Random,
) -> None:
    config = EngineConfig(
        max_model_len=40,
        block_size=4,
        num_kv_blocks=10 + spare_blocks,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_seqs + spare_tokens,
        admission=admission,
    )
    drafter = None if wrong_frac is None else fake_model.oracle(wrong_frac)
    engine = Engine(fake_model.executor(eos_token_ids=(EOS,)), config, drafter=drafter)
    order = list(enumerate(schedule))
    random.shuffle(order)
    time = 0
    while engine.has_unfinished or any(arrival >= time for _, _, arrival in schedule):
        for index, (prompt_ids, params, arrival) in order:
            if arrival == time:
                engine.add(prompt_ids, params, str(index))
        engine.step()
        time += 1
    for index, (prompt_ids, params, _) in enumerate(schedule):
        output = engine.take_output(str(index))
        assert output.token_ids == plain_loop(fake_model, prompt_ids, params)
        assert len(output.token_ids) >= params.min_tokens


def test_preempted_requests_with_penalties_and_draws_go_on_as_if_nothing_had_been(fake_model: SimpleNamespace) -> None:
    config = EngineConfig(
        max_model_len=32, block_size=4, num_kv_blocks=8, max_num_seqs=6, max_num_batched_tokens=8, admission="greedy"
    )
    params = [
        SamplingParams(
            max_tokens=20, temperature=1.5, repetition_penalty=1.2, frequency_penalty=0.5, min_tokens=19, seed=seed
        )
        for seed in range(6)
    ]
    engine = Engine(fake_model.executor(eos_token_ids=(EOS,)), config)
    outputs = engine.generate([[7, 8, seed] for seed in range(6)], params)
    assert engine.stats().num_preemptions > 0
    expected = [plain_loop(fake_model, (7, 8, seed), own) for seed, own in enumerate(params)]
    assert [output.token_ids for output in outputs] == expected


def test_request_that_leaves_no_token_to_choose_fails_alone(fake_model: SimpleNamespace) -> None:
    config = EngineConfig(max_model_len=32, block_size=4, max_num_seqs=4)
    engine = Engine(fake_model.executor(), config)
    nothing = SamplingParams(max_tokens=5, min_tokens=2, stop_token_ids=tuple(range(fake_model.vocab_size)))
    [bad, good] = engine.generate([[1, 2], [1, 2]], [nothing, SamplingParams(max_tokens=5)])
    assert bad.finish_reason is FinishReason.ABORT
    assert bad.error is not None and bad.error.startswith("sampling: min_tokens, logit_bias and penalties leave no")
    assert good.token_ids == fake_model.dense_greedy([1, 2], 5)
    assert engine.stats().used_blocks == 0


def test_alternatives_of_the_prompt_and_of_the_output_are_asked_for_apart(fake_model: SimpleNamespace) -> None:
    engine = Engine(fake_model.executor(), EngineConfig(max_model_len=32, block_size=4))
    only_prompt = SamplingParams(max_tokens=2, prompt_logprobs=3)
    [output] = engine.generate([[5, 6, 7]], only_prompt)
    assert ([len(entry.top) for entry in output.prompt_logprobs], output.logprobs) == ([3, 3], ())
    [output] = engine.generate([[5, 6, 7]], dataclasses.replace(only_prompt, prompt_logprobs=0, logprobs=4))
    assert [len(entry.top) for entry in output.prompt_logprobs] == [0, 0]
    assert [len(entry.top) for entry in output.logprobs] == [4, 4]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_log_probabilities_are_the_models_own_whatever_changes_the_choice(
    fake_model: SimpleNamespace, temperature: float
) -> None:
    engine = Engine(fake_model.executor(), EngineConfig(max_model_len=32, block_size=4))
    params = SamplingParams(max_tokens=3, temperature=temperature, logit_bias={9: 100.0}, seed=1, logprobs=1)
    [output] = engine.generate([[5, 6]], params)
    assert output.token_ids == (9, 9, 9)
    for num, entry in enumerate(output.logprobs):
        expected = fake_model.dense_logits([5, 6, *[9] * num]).log_softmax(-1)
        assert entry.logprob == pytest.approx(float(expected[9]), abs=1e-5)
        assert entry.top[0][0] == int(expected.argmax())

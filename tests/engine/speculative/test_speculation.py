"""The engine with guesses, with a model made of arithmetic: what comes out is what comes out without."""

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest

from quantpipe.engine.config import EngineConfig
from quantpipe.engine.engine import Engine
from quantpipe.engine.request import FinishReason, SamplingParams, StepOutput

CONFIG = EngineConfig(
    max_model_len=64, block_size=4, num_kv_blocks=40, max_num_seqs=4, max_num_batched_tokens=32, num_draft_tokens=4
)
LONG = SamplingParams(max_tokens=21)


def guessing(fake_model: SimpleNamespace, wrong_frac: float = 0.0, eos: tuple[int, ...] = (), **changes: Any) -> Engine:
    config = dataclasses.replace(CONFIG, **changes)
    return Engine(fake_model.executor(eos_token_ids=eos), config, drafter=fake_model.oracle(wrong_frac))


def steps_of(engine: Engine, *prompts: list[int], params: SamplingParams = LONG) -> list[list[StepOutput]]:
    for number, prompt in enumerate(prompts):
        engine.add(prompt, params, str(number))
    steps = []
    while engine.has_unfinished:
        steps.append(engine.step())
    return steps


def test_right_guesses_give_several_tokens_a_step_and_are_counted(fake_model: SimpleNamespace) -> None:
    engine = guessing(fake_model)
    steps = steps_of(engine, [1, 2, 3])
    assert [len(output.token_ids) for [output] in steps] == [1, 5, 5, 5, 5]
    assert engine.take_output("0").token_ids == fake_model.dense_greedy([1, 2, 3], 21)
    stats = engine.stats()
    assert (stats.draft_tokens, stats.accepted_tokens, stats.acceptance_frac) == (16, 16, 1.0)
    assert (stats.generated_tokens, stats.prompt_tokens, stats.steps) == (21, 3, 5)


def test_wrong_guesses_cost_no_token_and_become_fewer(fake_model: SimpleNamespace) -> None:
    engine = guessing(fake_model, wrong_frac=1.0)
    steps = steps_of(engine, [1, 2, 3])
    assert [len(output.token_ids) for [output] in steps] == [1] * 21
    assert engine.take_output("0").token_ids == fake_model.dense_greedy([1, 2, 3], 21)
    assert engine.stats().accepted_tokens == 0
    assert 0 < engine.stats().draft_tokens < 15  # of the 80 that there was room for


def test_without_speculation_nothing_is_guessed(fake_model: SimpleNamespace) -> None:
    engine = Engine(fake_model.executor(), CONFIG)
    engine.generate([[7] * 20], LONG)
    assert engine.stats().draft_tokens == 0


def test_lookup_by_name_guesses_what_the_prompt_repeats(fake_model: SimpleNamespace) -> None:
    continuation = fake_model.dense_greedy([5, 6], 12)
    # No prompt makes this model repeat itself; one that is forced to by a bias does.
    params = SamplingParams(max_tokens=20, logit_bias={9: 100.0})
    engine = Engine(fake_model.executor(), dataclasses.replace(CONFIG, speculative="ngram"))
    [biased, free] = engine.generate([[5, 6], [5, 6]], [params, SamplingParams(max_tokens=12)])
    assert biased.token_ids == (9,) * 20
    assert free.token_ids == continuation
    assert engine.stats().accepted_tokens >= 10
    assert engine.stats().steps < 18


def test_last_token_is_never_guessed_past_max_tokens_or_the_models_length(fake_model: SimpleNamespace) -> None:
    for max_tokens in range(1, 9):
        engine = guessing(fake_model, max_model_len=11)
        [output] = engine.generate([[1, 2, 3]], SamplingParams(max_tokens=max_tokens))
        assert output.token_ids == fake_model.dense_greedy([1, 2, 3], max_tokens)
        assert output.finish_reason is FinishReason.LENGTH
        assert engine.stats().accepted_tokens == engine.stats().draft_tokens <= max(0, max_tokens - 2)


@pytest.mark.parametrize("by", ["model", "request", "ignored"])
@pytest.mark.parametrize("place", range(1, 8))
def test_stop_token_among_right_guesses_ends_the_request_there(
    fake_model: SimpleNamespace, by: str, place: int
) -> None:
    unstopped = fake_model.dense_greedy([1, 2, 3], 21)
    stop = unstopped[place]
    params = dataclasses.replace(
        LONG, ignore_eos=by == "ignored", stop_token_ids=(stop,) if by == "request" else (), logprobs=0
    )
    engine = guessing(fake_model, eos=(stop,) if by != "request" else ())
    [output] = engine.generate([[1, 2, 3]], params)
    expected = unstopped if by == "ignored" else unstopped[: unstopped.index(stop) + 1]
    assert output.token_ids == expected
    assert [entry.token_id for entry in output.logprobs] == list(expected)
    assert output.finish_reason is (FinishReason.LENGTH if by == "ignored" else FinishReason.STOP)
    assert engine.stats().generated_tokens == len(expected)
    assert engine.stats().accepted_tokens < len(expected)


def test_min_tokens_keeps_the_end_away_among_guesses(fake_model: SimpleNamespace) -> None:
    unstopped = fake_model.dense_greedy([1, 2, 3], 21)
    stop = unstopped[3]
    params = dataclasses.replace(LONG, min_tokens=12, seed=0)
    engine = guessing(fake_model, eos=(stop,))
    [output] = engine.generate([[1, 2, 3]], params)
    [expected] = fake_model.dense_samples([1, 2, 3], params, (stop,))
    assert output.token_ids == expected
    assert len(expected) >= 12 and expected != unstopped
    assert engine.stats().accepted_tokens > 0


def test_log_probabilities_of_guessed_tokens_are_those_of_their_own_rows(fake_model: SimpleNamespace) -> None:
    engine = guessing(fake_model, wrong_frac=0.2)
    params = SamplingParams(max_tokens=20, logprobs=2, temperature=2.0, seed=5)
    [output] = engine.generate([[1, 2, 3]], params)
    plain = Engine(fake_model.executor(), CONFIG).generate([[1, 2, 3]], params)[0]
    assert engine.stats().accepted_tokens > 4
    assert output.logprobs == plain.logprobs
    assert [entry.token_id for entry in output.logprobs] == list(output.token_ids)


@pytest.mark.parametrize("temperature", [0.0, 2.0])
def test_samples_of_one_prompt_are_guessed_for_once_they_have_parted(
    fake_model: SimpleNamespace, temperature: float
) -> None:
    params = SamplingParams(n=3, max_tokens=18, temperature=temperature, seed=4)
    engine = guessing(fake_model, wrong_frac=0.2)
    [output] = engine.generate([[1, 2, 3, 4, 5]], params)
    expected = fake_model.dense_samples([1, 2, 3, 4, 5], params)
    assert [sample.token_ids for sample in output.samples] == expected
    assert engine.stats().accepted_tokens > 6
    assert engine.stats().copied_blocks > 0


def test_not_a_number_behind_a_wrong_guess_harms_nobody(fake_model: SimpleNamespace) -> None:
    poison = 17

    class PoisonDrafter(fake_model.oracle):  # type: ignore[misc,name-defined]
        def propose(self, wanted: list[tuple[Any, int]]) -> list[tuple[int, ...]]:
            return [(poison,) * num for _, num in wanted]

    expected = fake_model.dense_greedy([1, 2, 3], 21)
    assert poison not in expected
    engine = Engine(fake_model.executor(poison=poison), CONFIG, drafter=PoisonDrafter())
    [output] = engine.generate([[1, 2, 3]], dataclasses.replace(LONG, prompt_logprobs=0))
    assert output.token_ids == expected
    assert engine.stats().draft_tokens > 0
    assert engine.stats().nonfinite_failures == 0


@pytest.mark.parametrize("place", range(7))
def test_not_a_number_behind_a_right_guess_fails_the_request_as_it_does_without(
    fake_model: SimpleNamespace, place: int
) -> None:
    unstopped = fake_model.dense_greedy([1, 2, 3], 21)
    poison = unstopped[place]
    outputs = []
    for drafter in (None, fake_model.oracle()):
        engine = Engine(fake_model.executor(poison=poison), CONFIG, drafter=drafter)
        [bad, good] = engine.generate([[1, 2, 3], [4]], dataclasses.replace(LONG, logprobs=0, max_tokens=8))
        outputs.append((bad.token_ids, bad.logprobs, bad.finish_reason, bad.error, good.token_ids))
        assert engine.stats().nonfinite_failures >= 1
    assert outputs[0] == outputs[1]
    assert outputs[0][0] == unstopped[: unstopped.index(poison) + 1]


@pytest.mark.parametrize("wrong_frac", [None, 0.5, 1.0])
def test_blocks_of_wrong_guesses_are_given_back_before_anybody_needs_them(
    fake_model: SimpleNamespace, wrong_frac: float | None
) -> None:
    """The second prompt ends just before the first needs all of the pool; guesses of the first could take it before."""
    config = dataclasses.replace(
        CONFIG, max_model_len=16, num_kv_blocks=4, max_num_seqs=2, admission="greedy", num_draft_tokens=9
    )
    drafter = None if wrong_frac is None else fake_model.oracle(wrong_frac)
    engine = Engine(fake_model.executor(), config, drafter=drafter)
    long, short = SamplingParams(max_tokens=13), SamplingParams(max_tokens=4)
    outputs = engine.generate([[1, 2, 3], [4, 5, 6]], [long, short])
    assert outputs[0].token_ids == fake_model.dense_greedy([1, 2, 3], 13)
    assert outputs[1].token_ids == fake_model.dense_greedy([4, 5, 6], 4)
    assert (engine.stats().draft_tokens > 0) == (wrong_frac is not None)
    assert engine.stats().num_preemptions == 0 or wrong_frac == 0.5  # right ones are tokens, which take their room


def test_sequence_that_reads_its_own_tokens_again_one_by_one_is_not_guessed_for(fake_model: SimpleNamespace) -> None:
    engine = guessing(
        fake_model, 0.3, num_kv_blocks=8, max_model_len=32, max_prefill_chunk=1, admission="greedy", prefix_cache=False
    )
    prompts = [[1, 2, 3], [4, 5, 6], [7, 8, 9]]
    outputs = engine.generate(prompts, LONG)
    assert engine.stats().num_preemptions > 0
    assert [output.token_ids for output in outputs] == [fake_model.dense_greedy(prompt, 21) for prompt in prompts]


def test_step_that_the_model_failed_on_leaves_no_block_of_guesses_behind(fake_model: SimpleNamespace) -> None:
    executor = fake_model.executor()
    engine = Engine(executor, CONFIG, drafter=fake_model.oracle())
    engine.add([1, 2, 3], LONG, "0")
    engine.step()
    used = engine.stats().used_blocks
    executor.fails = True
    for _ in range(3):
        with pytest.raises(RuntimeError):
            engine.step()
    assert engine.stats().used_blocks <= used + 1  # 4 guesses behind 4 tokens
    executor.fails = False
    while engine.has_unfinished:
        engine.step()
    assert engine.take_output("0").token_ids == fake_model.dense_greedy([1, 2, 3], 21)


def test_only_tokens_that_held_become_prefixes(fake_model: SimpleNamespace) -> None:
    """Whoever finds a prefix afterwards gets the tokens of one who finds none."""
    engine = guessing(fake_model, wrong_frac=0.4, num_draft_tokens=7)
    [output] = engine.generate([[1, 2, 3]], SamplingParams(max_tokens=30))
    whole = [1, 2, 3, *output.token_ids]
    for length in (17, 25, 32):
        hits = engine.stats().prefix_hit_tokens
        [again] = engine.generate([whole[:length]], SamplingParams(max_tokens=6))
        assert engine.stats().prefix_hit_tokens - hits == (length - 1) // 4 * 4
        assert again.token_ids == fake_model.dense_greedy(whole[:length], 6)


def test_abort_among_guesses_gives_blocks_and_memory_back(fake_model: SimpleNamespace) -> None:
    drafter = fake_model.oracle()
    engine = Engine(fake_model.executor(), CONFIG, drafter=drafter)
    engine.add([1, 2, 3], LONG, "a")
    engine.add([4, 5, 6], dataclasses.replace(LONG, n=2, temperature=1.0, seed=1), "b")
    for _ in range(3):
        engine.step()
    engine.abort_sample("b", 1)
    engine.step()
    engine.abort("a")
    engine.abort("b")
    assert engine.stats().used_blocks == 0
    assert len(drafter.forgotten) == 3
    assert not engine._scheduler._drafting._lengths  # type: ignore[union-attr]


def test_guesses_are_given_out_in_order_and_within_the_budget(fake_model: SimpleNamespace) -> None:
    engine = guessing(fake_model, max_num_seqs=4, max_num_batched_tokens=7)
    steps = steps_of(engine, [1], [2], [3], params=SamplingParams(max_tokens=8))
    # All begin together; then 7 tokens are 3 of their own and 4 guesses, all for who came first.
    assert [len(output.token_ids) for output in steps[1]] == [5, 1, 1]
    assert max(engine._runner.executor.batch_sizes) <= 7  # type: ignore[attr-defined]
    for number in range(3):
        assert engine.take_output(str(number)).token_ids == fake_model.dense_greedy([number + 1], 8)

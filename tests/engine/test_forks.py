"""Samples of one prompt: read once, forked, copied where they part; each is what a request of its own would be."""

import dataclasses
from collections.abc import Callable, Sequence
from types import SimpleNamespace

import pytest

from quantpipe.engine.config import EngineConfig
from quantpipe.engine.draws import sample_seed
from quantpipe.engine.engine import Engine
from quantpipe.engine.request import FinishReason, RequestOutput, SamplingParams
from quantpipe.errors import RequestError

CONFIG = EngineConfig(
    max_model_len=64, block_size=4, num_kv_blocks=40, max_num_seqs=6, max_num_batched_tokens=16, admission="greedy"
)
PROMPT = tuple(range(1, 11))  # two blocks and a half
HOT = SamplingParams(n=4, max_tokens=12, temperature=3.0, seed=7, logprobs=2)
GREEDY = SamplingParams(max_tokens=5)
Act = Callable[[Engine], None]


@pytest.fixture
def engine(fake_model: SimpleNamespace) -> Engine:
    return Engine(fake_model.executor(), CONFIG)


def finish(engine: Engine, request_id: str) -> RequestOutput:
    while engine.has_unfinished:
        engine.step()
    return engine.take_output(request_id)


def step_until(engine: Engine, condition: Callable[[], bool]) -> None:
    for _ in range(200):
        if condition():
            return
        engine.step()
    raise AssertionError("did not happen within 200 steps")


@pytest.mark.parametrize("num_prompt_tokens", [1, 4, 7, 8, 30])
@pytest.mark.parametrize("prefix_cache", [True, False])
def test_each_sample_is_what_a_request_with_its_seed_gets(
    fake_model: SimpleNamespace, num_prompt_tokens: int, prefix_cache: bool
) -> None:
    config = dataclasses.replace(CONFIG, prefix_cache=prefix_cache)
    prompt = [*range(1, num_prompt_tokens + 1)]
    [output] = Engine(fake_model.executor(), config).generate([prompt], HOT)
    assert len({sample.token_ids for sample in output.samples}) == 4
    for index, sample in enumerate(output.samples):
        own = dataclasses.replace(HOT, n=1, seed=sample_seed(7, index))
        [alone] = Engine(fake_model.executor(), config).generate([prompt], own)
        assert (sample.index, sample.token_ids, sample.logprobs) == (index, alone.token_ids, alone.logprobs)
        assert sample.finish_reason is alone.finish_reason
    assert (output.token_ids, output.logprobs) == (output.samples[0].token_ids, output.samples[0].logprobs)


def test_prompt_is_read_once_and_only_the_block_it_ends_in_is_copied(engine: Engine) -> None:
    engine.add(PROMPT, HOT, "a")
    engine.step()
    assert engine.stats().used_blocks == 3  # shared by all four
    engine.step()
    stats = engine.stats()
    assert (stats.num_running, stats.used_blocks, stats.copied_blocks) == (4, 2 + 4, 3)  # the last keeps the original
    finish(engine, "a")
    stats = engine.stats()
    assert (stats.prompt_tokens, stats.generated_tokens, stats.copied_blocks) == (10, 48, 3)
    assert stats.step_tokens == 10 + 4 * 11  # the last token of each sample is not read


def test_prompt_of_whole_blocks_needs_no_copy(engine: Engine) -> None:
    engine.generate([PROMPT[:8]], HOT)
    assert engine.stats().copied_blocks == 0


def test_greedy_samples_are_alike(engine: Engine, fake_model: SimpleNamespace) -> None:
    [output] = engine.generate([PROMPT], dataclasses.replace(GREEDY, n=3))
    assert [sample.token_ids for sample in output.samples] == [fake_model.dense_greedy(PROMPT, 5)] * 3


def test_samples_end_at_their_own_time_and_the_request_with_the_last(fake_model: SimpleNamespace) -> None:
    free = fake_model.dense_samples(PROMPT, HOT)
    # Ends one sample with its very first token, another later, and one not at all.
    stops = (free[1][0], free[2][6])
    params = dataclasses.replace(HOT, stop_token_ids=stops)
    expected = fake_model.dense_samples(PROMPT, params)
    assert len({len(tokens) for tokens in expected}) > 2
    engine = Engine(fake_model.executor(), CONFIG)
    [output] = engine.generate([PROMPT], params)
    assert [sample.token_ids for sample in output.samples] == expected
    for sample in output.samples:
        stopped = sample.token_ids[-1] in stops
        assert sample.finish_reason is (FinishReason.STOP if stopped else FinishReason.LENGTH)
        assert sample.text_token_ids == (sample.token_ids[:-1] if stopped else sample.token_ids)


def test_scored_prompt_of_several_samples_is_scored_once(engine: Engine, fake_model: SimpleNamespace) -> None:
    [output] = engine.generate([PROMPT], dataclasses.replace(HOT, prompt_logprobs=0))
    assert [entry.token_id for entry in output.prompt_logprobs] == list(PROMPT[1:])
    assert [sample.token_ids for sample in output.samples] == fake_model.dense_samples(PROMPT, HOT)


@pytest.mark.parametrize(
    ("n", "max_tokens", "message"),
    [
        (7, 5, "n: 7 samples exceed max_num_seqs 6, as many as run at a time; ask for fewer or raise"),
        (10**9, 5, "exceed max_num_seqs 6"),
        (0, 5, "n: 0 is not a whole number of at least 1"),
        (-1, 5, "n: -1 is not"),
        (2.0, 5, "n: 2.0 is not"),
        (True, 5, "n: True is not"),
        (2, 0, "n: 2 samples of max_tokens 0 would all be empty"),
    ],
)
def test_number_of_samples_that_cannot_be_is_refused_and_the_next_request_works(
    engine: Engine, fake_model: SimpleNamespace, n: int, max_tokens: int, message: str
) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        engine.add(PROMPT, SamplingParams(n=n, max_tokens=max_tokens))
    assert caught.value.param == "n"
    assert not engine.has_unfinished
    assert engine.generate([PROMPT], GREEDY)[0].token_ids == fake_model.dense_greedy(PROMPT, 5)


def test_slots_are_kept_for_the_samples_of_a_prompt_that_is_being_read(fake_model: SimpleNamespace) -> None:
    executor = fake_model.executor()
    engine = Engine(executor, CONFIG)
    ids = [engine.add([i + 1] * 30, dataclasses.replace(HOT, n=3)) for i in range(5)]
    while engine.has_unfinished:
        engine.step()
        assert engine.stats().num_running <= 6
    for i, request_id in enumerate(ids):
        expected = fake_model.dense_samples([i + 1] * 30, dataclasses.replace(HOT, n=3))
        assert [sample.token_ids for sample in engine.take_output(request_id).samples] == expected


def test_samples_that_preempt_each_other_in_a_pool_that_holds_one_get_their_own_tokens(
    fake_model: SimpleNamespace,
) -> None:
    config = dataclasses.replace(CONFIG, max_model_len=40, num_kv_blocks=10)
    engine = Engine(fake_model.executor(), config)
    params = dataclasses.replace(HOT, max_tokens=30, n=6, logprobs=None)
    [output] = engine.generate([PROMPT], params)
    assert [sample.token_ids for sample in output.samples] == fake_model.dense_samples(PROMPT, params)
    assert engine.stats().num_preemptions > 0
    assert engine.stats().used_blocks == 0


def test_unusable_logits_after_the_prompt_fail_every_sample_and_are_counted(fake_model: SimpleNamespace) -> None:
    engine = Engine(fake_model.executor(poison=30), CONFIG)
    bad, good = engine.generate([[1, 30], [1, 2]], [HOT, GREEDY])
    assert [sample.finish_reason for sample in bad.samples] == [FinishReason.ABORT] * 4
    assert all(sample.error is not None and sample.token_ids == () for sample in bad.samples)
    assert good.token_ids == fake_model.dense_greedy([1, 2], 5)
    assert (engine.stats().nonfinite_failures, engine.stats().used_blocks) == (4, 0)


def test_unusable_logits_of_one_sample_fail_that_one_alone(fake_model: SimpleNamespace) -> None:
    free = fake_model.dense_samples(PROMPT, HOT)
    poison = next(token for token in free[2][:-1] if all(token not in tokens for tokens in (*free[:2], free[3])))
    engine = Engine(fake_model.executor(poison=poison), CONFIG)
    [output] = engine.generate([PROMPT], HOT)
    for index, sample in enumerate(output.samples):
        if index == 2:
            assert sample.token_ids == free[2][: free[2].index(poison) + 1]
            assert (sample.finish_reason, sample.error is not None) == (FinishReason.ABORT, True)
        else:
            assert (sample.token_ids, sample.error) == (free[index], None)
    assert engine.stats().nonfinite_failures == 1


def _ended_one(engine: Engine) -> None:
    step_until(engine, lambda: engine.stats().num_running == 4)
    engine.abort_sample("a", 0)


STATES: dict[str, Act] = {
    "waiting": lambda engine: None,
    "prefilling": lambda engine: engine.step() and None,
    "forked": lambda engine: step_until(engine, lambda: engine.stats().num_running == 4),
    "copied": lambda engine: step_until(engine, lambda: engine.stats().copied_blocks > 0),
    "its first sample ended": _ended_one,
    "preempted": lambda engine: step_until(engine, lambda: engine.stats().num_preemptions > 0),
    "finished": lambda engine: step_until(engine, lambda: not engine.has_unfinished),
}


@pytest.mark.parametrize("state", STATES)
def test_abort_in_every_state_gives_all_blocks_back_and_harms_nobody(fake_model: SimpleNamespace, state: str) -> None:
    prompt, params = [*range(1, 23)], dataclasses.replace(HOT, max_tokens=30)
    engine = Engine(fake_model.executor(), dataclasses.replace(CONFIG, num_kv_blocks=16))
    engine.add(prompt, params, "a")
    STATES[state](engine)
    engine.add([3, 4], GREEDY, "b")
    engine.abort("a")
    assert engine.stats().num_running + engine.stats().num_waiting == 1
    assert finish(engine, "b").token_ids == fake_model.dense_greedy([3, 4], 5)
    stats = engine.stats()
    assert (stats.used_blocks, stats.free_blocks + stats.cached_blocks) == (0, 16)
    with pytest.raises(RequestError):
        engine.take_output("a")
    [output] = engine.generate([prompt], params)
    assert [sample.token_ids for sample in output.samples] == fake_model.dense_samples(prompt, params)


def test_ended_sample_leaves_what_it_has_and_the_others_their_way(engine: Engine, fake_model: SimpleNamespace) -> None:
    expected = fake_model.dense_samples(PROMPT, HOT)
    engine.add(PROMPT, HOT, "a")
    step_until(engine, lambda: engine.stats().generated_tokens == 12)
    engine.abort_sample("a", 1)
    engine.abort_sample("a", 1)
    engine.abort_sample("unknown", 0)
    output = finish(engine, "a")
    lengths = [12, 3, 12, 12]
    assert [sample.token_ids for sample in output.samples] == [
        own[:n] for own, n in zip(expected, lengths, strict=True)
    ]
    assert (output.samples[1].finish_reason, output.samples[1].error) == (FinishReason.ABORT, None)


def test_ending_all_samples_one_by_one_finishes_the_request(engine: Engine) -> None:
    engine.add(PROMPT, HOT, "a")
    step_until(engine, lambda: engine.stats().num_running == 4)
    for index in range(4):
        engine.abort_sample("a", index)
    assert not engine.has_unfinished
    assert [sample.finish_reason for sample in engine.take_output("a").samples] == [FinishReason.ABORT] * 4
    assert engine.stats().used_blocks == 0


@pytest.mark.parametrize("index", [0, 1, 4, -1])
def test_sample_cannot_be_ended_before_it_begins(engine: Engine, index: int) -> None:
    engine.add(PROMPT, HOT, "a")
    with pytest.raises(RequestError, match=rf"request 'a' has no sample {index} yet; abort the request"):
        engine.abort_sample("a", index)
    assert len(finish(engine, "a").samples) == 4


@pytest.mark.parametrize("what", ["copy_blocks", "forward"])
def test_step_that_failed_between_copy_and_write_can_be_taken_again(
    fake_model: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    executor = fake_model.executor()
    engine = Engine(executor, CONFIG)
    engine.add(PROMPT, HOT, "a")
    engine.step()

    def fails(*_: Sequence[object]) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(type(engine._runner.kv_cache) if what == "copy_blocks" else executor, what, fails)
        for _ in range(2):
            with pytest.raises(MemoryError):
                engine.step()
    output = finish(engine, "a")
    assert [sample.token_ids for sample in output.samples] == fake_model.dense_samples(PROMPT, HOT)

"""The engine with its prefix cache: what is found need not be computed, and nothing else changes."""

import dataclasses
from types import SimpleNamespace

import pytest

from quantpipe.engine import prefix_cache
from quantpipe.engine.config import EngineConfig
from quantpipe.engine.engine import Engine
from quantpipe.engine.request import SamplingParams

CONFIG = EngineConfig(
    max_model_len=64, block_size=4, num_kv_blocks=40, max_num_seqs=4, max_num_batched_tokens=16, admission="greedy"
)
GREEDY = SamplingParams(max_tokens=6)
PROMPT = list(range(18))


@pytest.fixture
def engine(fake_model: SimpleNamespace) -> Engine:
    return Engine(fake_model.executor(), CONFIG)


def hits_of(engine: Engine, prompt: list[int], salt: str = "", params: SamplingParams = GREEDY) -> int:
    """Serve ``prompt`` and return how many of its tokens were found."""
    before = engine.stats().prefix_hit_tokens
    request_id = engine.add(prompt, params, cache_salt=salt)
    while engine.has_unfinished:
        engine.step()
    engine.take_output(request_id)
    return engine.stats().prefix_hit_tokens - before


def test_second_prompt_computes_only_what_the_first_did_not(fake_model: SimpleNamespace) -> None:
    executor = fake_model.executor()
    engine = Engine(executor, CONFIG)
    assert hits_of(engine, PROMPT) == 0
    executor.batch_sizes.clear()
    [output] = engine.generate([[*PROMPT[:14], 30, 29]], GREEDY)
    assert output.token_ids == fake_model.dense_greedy([*PROMPT[:14], 30, 29], 6)
    assert executor.batch_sizes == [4, 1, 1, 1, 1, 1]
    stats = engine.stats()
    assert (stats.prefix_query_tokens, stats.prefix_hit_tokens, stats.prompt_tokens) == (34, 12, 34)


def test_next_turn_of_a_conversation_finds_what_was_generated(engine: Engine, fake_model: SimpleNamespace) -> None:
    [output] = engine.generate([PROMPT], GREEDY)
    turn = [*PROMPT, *output.token_ids, 1, 2]
    assert hits_of(engine, turn) == 20  # of 23 tokens read: five whole blocks
    [output] = engine.generate([turn], GREEDY)
    assert output.token_ids == fake_model.dense_greedy(turn, 6)


def test_switched_off_nothing_is_found_or_kept(fake_model: SimpleNamespace) -> None:
    engine = Engine(fake_model.executor(), dataclasses.replace(CONFIG, prefix_cache=False))
    assert [hits_of(engine, PROMPT) for _ in range(2)] == [0, 0]
    stats = engine.stats()
    assert (stats.cached_blocks, stats.free_blocks, stats.prefix_query_tokens) == (0, 40, 0)


def test_different_salts_find_nothing_of_each_other(engine: Engine) -> None:
    assert [hits_of(engine, PROMPT, salt) for salt in ("a", "b", "", "a", "b", "")] == [0, 0, 0, 16, 16, 16]


def test_hash_that_is_always_the_same_changes_nothing(
    fake_model: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = [[*PROMPT[:12], i % 3, i, 5] for i in range(8)] + [list(range(12, 0, -1)), PROMPT]
    expected, found = Engine(fake_model.executor(), CONFIG), Engine(fake_model.executor(), CONFIG)
    monkeypatch.setattr(found._prefix_cache, "_block_hash", lambda parent_hash, token_ids: 7)
    for engine in (expected, found):
        for prompt in prompts:
            [output] = engine.generate([prompt], GREEDY)
            assert output.token_ids == fake_model.dense_greedy(prompt, 6)
    assert expected.stats() == found.stats()
    assert found.stats().prefix_hit_tokens > 0


def test_hash_that_knows_nothing_of_what_came_before_changes_nothing(
    fake_model: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(fake_model.executor(), CONFIG)
    monkeypatch.setattr(engine._prefix_cache, "_block_hash", lambda parent_hash, token_ids: hash(token_ids))
    for first in (1, 2, 3):
        prompt = [first] * 4 + [9] * 8 + [5]
        [output] = engine.generate([prompt], GREEDY)
        assert output.token_ids == fake_model.dense_greedy(prompt, 6)
    assert engine.stats().prefix_hit_tokens == 0


def test_each_request_is_told_what_was_found_of_its_prompt_once_for_all_samples(fake_model: SimpleNamespace) -> None:
    config = dataclasses.replace(CONFIG, max_model_len=32, num_kv_blocks=12, max_num_seqs=4, admission="greedy")
    engine = Engine(fake_model.executor(), config)
    assert engine.generate([PROMPT], GREEDY)[0].num_cached_tokens == 0
    long = SamplingParams(n=4, max_tokens=12, temperature=3.0, seed=1)  # which the pool holds by preemption only
    request_id = engine.add([*PROMPT, 3], long)
    said: list[tuple[int, int]] = []
    while engine.has_unfinished:
        said += [(output.index, output.num_cached_tokens) for output in engine.step()]
    assert engine.stats().num_preemptions > 0
    assert engine.take_output(request_id).num_cached_tokens == 16
    assert set(said) == {(0, 16), (1, 0), (2, 0), (3, 0)}


@pytest.mark.parametrize("length", [4, 8, 12])
def test_prompt_of_whole_blocks_sent_twice_computes_its_last_block_again(
    fake_model: SimpleNamespace, length: int
) -> None:
    engine = Engine(fake_model.executor(), CONFIG)
    assert [hits_of(engine, PROMPT[:length]) for _ in range(2)] == [0, length - 4]
    [output] = engine.generate([PROMPT[:length]], GREEDY)
    assert output.token_ids == fake_model.dense_greedy(PROMPT[:length], 6)


@pytest.mark.parametrize("length", [4, 8])
def test_scored_prompt_is_computed_whole_even_if_it_is_known(
    engine: Engine, fake_model: SimpleNamespace, length: int
) -> None:
    hits_of(engine, PROMPT)
    params = SamplingParams(max_tokens=2, prompt_logprobs=0)
    [output] = engine.generate([PROMPT[:length]], params)
    assert [entry.token_id for entry in output.prompt_logprobs] == PROMPT[1:length]
    assert engine.stats().prefix_hit_tokens == 0
    assert hits_of(engine, [*PROMPT[:length], 30]) == length  # what it computed serves others


def test_what_comes_before_the_scored_part_of_a_prompt_is_found(engine: Engine, fake_model: SimpleNamespace) -> None:
    for prompt, scored_from, num_found in (
        (PROMPT, 9, 0),
        ([*PROMPT[:9], 30, 29], 9, 8),
        (PROMPT, 8, 4),
        (PROMPT, 18, 16),
    ):
        [output] = engine.generate([prompt], SamplingParams(prompt_logprobs=0, prompt_logprobs_from=scored_from))
        assert output.num_cached_tokens == num_found
        assert [entry.token_id for entry in output.prompt_logprobs] == prompt[scored_from:]
        for length, entry in enumerate(output.prompt_logprobs, start=scored_from):
            expected = fake_model.dense_logits(prompt[:length]).log_softmax(-1)
            assert entry.logprob == pytest.approx(float(expected[entry.token_id]), abs=1e-5)
        assert output.token_ids == fake_model.dense_greedy(prompt, 16)
    assert (engine.stats().prefix_query_tokens, engine.stats().prefix_hit_tokens) == (8 + 8 + 7 + 17, 8 + 4 + 16)


@pytest.mark.parametrize("is_scored", [False, True])
def test_preempted_sequences_that_share_a_prefix_get_the_tokens_of_an_unlimited_pool(
    fake_model: SimpleNamespace, is_scored: bool
) -> None:
    prompts = [(*range(4), i) for i in range(6)]
    params = SamplingParams(max_tokens=25, logprobs=0, prompt_logprobs=0 if is_scored else None)

    def run(num_kv_blocks: int) -> tuple[list[object], Engine]:
        config = dataclasses.replace(
            CONFIG, max_model_len=32, num_kv_blocks=num_kv_blocks, max_num_seqs=6, max_num_batched_tokens=8
        )
        engine = Engine(fake_model.executor(), config)
        outputs = engine.generate(prompts, params)
        assert [output.token_ids for output in outputs] == [fake_model.dense_greedy(prompt, 25) for prompt in prompts]
        return [(output.logprobs, output.prompt_logprobs) for output in outputs], engine

    cramped, cramped_engine = run(8)
    plentiful, plentiful_engine = run(100)
    assert cramped == plentiful
    assert cramped_engine.stats().num_preemptions > 0
    assert plentiful_engine.stats().num_preemptions == 0
    assert cramped_engine.stats().used_blocks == 0


def test_preempted_sequence_finds_its_own_blocks_again(fake_model: SimpleNamespace) -> None:
    """The old one takes but one block of the young one, which then recomputes little more than that."""
    executors = fake_model.executor(), fake_model.executor()
    for executor, is_on in zip(executors, (True, False), strict=True):
        config = dataclasses.replace(
            CONFIG, max_model_len=32, num_kv_blocks=8, max_num_seqs=2, max_num_batched_tokens=32, prefix_cache=is_on
        )
        engine = Engine(executor, config)
        outputs = engine.generate([[1] * 4, [2] * 14], SamplingParams(max_tokens=16))
        assert engine.stats().num_preemptions > 0
        assert outputs[1].token_ids == fake_model.dense_greedy([2] * 14, 16)
    computed_with, computed_without = (sum(executor.batch_sizes) for executor in executors)
    assert computed_without - computed_with >= 12


def test_what_a_failing_prompt_computed_is_not_found(fake_model: SimpleNamespace) -> None:
    prompt = [*PROMPT[:12], 30, 1, 2]
    engine = Engine(fake_model.executor(poison=2), CONFIG)
    [output] = engine.generate([prompt], GREEDY)
    assert output.error is not None
    stats = engine.stats()
    assert (stats.used_blocks, stats.cached_blocks, stats.free_blocks) == (0, 0, 40)
    assert hits_of(engine, prompt[:-1]) == 0


def test_released_blocks_stay_known_until_their_space_is_needed(fake_model: SimpleNamespace) -> None:
    config = dataclasses.replace(CONFIG, max_model_len=32, num_kv_blocks=8, max_num_seqs=1)
    engine = Engine(fake_model.executor(), config)
    assert hits_of(engine, PROMPT) == 0
    assert engine.stats().cached_blocks == 5
    assert hits_of(engine, [30] * 20) == 0  # seven blocks: all but the head of the first prompt
    assert hits_of(engine, PROMPT) == 4
    assert engine.stats().prefix_evictions > 0


def test_namespace_of_an_engine_names_what_its_keys_depend_on(fake_model: SimpleNamespace) -> None:
    engine = Engine(fake_model.executor(), CONFIG, "auto", "digest")
    engine.add(PROMPT, GREEDY, "a", cache_salt="tenant")
    [seq] = engine._scheduler.waiting
    assert seq.namespace == prefix_cache.PrefixNamespace("tenant", "auto", "digest", "full")

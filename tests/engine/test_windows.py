"""Windows and sinks in a whole engine: blocks behind them are let go, and every token is what a dense loop gives."""

import dataclasses
from collections.abc import Sequence
from types import SimpleNamespace

import pytest

from quantpipe.engine.config import EngineConfig
from quantpipe.engine.engine import Engine
from quantpipe.engine.request import FinishReason, SamplingParams
from quantpipe.errors import RequestError

CONFIG = EngineConfig(
    max_model_len=200,
    block_size=4,
    num_kv_blocks=40,
    max_num_seqs=4,
    max_num_batched_tokens=16,
    sink_tokens=5,
    window_tokens=10,
)
FORM = (5, 10)
# Two sink blocks, and those that nine tokens in a row may touch: the next one sees no more.
MOST_BETWEEN_STEPS = 2 + 3
PROMPT = tuple(i * 7 % 31 for i in range(60))


def largest_use(engine: Engine) -> int:
    """Run to the end; the most blocks that were in use after a step."""
    most = 0
    while engine.has_unfinished:
        engine.step()
        stats = engine.stats()
        assert stats.used_blocks + stats.cached_blocks + stats.free_blocks == stats.total_blocks
        most = max(most, stats.used_blocks)
    assert engine.stats().used_blocks == 0
    return most


def add(engine: Engine, prompt_ids: Sequence[int], max_tokens: int, n: int = 1) -> str:
    return engine.add(prompt_ids, SamplingParams(max_tokens=max_tokens, n=n, seed=1))


def test_generation_goes_on_beyond_max_model_len_in_constant_memory(fake_model: SimpleNamespace) -> None:
    engine = Engine(fake_model.executor(), CONFIG)
    request_id = add(engine, (1, 2, 3), 600)
    assert largest_use(engine) == MOST_BETWEEN_STEPS
    output = engine.take_output(request_id)
    assert (len(output.token_ids), output.finish_reason) == (600, FinishReason.LENGTH)
    assert output.token_ids == fake_model.dense_greedy((1, 2, 3), 600, form=FORM)


@pytest.mark.parametrize("prefix_cache", [False, True])
def test_prompt_longer_than_the_pool_is_read_in_chunks_with_blocks_freed_behind_it(
    fake_model: SimpleNamespace, prefix_cache: bool
) -> None:
    config = dataclasses.replace(CONFIG, num_kv_blocks=9, max_num_seqs=1, prefix_cache=prefix_cache)
    engine = Engine(fake_model.executor(), config)
    request_id = engine.add(PROMPT, SamplingParams(max_tokens=30, prompt_logprobs=0))
    assert largest_use(engine) <= 9
    output = engine.take_output(request_id)
    assert output.token_ids == fake_model.dense_greedy(PROMPT, 30, form=FORM)
    assert len(output.prompt_logprobs) == len(PROMPT) - 1


def test_models_own_windows_free_blocks_up_to_max_model_len(fake_model: SimpleNamespace) -> None:
    config = dataclasses.replace(CONFIG, sink_tokens=0, window_tokens=None, prefix_cache=False)
    engine = Engine(fake_model.executor(window=9), config)
    request_id = add(engine, PROMPT, 100)
    assert largest_use(engine) <= 1 + -(-(9 + 16 - 2) // 4)
    assert engine.take_output(request_id).token_ids == fake_model.dense_greedy(PROMPT, 100, form=(0, 9))
    with pytest.raises(RequestError, match="exceed max_model_len 200"):
        add(engine, PROMPT, 141)


def test_prompt_alone_is_bounded_by_max_model_len(fake_model: SimpleNamespace) -> None:
    engine = Engine(fake_model.executor(), dataclasses.replace(CONFIG, max_model_len=20))
    with pytest.raises(RequestError, match=r"prompt: 20 tokens do not fit in max_model_len 20"):
        add(engine, PROMPT[:20], 1)
    [output] = engine.generate([PROMPT[:19]], SamplingParams(max_tokens=50))
    assert output.token_ids == fake_model.dense_greedy(PROMPT[:19], 50, form=FORM)


@pytest.mark.parametrize("num_prompt", [3, 18, 21])
def test_forks_share_what_they_see_and_let_go_of_it_one_by_one(fake_model: SimpleNamespace, num_prompt: int) -> None:
    engine = Engine(fake_model.executor(), CONFIG)
    params = SamplingParams(max_tokens=40, n=3, seed=5, temperature=3.0)
    request_id = engine.add(PROMPT[:num_prompt], params)
    assert largest_use(engine) <= 3 * MOST_BETWEEN_STEPS
    samples = [sample.token_ids for sample in engine.take_output(request_id).samples]
    assert samples == fake_model.dense_samples(PROMPT[:num_prompt], params, form=FORM)


@pytest.mark.parametrize("sink_tokens", [0, 5])
@pytest.mark.parametrize("prefix_cache", [False, True])
def test_preempted_sequence_reads_its_sinks_and_what_is_in_reach_again_and_no_more(
    fake_model: SimpleNamespace, prefix_cache: bool, sink_tokens: int
) -> None:
    config = dataclasses.replace(
        CONFIG, num_kv_blocks=9, admission="greedy", prefix_cache=prefix_cache, sink_tokens=sink_tokens
    )
    executor = fake_model.executor()
    engine = Engine(executor, dataclasses.replace(config, policy="priority"))
    late, urgent = add(engine, (1, 2), 200), []
    for i in range(6):
        for _ in range(25):
            engine.step()
        urgent.append(engine.add((i, 3, 3), SamplingParams(max_tokens=20), priority=-20))
        urgent.append(engine.add((i, 4, 4), SamplingParams(max_tokens=20), priority=-20))
    largest_use(engine)
    form, num_wanted = (sink_tokens, 10), 201 + 12 * 22
    assert engine.take_output(late).token_ids == fake_model.dense_greedy((1, 2), 200, form=form)
    for i, request_id in enumerate(urgent):
        expected = fake_model.dense_greedy((i // 2, 3 + i % 2, 3 + i % 2), 20, form=form)
        assert engine.take_output(request_id).token_ids == expected
    num_preemptions = engine.stats().num_preemptions
    assert num_preemptions >= 4
    # Sink blocks, the reach before the next token, and what fills a block before it: not up to 200 tokens each time.
    assert sum(executor.batch_sizes) - num_wanted <= num_preemptions * (8 + 9 + 4)


def test_reserving_admission_counts_what_is_held_and_not_what_is_generated(fake_model: SimpleNamespace) -> None:
    config = dataclasses.replace(CONFIG, num_kv_blocks=4 * 9, admission="reserve")
    engine = Engine(fake_model.executor(), config)
    for i in range(4):
        add(engine, (i,), 1000)
    for _ in range(10):
        engine.step()
    assert engine.stats().num_running == 4
    for i in range(4):
        engine.abort(f"request-{i}")


def test_prompts_find_each_others_prefix_within_one_form(fake_model: SimpleNamespace) -> None:
    engine = Engine(fake_model.executor(), CONFIG)
    prompt = PROMPT[:19]
    expected = fake_model.dense_greedy(prompt, 12, form=FORM)
    for num_hits in (0, 16):  # what was read before the first block was let go
        before = engine.stats().prefix_hit_tokens
        [output] = engine.generate([prompt], SamplingParams(max_tokens=12))
        assert output.token_ids == expected
        assert engine.stats().prefix_hit_tokens - before == num_hits
    assert engine._namespace.attention == "sinks 5, window 10"
    assert Engine(fake_model.executor(), dataclasses.replace(CONFIG, sink_tokens=0))._namespace != engine._namespace


def test_what_follows_blocks_let_go_is_never_kept_as_a_prefix(fake_model: SimpleNamespace) -> None:
    engine = Engine(fake_model.executor(), CONFIG)
    engine.generate([(1, 2, 3)], SamplingParams(max_tokens=300))
    # Full blocks up to the first step after which one was let go: token 16 no longer sees block 2's first, 8 .. 11.
    assert engine.stats().cached_blocks <= 6


def test_guesses_are_checked_in_windows_as_well(fake_model: SimpleNamespace) -> None:
    config = dataclasses.replace(CONFIG, num_draft_tokens=7)
    drafter = fake_model.oracle(0.3, FORM)
    engine = Engine(fake_model.executor(), config, drafter=drafter)
    prompts = [PROMPT, PROMPT[:5]]
    outputs = engine.generate(prompts, SamplingParams(max_tokens=80))
    assert [output.token_ids for output in outputs] == [fake_model.dense_greedy(p, 80, form=FORM) for p in prompts]
    assert engine.stats().accepted_tokens > 20

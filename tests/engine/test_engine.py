"""The engine's promises to its caller, with a model made of arithmetic."""

import dataclasses
import math
import random
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from quantpipe.engine import engine as engine_module
from quantpipe.engine.config import EngineConfig
from quantpipe.engine.draws import uniform
from quantpipe.engine.engine import Engine
from quantpipe.engine.request import FinishReason, SamplingParams
from quantpipe.errors import RecipeError, RequestError

CONFIG = EngineConfig(
    max_model_len=64, block_size=4, num_kv_blocks=20, max_num_seqs=4, max_num_batched_tokens=16, admission="greedy"
)
GREEDY = SamplingParams(max_tokens=5)


@pytest.fixture
def engine(fake_model: SimpleNamespace) -> Engine:
    return Engine(fake_model.executor(), CONFIG)


@pytest.mark.parametrize(
    ("prompt", "changes", "param"),
    [
        ([], {}, "prompt"),
        ([1, 31], {}, "prompt"),
        ([-1], {}, "prompt"),
        ([1 << 80], {}, "prompt"),
        ([1.5], {}, "prompt"),
        (["a"], {}, "prompt"),
        (None, {}, "prompt"),
        ([1] * 64, {}, "prompt"),
        ([1] * 65, {"max_tokens": 0}, "prompt"),
        ([1] * 60, {"max_tokens": 5}, "max_tokens"),
        ([1], {"max_tokens": -1}, "max_tokens"),
        ([1], {"max_tokens": 10**9}, "max_tokens"),
        ([1], {"temperature": -0.1}, "temperature"),
        ([1], {"temperature": math.nan}, "temperature"),
        ([1], {"temperature": math.inf}, "temperature"),
        ([1], {"top_p": 0.0}, "top_p"),
        ([1], {"top_p": 1.1}, "top_p"),
        ([1], {"top_p": math.nan}, "top_p"),
        ([1], {"top_k": -1}, "top_k"),
        ([1], {"logprobs": -1}, "logprobs"),
        ([1], {"logprobs": 21}, "logprobs"),
        ([1], {"stop_token_ids": (31,)}, "stop_token_ids"),
        ([1, 2], {"prompt_logprobs_from": 0}, "prompt_logprobs_from"),
        ([1, 2], {"prompt_logprobs_from": 1.0}, "prompt_logprobs_from"),
        ([1, 2], {"prompt_logprobs_from": 3}, "prompt_logprobs_from"),
    ],
)
def test_bad_request_is_refused_by_parameter_and_the_next_one_works(
    engine: Engine, fake_model: SimpleNamespace, prompt: Any, changes: dict[str, Any], param: str
) -> None:
    with pytest.raises(RequestError) as caught:
        engine.add(prompt, dataclasses.replace(GREEDY, **changes))
    assert caught.value.param == param
    assert str(caught.value).startswith(f"{param}: ")
    assert not engine.has_unfinished
    assert engine.generate([[1, 2]], GREEDY)[0].token_ids == fake_model.dense_greedy([1, 2], 5)


@pytest.mark.parametrize(
    ("param", "value"),
    [
        ("priority", 20),
        ("priority", -21),
        ("qos", "interactiv"),
        ("deadline_s", 0.0),
        ("deadline_s", math.nan),
        ("deadline_s", math.inf),
        ("max_queue_s", 0.0),
        ("max_queue_s", math.nan),
        ("max_queue_s", math.inf),
    ],
)
def test_impossible_place_in_the_order_is_refused_by_parameter(engine: Engine, param: str, value: Any) -> None:
    with pytest.raises(RequestError) as caught:
        engine.add([1], GREEDY, **{param: value})
    assert caught.value.param == param
    assert str(caught.value).startswith(f"{param}: ")
    assert not engine.has_unfinished


def test_messages_about_length_state_the_numbers(engine: Engine) -> None:
    with pytest.raises(RequestError, match=r"64 tokens .* max_model_len 64 "):
        engine.add([1] * 64, GREEDY)
    with pytest.raises(RequestError, match=r"ask for at most 4$"):
        engine.add([1] * 60, GREEDY)
    engine.add([1] * 59, GREEDY)
    engine.add([1] * 64, SamplingParams(max_tokens=0))


def test_request_id_in_use_is_refused_until_its_output_is_taken(engine: Engine) -> None:
    engine.add([1], GREEDY, "a")
    with pytest.raises(RequestError) as caught:
        engine.add([1], GREEDY, "a")
    assert caught.value.param == "request_id"
    while engine.has_unfinished:
        engine.step()
    with pytest.raises(RequestError):
        engine.add([1], GREEDY, "a")
    engine.take_output("a")
    engine.add([1], GREEDY, "a")


def test_output_is_taken_once_and_only_when_finished(engine: Engine) -> None:
    engine.add([1], GREEDY, "a")
    with pytest.raises(RequestError, match="not finished"):
        engine.take_output("a")
    while engine.has_unfinished:
        engine.step()
    assert len(engine.take_output("a").token_ids) == 5
    with pytest.raises(RequestError, match="already taken"):
        engine.take_output("a")


def test_idle_step_does_nothing(engine: Engine) -> None:
    assert engine.step() == []
    engine.abort("unknown")
    assert engine.stats().steps == 0


def test_request_not_begun_in_time_expires_with_all_its_samples_and_the_others_go_on(
    fake_model: SimpleNamespace,
) -> None:
    engine = Engine(fake_model.executor(), dataclasses.replace(CONFIG, max_num_seqs=2))
    running = engine.add([1, 2], dataclasses.replace(GREEDY, n=2))  # leaves no place
    engine.step()
    engine.add([3], dataclasses.replace(GREEDY, n=2), "late", max_queue_s=1e-9)
    patient = engine.add([3], GREEDY, "patient", max_queue_s=3600.0)
    expired = [output for output in engine.step() if output.finish_reason is FinishReason.EXPIRED]
    assert sorted((output.request_id, output.index) for output in expired) == [("late", 0), ("late", 1)]
    assert "not begun within 1e-09 s" in str(expired[0].error)
    outputs = []
    while engine.has_unfinished:
        outputs += engine.step()
    assert {output.request_id for output in outputs if output.queued_s is not None} == {running, patient}
    assert engine.take_output(patient).token_ids == fake_model.dense_greedy([3], 5)
    assert engine.stats().num_waiting == 0


def test_request_that_was_begun_in_time_does_not_expire_when_it_is_preempted(fake_model: SimpleNamespace) -> None:
    """Its time is over as soon as it runs; only what has waited ever since it came is given up."""
    engine = Engine(fake_model.executor(), dataclasses.replace(CONFIG, max_model_len=32, num_kv_blocks=9))
    ids = [engine.add([token_id] * 12, SamplingParams(max_tokens=16), max_queue_s=0.5) for token_id in (1, 2, 3)]
    engine.step()
    started = {seq.request.request_id for seq in engine._scheduler.running}
    time.sleep(0.5)
    while engine.has_unfinished:
        engine.step()
    reasons = {request_id: engine.take_output(request_id).finish_reason for request_id in ids}
    assert engine.stats().num_preemptions > 0
    assert all((reasons[request_id] is FinishReason.EXPIRED) == (request_id not in started) for request_id in ids)
    assert 0 < len(started) < 3


def test_idle_engine_tells_of_requests_that_expired(engine: Engine) -> None:
    engine.add([1], GREEDY, "late", max_queue_s=1e-9)
    assert [output.finish_reason for output in engine.step()] == [FinishReason.EXPIRED]
    assert not engine.has_unfinished


def test_two_hundred_aborts_at_any_point_leave_no_block_in_use(fake_model: SimpleNamespace) -> None:
    engine = Engine(fake_model.executor(), CONFIG)
    rng = random.Random(0)
    alive: list[str] = []
    num_aborted = 0
    while num_aborted < 200:
        for _ in range(rng.randrange(3)):
            prompt = [rng.randrange(31) for _ in range(rng.randrange(1, 40))]
            alive.append(engine.add(prompt, SamplingParams(max_tokens=rng.randrange(25))))
        for _ in range(rng.randrange(3)):
            if alive:
                engine.abort(alive.pop(rng.randrange(len(alive))))
                num_aborted += 1
        engine.step()
        stats = engine.stats()
        assert stats.used_blocks + stats.cached_blocks + stats.free_blocks == stats.total_blocks == 20
    assert engine.stats().num_preemptions > 0
    for request_id in alive:
        engine.abort(request_id)
    assert not engine.has_unfinished
    stats = engine.stats()
    assert (stats.used_blocks, stats.num_running, stats.num_waiting) == (0, 0, 0)
    assert not engine._outputs
    assert engine.generate([[1, 2]], GREEDY)[0].token_ids == fake_model.dense_greedy([1, 2], 5)


@pytest.mark.parametrize("by", ["model", "request"])
def test_stop_token_ends_the_request_and_is_its_last_token_but_no_text(fake_model: SimpleNamespace, by: str) -> None:
    unstopped = fake_model.dense_greedy([1, 2, 3], 6)
    stop = unstopped[3]
    expected = unstopped[: unstopped.index(stop) + 1]
    engine = Engine(fake_model.executor(eos_token_ids=(stop,) if by == "model" else ()), CONFIG)
    params = SamplingParams(max_tokens=6, stop_token_ids=(stop,) if by == "request" else ())
    [output] = engine.generate([[1, 2, 3]], params)
    assert output.finish_reason is FinishReason.STOP
    assert output.token_ids == expected
    assert output.text_token_ids == expected[:-1]


def test_ignore_eos_generates_past_the_models_token_but_not_past_the_requests_own(fake_model: SimpleNamespace) -> None:
    unstopped = fake_model.dense_greedy([1, 2, 3], 6)
    engine = Engine(fake_model.executor(eos_token_ids=unstopped), CONFIG)
    ignoring = SamplingParams(max_tokens=6, ignore_eos=True)
    [output] = engine.generate([[1, 2, 3]], ignoring)
    assert (output.token_ids, output.finish_reason) == (unstopped, FinishReason.LENGTH)
    [output] = engine.generate([[1, 2, 3]], dataclasses.replace(ignoring, stop_token_ids=(unstopped[0],)))
    assert (output.token_ids, output.finish_reason) == (unstopped[:1], FinishReason.STOP)


def test_nan_logits_fail_that_request_only(fake_model: SimpleNamespace) -> None:
    healthy = [[1, 2], [4, 5, 6]]
    harmless = {token_id for prompt in healthy for token_id in [*prompt, *fake_model.dense_greedy(prompt, 5)]}
    poison = min(set(range(fake_model.vocab_size)) - harmless)
    engine = Engine(fake_model.executor(poison=poison), CONFIG)
    bad, *good = engine.generate([[9, poison], *healthy], GREEDY)
    assert bad.finish_reason is FinishReason.ABORT
    assert bad.error is not None and "not finite" in bad.error
    assert bad.token_ids == ()
    for prompt, output in zip(healthy, good, strict=True):
        assert output.token_ids == fake_model.dense_greedy(prompt, 5)
        assert output.error is None
    assert engine.stats().used_blocks == 0


def test_nan_in_the_middle_of_a_scored_prompt_fails_the_request(fake_model: SimpleNamespace) -> None:
    engine = Engine(fake_model.executor(poison=30), CONFIG)
    engine.add([1, 30, 2], SamplingParams(max_tokens=0, prompt_logprobs=0), "a")
    [output] = engine.step()
    assert output.finish_reason is FinishReason.ABORT
    assert output.error is not None


def test_log_probabilities_are_those_of_the_dense_model(engine: Engine, fake_model: SimpleNamespace) -> None:
    prompt = [5, 6, 7, 8]
    params = SamplingParams(max_tokens=3, logprobs=2, prompt_logprobs=2)
    [output] = engine.generate([prompt], params)
    token_ids = [*prompt, *output.token_ids]
    entries = [*output.prompt_logprobs, *output.logprobs]
    assert len(entries) == 6
    for n, entry in enumerate(entries, start=1):
        expected = fake_model.dense_logits(token_ids[:n]).log_softmax(-1)
        assert entry.token_id == token_ids[n]
        assert entry.logprob == pytest.approx(float(expected[token_ids[n]]), abs=1e-5)
        assert entry.is_greedy == (token_ids[n] == int(expected.argmax()))
        assert [token_id for token_id, _ in entry.top] == expected.topk(2).indices.tolist()
        assert [value for _, value in entry.top] == pytest.approx(expected.topk(2).values.tolist(), abs=1e-5)


def test_scoring_only_reads_the_prompt(engine: Engine) -> None:
    engine.add([1, 2, 3], SamplingParams(max_tokens=0, prompt_logprobs=0), "a")
    [streamed] = engine.step()
    assert (streamed.token_ids, streamed.finish_reason) == ((), FinishReason.LENGTH)
    output = engine.take_output("a")
    assert output.token_ids == ()
    assert [entry.token_id for entry in output.prompt_logprobs] == [2, 3]


def test_scored_chunks_keep_within_the_bytes_allowed(
    fake_model: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_module, "MAX_SCORED_BYTES", 3 * 4 * fake_model.vocab_size)
    engine = Engine(fake_model.executor(), CONFIG)
    sizes: list[int] = []

    def sink(first: int, logits: npt.NDArray[np.float32]) -> None:
        sizes.append(len(logits))

    engine.generate([[1] * 8, [2] * 5], SamplingParams(max_tokens=0), [sink, sink])
    assert sum(sizes) == 13
    assert max(sizes) == 3


def test_failing_sink_drops_its_request_and_no_token_of_the_others(fake_model: SimpleNamespace) -> None:
    engine = Engine(fake_model.executor(), CONFIG)

    def sink(first: int, logits: npt.NDArray[np.float32]) -> None:
        raise OSError("disk full")

    engine.add([1, 2], GREEDY, "healthy")
    engine.add([3, 4], GREEDY, "failing", sink)
    with pytest.raises(OSError, match="disk full"):
        engine.step()
    tokens: tuple[int, ...] = ()
    while engine.has_unfinished:
        for output in engine.step():
            assert output.request_id == "healthy"
            tokens += output.token_ids
    assert tokens == fake_model.dense_greedy([1, 2], 5)
    assert engine.stats().used_blocks == 0


def test_failing_model_advances_nothing_and_can_be_stepped_again(fake_model: SimpleNamespace) -> None:
    executor = fake_model.executor()
    engine = Engine(executor, CONFIG)
    engine.add([1, 2], GREEDY, "a")
    engine.step()
    executor.fails = True
    with pytest.raises(RuntimeError):
        engine.step()
    executor.fails = False
    while engine.has_unfinished:
        engine.step()
    assert engine.take_output("a").token_ids == fake_model.dense_greedy([1, 2], 5)


def test_generate_leaves_nothing_behind_when_it_fails(fake_model: SimpleNamespace) -> None:
    executor = fake_model.executor()
    engine = Engine(executor, CONFIG)
    with pytest.raises(RequestError):
        engine.generate([[1], []], GREEDY)
    assert not engine.has_unfinished
    executor.fails = True
    with pytest.raises(RuntimeError):
        engine.generate([[1], [2]], GREEDY)
    assert not engine.has_unfinished
    assert engine.stats().used_blocks == 0


def test_generate_keeps_the_order_of_prompts_and_takes_parameters_per_prompt(
    engine: Engine, fake_model: SimpleNamespace
) -> None:
    prompts = [[i] for i in range(9)]
    outputs = engine.generate(prompts, [SamplingParams(max_tokens=9 - i) for i in range(9)])
    assert [output.token_ids for output in outputs] == [fake_model.dense_greedy([i], 9 - i) for i in range(9)]


def test_sampled_tokens_depend_on_the_seed_and_not_on_the_batch_or_preemption(fake_model: SimpleNamespace) -> None:
    params = [SamplingParams(max_tokens=20, temperature=2.0, top_p=0.9, seed=seed) for seed in range(6)]
    prompts = [[7, 8]] * 6
    together = Engine(fake_model.executor(), dataclasses.replace(CONFIG, num_kv_blocks=16))
    outputs = together.generate(prompts, params)
    assert together.stats().num_preemptions > 0
    assert len({output.token_ids for output in outputs}) == 6
    for output, own in zip(outputs, params, strict=True):
        [alone] = Engine(fake_model.executor(), CONFIG).generate([[7, 8]], own)
        assert alone.token_ids == output.token_ids


def test_each_token_has_a_draw_of_its_own(engine: Engine) -> None:
    [output] = engine.generate([[1]], SamplingParams(max_tokens=40, temperature=1e9, seed=5))
    # So hot that all tokens are equally likely: a draw picks its own place in the vocabulary.
    assert output.token_ids == tuple(int(uniform(5, index) * 31) for index in range(40))


def test_unseeded_requests_differ(engine: Engine) -> None:
    params = SamplingParams(max_tokens=30, temperature=2.0)
    first, second = engine.generate([[1], [1]], params)
    assert first.token_ids != second.token_ids


def test_counters_do_not_count_recomputed_tokens(fake_model: SimpleNamespace) -> None:
    engine = Engine(fake_model.executor(), dataclasses.replace(CONFIG, num_kv_blocks=16))
    engine.generate([[i] * 9 for i in range(4)], SamplingParams(max_tokens=15))
    stats = engine.stats()
    assert stats.num_preemptions > 0
    assert (stats.prompt_tokens, stats.generated_tokens) == (36, 60)


def test_numpy_integers_are_token_ids_too(engine: Engine, fake_model: SimpleNamespace) -> None:
    [output] = engine.generate([np.array([1, 2])], GREEDY)  # type: ignore[list-item]
    assert output.token_ids == fake_model.dense_greedy([1, 2], 5)
    assert output.prompt_ids == (1, 2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_model_len": 5000}, "engine.max_model_len: 5,000 exceeds .* 4,096"),
        (
            {"num_kv_blocks": 15},
            "engine.num_kv_blocks: 15 blocks .* raise it to 16 or lower engine.max_model_len to 60",
        ),
        (
            {"num_kv_blocks": None, "kv_cache_memory": 100},
            "engine.kv_cache_memory: 100 bytes .* raise it to 512 or lower engine.max_model_len to 12",
        ),
        ({"num_kv_blocks": None, "kv_cache_memory": 8}, "raise it to 512$"),
        ({"max_num_batched_tokens": 3}, "engine.max_num_batched_tokens: 3 is below max_num_seqs 4"),
        ({"num_kv_blocks": 0}, "engine.num_kv_blocks: 0 is below 1"),
    ],
)
def test_engine_that_could_not_serve_is_refused_with_what_to_change(
    fake_model: SimpleNamespace, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(RecipeError, match=message):
        Engine(fake_model.executor(), dataclasses.replace(CONFIG, **changes))


def test_pool_holds_every_sequence_at_full_length_or_what_the_bytes_allow(fake_model: SimpleNamespace) -> None:
    config = dataclasses.replace(CONFIG, num_kv_blocks=None)
    assert Engine(fake_model.executor(), config).stats().total_blocks == 64
    config = dataclasses.replace(config, kv_cache_memory=32 * 20 + 31)
    assert Engine(fake_model.executor(), config).stats().total_blocks == 20


def test_prompt_log_probabilities_come_whole_with_the_first_output_of_the_first_sample(engine: Engine) -> None:
    prompt_ids = [1 + number % 30 for number in range(23)]  # read in two steps
    params = SamplingParams(n=2, max_tokens=3, temperature=1.0, prompt_logprobs=0)
    request_id = engine.add(prompt_ids, params)
    scoring_id = engine.add(prompt_ids, SamplingParams(max_tokens=0, prompt_logprobs=0))
    outputs = []
    while engine.has_unfinished:
        outputs += engine.step()
    expected = engine.take_output(request_id).prompt_logprobs
    assert len(expected) == 22
    first, *others = [output for output in outputs if output.request_id == request_id]
    assert (first.index, first.prompt_logprobs) == (0, expected)
    assert len(others) == 5 and not any(output.prompt_logprobs for output in others)
    [scored] = [output for output in outputs if output.request_id == scoring_id]
    assert [entry.token_id for entry in scored.prompt_logprobs] == prompt_ids[1:]

"""Constrained requests through the whole engine, with a grammar that is arithmetic: as each is alone."""

from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import numpy.typing as npt
import pytest

from quantpipe.engine.config import EngineConfig
from quantpipe.engine.constraint import Constraint, Grammar
from quantpipe.engine.draws import sample_seed
from quantpipe.engine.engine import Engine
from quantpipe.engine.request import FinishReason, SamplingParams
from quantpipe.engine.sampled import Sampled
from quantpipe.engine.sampler import sample
from quantpipe.errors import RequestError

EOS = 0
CONFIG = EngineConfig(
    max_model_len=48, block_size=4, num_kv_blocks=30, max_num_seqs=6, max_num_batched_tokens=24, admission="greedy"
)


@dataclass
class Ladder:
    """Allows three tokens that follow from the sum of those before, then, after ``length`` tokens, the end alone.

    With ``fails_at`` it breaks there, as a grammar that became too complex does.
    """

    length: int
    fails_at: int | None = None
    total: int = 0
    num: int = 0
    is_off: bool = False

    @property
    def failure(self) -> str | None:
        return "too complex" if self.is_off or self.num == self.fails_at else None

    def allowed_V(self, vocab_size: int) -> npt.NDArray[np.bool_]:
        allowed_V = np.zeros(vocab_size, dtype=np.bool_)
        if self.failure is None:
            allowed_V[self.allowed(vocab_size)] = True
        return allowed_V

    def allowed(self, vocab_size: int) -> list[int]:
        if self.num >= self.length:
            return [EOS]
        return [1 + (self.total * 7 + step) % (vocab_size - 1) for step in range(3)]

    def append(self, token_id: int) -> None:
        self.is_off = self.is_off or token_id not in self.allowed(31)
        self.total += token_id
        self.num += 1

    def copy(self) -> Constraint:
        return Ladder(self.length, self.fails_at, self.total, self.num, self.is_off)


class LadderCompiler:
    def compile(self, grammar: Grammar) -> Ladder:
        length, *fails_at = map(int, grammar.text.split())
        return Ladder(length, *fails_at)


def ladder(text: str) -> Grammar:
    return Grammar("lark", text)


def make_engine(fake_model: SimpleNamespace, config: EngineConfig = CONFIG, wrong_frac: float | None = None) -> Engine:
    drafter = None if wrong_frac is None else fake_model.oracle(wrong_frac)
    engine = Engine(fake_model.executor(eos_token_ids=(EOS,)), config, drafter=drafter)
    engine.compiler = LadderCompiler()
    return engine


def alone(fake_model: SimpleNamespace, prompt_ids: list[int], params: SamplingParams) -> list[tuple[int, ...]]:
    """Each sample token by token, with no cache, batch, schedule or guesses."""
    assert params.grammar is not None and params.seed is not None
    samples = []
    for index in range(params.n):
        constraint = LadderCompiler().compile(params.grammar)
        own = Sampled(params, prompt_ids, sample_seed(params.seed, index), [EOS], constraint)
        token_ids: list[int] = []
        while len(token_ids) < params.max_tokens and EOS not in token_ids:
            logits_V = fake_model.dense_logits([*prompt_ids, *token_ids]).numpy()
            [token_id] = sample(logits_V[None], [own])
            assert token_id is not None
            token_ids.append(token_id)
            own.append(token_id)
        samples.append(tuple(token_ids))
    return samples


REQUESTS = [
    ([1, 2, 3], SamplingParams(max_tokens=12, seed=1, grammar=ladder("7"))),
    ([5] * 9, SamplingParams(n=3, max_tokens=20, temperature=1.0, seed=2, grammar=ladder("15"))),
    ([4, 9], SamplingParams(max_tokens=6, temperature=0.7, top_p=0.8, top_k=2, seed=3, grammar=ladder("50"))),
    ([8] * 17, SamplingParams(n=2, max_tokens=24, temperature=1.3, min_p=0.1, seed=4, grammar=ladder("20"))),
    ([2, 2], SamplingParams(max_tokens=16, seed=5, frequency_penalty=2.0, logit_bias={7: 9.0}, grammar=ladder("9"))),
]


@pytest.mark.parametrize("num_kv_blocks", [12, 120])
@pytest.mark.parametrize("wrong_frac", [None, 0.0, 0.4])
def test_constrained_requests_are_what_each_is_alone(
    fake_model: SimpleNamespace, num_kv_blocks: int, wrong_frac: float | None
) -> None:
    config = EngineConfig(**{**vars(CONFIG), "num_kv_blocks": num_kv_blocks})
    engine = make_engine(fake_model, config, wrong_frac)
    requests = REQUESTS * 2
    outputs = engine.generate([prompt for prompt, _ in requests], [params for _, params in requests])
    for output, (prompt_ids, params) in zip(outputs, requests, strict=True):
        assert [sample.token_ids for sample in output.samples] == alone(fake_model, prompt_ids, params)
    assert (engine.stats().num_preemptions > 0) == (num_kv_blocks == 12)
    assert wrong_frac is None or engine.stats().draft_tokens > 0


def test_text_ends_with_its_grammar_or_is_cut_by_max_tokens(fake_model: SimpleNamespace) -> None:
    engine = make_engine(fake_model)
    whole, cut = engine.generate(
        [[1, 2], [1, 2]],
        [SamplingParams(max_tokens=12, grammar=ladder("5")), SamplingParams(max_tokens=4, grammar=ladder("5"))],
    )
    assert (len(whole.token_ids), whole.finish_reason) == (6, FinishReason.STOP)
    assert (cut.token_ids, cut.finish_reason) == (whole.token_ids[:4], FinishReason.LENGTH)


def test_minimum_length_gives_way_where_the_grammar_is_complete(fake_model: SimpleNamespace) -> None:
    [output] = make_engine(fake_model).generate(
        [[1, 2]], SamplingParams(max_tokens=12, min_tokens=9, grammar=ladder("5"))
    )
    assert (len(output.token_ids), output.finish_reason) == (6, FinishReason.STOP)


def test_minimum_length_holds_back_an_end_that_the_grammar_only_allows() -> None:
    class Free(Ladder):
        def allowed(self, vocab_size: int) -> list[int]:
            return [EOS, 1]

        def copy(self) -> "Free":
            return Free(3)

    own = Sampled(SamplingParams(min_tokens=1), eos_token_ids=[EOS], constraint=Free(3))
    assert own.adjust(np.ones(3, dtype=np.float32)).tolist() == [-np.inf, 1.0, -np.inf]
    assert own.after([1]).adjust(np.ones(3, dtype=np.float32)).tolist() == [1.0, 1.0, -np.inf]


def test_stop_tokens_end_a_constrained_text_too(fake_model: SimpleNamespace) -> None:
    engine = make_engine(fake_model)
    [whole] = engine.generate([[1, 2]], SamplingParams(max_tokens=12, grammar=ladder("9")))
    stop = whole.token_ids[4]
    [stopped] = engine.generate([[1, 2]], SamplingParams(max_tokens=12, stop_token_ids=(stop,), grammar=ladder("9")))
    assert stopped.token_ids == whole.token_ids[: whole.token_ids.index(stop) + 1]
    assert stopped.finish_reason is FinishReason.STOP


@pytest.mark.parametrize("wrong_frac", [None, 0.0])
def test_grammar_that_fails_midway_ends_its_own_request_and_no_other(
    fake_model: SimpleNamespace, wrong_frac: float | None
) -> None:
    engine = make_engine(fake_model, wrong_frac=wrong_frac)
    failing = engine.add([1, 2, 3], SamplingParams(max_tokens=12, n=2, temperature=1.0, seed=1, grammar=ladder("9 3")))
    other = engine.add([1, 2, 3], SamplingParams(max_tokens=12, grammar=ladder("9")))
    outputs = []
    while engine.has_unfinished:
        outputs += engine.step()
    failed = engine.take_output(failing)
    assert [sample.finish_reason for sample in failed.samples] == [FinishReason.ABORT] * 2
    assert {sample.error for sample in failed.samples} == {"grammar: too complex; ask for a simpler one"}
    assert [output.is_refused for output in outputs if output.error] == [True, True]
    assert len(engine.take_output(other).token_ids) == 10


def test_looking_ahead_leaves_the_constraint_where_it_is() -> None:
    own = Sampled(SamplingParams(), constraint=Ladder(5))
    row = np.zeros(31, dtype=np.float32)
    before = own.adjust(row)
    own.after([1, 2])
    assert np.array_equal(own.adjust(row), before)
    assert not np.array_equal(own.after([3]).adjust(row), before)


@pytest.mark.parametrize(
    ("changes", "param", "message"),
    [
        ({"grammar": "text"}, "grammar", "is not a quantpipe.engine.constraint.Grammar"),
        ({"grammar": Grammar("xml", "a")}, "grammar", "kind 'xml' is not one of json_schema, regex, lark"),
        ({"grammar": Grammar("lark", "5"), "ignore_eos": True}, "ignore_eos", "ends with an end-of-sequence token"),
    ],
)
def test_what_is_no_grammar_is_refused(
    fake_model: SimpleNamespace, changes: dict[str, object], param: str, message: str
) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        make_engine(fake_model).add([1], SamplingParams(**changes))
    assert caught.value.param == param


def test_engine_without_a_compiler_or_a_model_without_an_end_refuses_grammars(fake_model: SimpleNamespace) -> None:
    params = SamplingParams(grammar=ladder("5"))
    with pytest.raises(RequestError, match="without a compiler of grammars"):
        Engine(fake_model.executor(eos_token_ids=(EOS,)), CONFIG).add([1], params)
    endless = Engine(fake_model.executor(), CONFIG)
    endless.compiler = LadderCompiler()
    with pytest.raises(RequestError, match="no end-of-sequence token"):
        endless.add([1], params)

"""lm-eval's view of an engine: log-likelihoods and greedy continuations of text. Knows no task and no metric.

The boundary between context and continuation is drawn by lm-eval's own TemplateLM, as for its Hugging Face model.
"""

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from quantpipe.engine.request import RequestOutput, SamplingParams
from quantpipe.errors import DataError
from quantpipe.evaluate.served import ServedModel, TextCodec
from quantpipe.report import Progress, no_progress

SCORE_PARAMS = SamplingParams(max_tokens=0, ignore_eos=True, prompt_logprobs=0)
REQUESTS_PER_CALL = 64  # several times what runs at once, so batches stay full; small enough that progress moves
KNOWN_GENERATION_KEYS = ("do_sample", "max_gen_toks", "temperature", "until")
DEFAULT_MAX_GEN_TOKS = 256  # lm-eval's own default

ScoredPair = tuple[float, bool]  # log-likelihood, and whether greedy decoding would have produced the text


class EngineLM(TemplateLM):  # type: ignore[misc]  # lm-eval ships no types
    """An engine and its tokenizer as an lm-eval model; all requests of one kind share the engine's batches."""

    backend = "causal"

    def __init__(self, engine: ServedModel, tokenizer: TextCodec, progress: Progress = no_progress) -> None:
        super().__init__()
        self._engine = engine
        self._tokenizer = tokenizer
        self._progress = progress
        self._stop_ids_of: dict[tuple[str, ...], tuple[int, ...]] = {}

    @property
    def eot_token_id(self) -> int | None:
        """The token that ends a text."""
        return self._tokenizer.eos_token_id

    @property
    def prefix_token_id(self) -> int:
        """What an empty context is replaced by: BOS, or EOS for models without one, as lm-eval's HF model does."""
        candidates = (self._tokenizer.bos_token_id, self._tokenizer.eos_token_id)
        prefix = next((token_id for token_id in candidates if token_id is not None), None)
        if prefix is None:
            raise DataError("tokenizer: has neither a BOS nor an EOS token, so a text without context cannot be scored")
        return prefix

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Token ids of a text, begun as the model wants texts begun, unless told otherwise; never with two BOS."""
        ids = self._tokenizer.encode(string, add_special_tokens=add_special_tokens is not False)
        bos = self._tokenizer.bos_token_id
        return ids[1:] if bos is not None and ids[:2] == [bos, bos] else ids

    def encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """Token ids of a context and of what is scored after it, exactly as ``loglikelihood`` uses them."""
        if context:
            context_ids, continuation_ids = self._encode_pair(context, continuation)
            return context_ids, continuation_ids
        ids = self.tok_encode(continuation, add_special_tokens=False)
        return ([self.prefix_token_id], ids) if ids[:1] != [self.prefix_token_id] else (ids[:1], ids[1:])

    def loglikelihood(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[ScoredPair]:
        """Natural-log probability of each continuation after its context, and whether it is the greedy one."""
        pairs = [self.encode_pair(*request.args) for request in requests]
        return self._score(pairs, "choices scored")

    def loglikelihood_rolling(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[float]:
        """Natural-log probability of each whole text, every token predicted once, longer texts in pieces."""
        pieces_of = [self._rolling_pieces(request.args[0]) for request in requests]
        scores = iter(self._score([piece for pieces in pieces_of for piece in pieces], "text pieces scored"))
        return [sum(next(scores)[0] for _ in pieces) for pieces in pieces_of]

    def generate_until(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[str]:
        """The greedy continuation of each context, up to the first of its ``until`` strings, which is left out."""
        prompts = [self.tok_encode(request.args[0]) for request in requests]
        params, untils = zip(*(self._generation(request.args[1]) for request in requests), strict=True)
        outputs = self._run(prompts, params, "answers generated")
        texts = (self._tokenizer.decode(output.token_ids, skip_special_tokens=True) for output in outputs)
        return [_cut_before(text, until) for text, until in zip(texts, untils, strict=True)]

    def _rolling_pieces(self, text: str) -> list[tuple[list[int], list[int]]]:
        windows = get_rolling_token_windows(
            token_list=self.tok_encode(text, add_special_tokens=False),  # the prefix token takes the place of BOS
            prefix_token=self.prefix_token_id,
            max_seq_len=self._engine.max_model_len - 1,  # the engine reads the last token too
            context_len=1,
        )
        return [make_disjoint_window(window) for window in windows]

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[tuple[str, str], list[int], list[int]]], **_: Any
    ) -> list[ScoredPair]:
        return self._score([(context_ids, continuation_ids) for _, context_ids, continuation_ids in requests], "scored")

    def _score(self, pairs: Sequence[tuple[list[int], list[int]]], label: str) -> list[ScoredPair]:
        """Each pair is read as one prompt, of which only the continuation is scored: choices share their context."""
        if not all(context and continuation for context, continuation in pairs):
            raise DataError("evaluate: a text to score is empty; every choice needs at least one token of its own")
        order = _sharing_order([tuple(context) for context, _ in pairs])
        prompts = [[*pairs[i][0], *pairs[i][1]] for i in order]
        params = [dataclasses.replace(SCORE_PARAMS, prompt_logprobs_from=len(pairs[i][0])) for i in order]
        outputs = dict(zip(order, self._run(prompts, params, label), strict=True))
        return [_score_tail(outputs[i], len(text)) for i, (_, text) in enumerate(pairs)]

    def _generation(self, settings: dict[str, Any]) -> tuple[SamplingParams, tuple[str, ...]]:
        """Sampling parameters and stop strings of one task's ``generation_kwargs``; only greedy decoding is paired."""
        unknown = sorted(set(settings) - set(KNOWN_GENERATION_KEYS))
        if unknown:
            raise DataError(f"generation_kwargs: unknown '{unknown[0]}' (known: {', '.join(KNOWN_GENERATION_KEYS)})")
        if settings.get("do_sample") or settings.get("temperature"):
            raise DataError("generation_kwargs: sampling cannot be compared item by item; use do_sample: false")
        until = settings.get("until") or ()
        stops = (until,) if isinstance(until, str) else tuple(until)
        if stops not in self._stop_ids_of:
            self._stop_ids_of[stops] = self._ids_that_contain(stops)
        max_tokens = int(settings.get("max_gen_toks", DEFAULT_MAX_GEN_TOKS))
        return SamplingParams(max_tokens=max_tokens, stop_token_ids=self._stop_ids_of[stops]), stops

    def _ids_that_contain(self, stops: tuple[str, ...]) -> tuple[int, ...]:
        """Tokens that end the answer by themselves. Stop strings spread over tokens are cut off afterwards."""
        texts = (self._tokenizer.decode([token_id]) for token_id in range(self._tokenizer.vocab_size))
        return tuple(token_id for token_id, text in enumerate(texts) if any(stop in text for stop in stops))

    def _run(self, prompts: Sequence[list[int]], params: Sequence[SamplingParams], label: str) -> list[RequestOutput]:
        for prompt_ids, each in zip(prompts, params, strict=True):
            if len(prompt_ids) + each.max_tokens > self._engine.max_model_len:
                raise DataError(
                    f"evaluate: a prompt of {len(prompt_ids):,} tokens and {each.max_tokens} new ones exceed "
                    f"max_model_len {self._engine.max_model_len:,}; shorten the item or raise engine.max_model_len"
                )

        def outputs() -> Iterator[RequestOutput]:
            for start in range(0, len(prompts), REQUESTS_PER_CALL):
                part = slice(start, start + REQUESTS_PER_CALL)
                yield from self._engine.generate(prompts[part], params[part])

        return list(self._progress(outputs(), total=len(prompts), label=label))


def _sharing_order(contexts: Sequence[tuple[int, ...]]) -> list[int]:
    """The order to ask in: of those in one call, first one of each context, then those that find it computed."""
    order: list[int] = []
    for start in range(0, len(contexts), REQUESTS_PER_CALL):
        part = range(start, min(start + REQUESTS_PER_CALL, len(contexts)))
        first_of = {contexts[i]: i for i in reversed(part)}
        order += sorted(part, key=lambda i: first_of[contexts[i]] != i)
    return order


def _score_tail(output: RequestOutput, num_tokens: int) -> ScoredPair:
    tail = output.prompt_logprobs
    if len(tail) != num_tokens:
        raise DataError(
            f"evaluate: the engine returned {len(tail)} log-probabilities for the last {num_tokens} of a prompt of "
            f"{len(output.prompt_ids)} tokens; one for each is needed"
        )
    loglikelihood = math.fsum(token.logprob for token in tail)
    if not math.isfinite(loglikelihood):
        raise DataError(f"evaluate: log-likelihood {loglikelihood} of {len(tail)} tokens; the logits are broken")
    return loglikelihood, all(token.is_greedy for token in tail)


def _cut_before(text: str, stops: Sequence[str]) -> str:
    return text[: min((text.index(stop) for stop in stops if stop in text), default=len(text))]

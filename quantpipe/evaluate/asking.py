"""Asking an engine in full batches: scores of texts behind their contexts, and greedy answers. Knows no tasks.

Texts behind one context are a tree of tokens: a prompt gives the scores of all tokens that branch off along it, so the
last token of a text is never read, and choices of one token each take one prompt together. Prompts that share a context
are asked in an order in which the engine finds it computed.
"""

import dataclasses
from collections.abc import Iterator, Sequence

from quantpipe.engine.request import PromptLogitsSink, RequestOutput, SamplingParams
from quantpipe.errors import DataError
from quantpipe.evaluate.score_tree import ScoredPair, ScoreTree
from quantpipe.evaluate.served import ServedModel, TextCodec
from quantpipe.report import Progress, no_progress

SCORE_PARAMS = SamplingParams(max_tokens=0, ignore_eos=True)
REQUESTS_PER_CALL = 64  # several times what runs at once, so batches stay full; small enough that progress moves
FEWEST_COMMON_TOKENS, FEWEST_COMMON_PROMPTS = 32, 4

TokenPair = tuple[list[int], list[int]]  # token ids of a context, and of what is scored after it


@dataclasses.dataclass(frozen=True)
class GreedyAsk:
    """A prompt to continue greedily: up to ``max_tokens`` tokens, or the first of the ``stops``, which is left out."""

    prompt_ids: Sequence[int]
    max_tokens: int
    stops: tuple[str, ...] = ()


class Asker:
    """An engine and its tokenizer; all that is asked in one call shares the engine's batches."""

    def __init__(self, engine: ServedModel, tokenizer: TextCodec, progress: Progress = no_progress) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._progress = progress
        self._stop_ids_of: dict[tuple[str, ...], tuple[int, ...]] = {}

    @property
    def max_model_len(self) -> int:
        """The most tokens of a prompt and what follows it."""
        return self._engine.max_model_len

    @property
    def prefix_token_id(self) -> int:
        """What an empty context is replaced by: BOS, or EOS for models without one, as lm-eval's HF model does."""
        candidates = (self._tokenizer.bos_token_id, self._tokenizer.eos_token_id)
        prefix = next((token_id for token_id in candidates if token_id is not None), None)
        if prefix is None:
            raise DataError("tokenizer: has neither a BOS nor an EOS token, so a text without context cannot be scored")
        return prefix

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text, begun as the model wants texts begun unless told otherwise; never with two BOS."""
        ids = self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        bos = self._tokenizer.bos_token_id
        return ids[1:] if bos is not None and ids[:2] == [bos, bos] else ids

    def encode_pair(self, context: str, text: str, add_special_tokens: bool = True) -> TokenPair:
        """A context and a text behind it, encoded together and parted where the context alone would end.

        Spaces at the end of the context go to the text, as tokens begin with spaces.
        """
        text = context[len(context.rstrip()) :] + text
        context = context.rstrip()
        if not context:
            ids = self.encode(text, add_special_tokens=False)
            return ([self.prefix_token_id], ids) if ids[:1] != [self.prefix_token_id] else (ids[:1], ids[1:])
        context_ids = self.encode(context, add_special_tokens)
        return context_ids, self.encode(context + text, add_special_tokens)[len(context_ids) :]

    def score(self, pairs: Sequence[TokenPair], label: str) -> list[ScoredPair]:
        """Natural-log probability of each text behind its context, and whether it is the greedy one.

        Each pair is read as one prompt, of which only the text is scored. DataError where a text has no tokens, a pair
        is too long for the engine, or the logits are broken.
        """
        if not all(context and text for context, text in pairs):
            raise DataError("evaluate: a text to score is empty; every choice needs at least one token of its own")
        trees: dict[tuple[int, ...], ScoreTree] = {}
        for context, text in pairs:
            trees.setdefault(tuple(context), ScoreTree(len(context))).add(tuple(text))
        branches = [(context, path) for context, tree in trees.items() for path in tree.paths()]
        branches = [branches[i] for i in _sharing_order([context for context, _ in branches])]
        params = [dataclasses.replace(SCORE_PARAMS, prompt_logprobs_from=len(context)) for context, _ in branches]
        sinks = [trees[context].sink(path) for context, path in branches]
        self._run([[*context, *path] for context, path in branches], params, label, sinks)
        return [trees[tuple(context)].score(tuple(text)) for context, text in pairs]

    def answer(self, asked: Sequence[GreedyAsk], label: str) -> list[str]:
        """The greedy continuation of each prompt. DataError where one is too long for the engine."""
        params = [
            SamplingParams(max_tokens=each.max_tokens, stop_token_ids=self._stop_ids(each.stops)) for each in asked
        ]
        outputs = self._run([each.prompt_ids for each in asked], params, label)
        texts = [self._tokenizer.decode(output.token_ids, skip_special_tokens=True) for output in outputs]
        return [_cut_before(text, each.stops) for text, each in zip(texts, asked, strict=True)]

    def _stop_ids(self, stops: tuple[str, ...]) -> tuple[int, ...]:
        """Tokens that end the answer by themselves. Stop strings spread over tokens are cut off afterwards."""
        if stops and stops not in self._stop_ids_of:
            texts = (self._tokenizer.decode([token_id]) for token_id in range(self._tokenizer.vocab_size))
            ids = tuple(token_id for token_id, text in enumerate(texts) if any(stop in text for stop in stops))
            self._stop_ids_of[stops] = ids
        return self._stop_ids_of.get(stops, ())

    def _run(
        self,
        prompts: Sequence[Sequence[int]],
        params: Sequence[SamplingParams],
        label: str,
        sinks: Sequence[PromptLogitsSink] | None = None,
    ) -> list[RequestOutput]:
        for prompt_ids, each in zip(prompts, params, strict=True):
            if len(prompt_ids) + each.max_tokens > self._engine.max_model_len:
                raise DataError(
                    f"evaluate: a prompt of {len(prompt_ids):,} tokens and {each.max_tokens} new ones exceed "
                    f"max_model_len {self._engine.max_model_len:,}; shorten the item or raise engine.max_model_len"
                )

        def outputs() -> Iterator[RequestOutput]:
            for start in range(0, len(prompts), REQUESTS_PER_CALL):
                part = slice(start, start + REQUESTS_PER_CALL)
                if beginnings := _common_beginnings(prompts[part]):  # read once, before all that begin so
                    self._engine.generate(beginnings, SCORE_PARAMS)
                yield from self._engine.generate(prompts[part], params[part], None if sinks is None else sinks[part])

        return list(self._progress(outputs(), total=len(prompts), label=label))


def _common_beginnings(prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    """What several prompts begin with, such as examples; worth reading once where it is long and often there."""
    groups: dict[tuple[int, ...], list[Sequence[int]]] = {}
    for prompt_ids in prompts:
        groups.setdefault(tuple(prompt_ids[:FEWEST_COMMON_TOKENS]), []).append(prompt_ids)
    return [
        _common_beginning(group)
        for beginning, group in groups.items()
        if len(group) >= FEWEST_COMMON_PROMPTS and len(beginning) == FEWEST_COMMON_TOKENS
    ]


def _common_beginning(prompts: Sequence[Sequence[int]]) -> list[int]:
    """What all of them begin with: what the two that differ most in order have in common."""
    first, last = min(map(tuple, prompts)), max(map(tuple, prompts))
    num_common = next((i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), len(first))
    return list(first[:num_common])


def _sharing_order(contexts: Sequence[tuple[int, ...]]) -> list[int]:
    """The order to ask in: of those in one call, first one of each context, then those that find it computed."""
    order: list[int] = []
    for start in range(0, len(contexts), REQUESTS_PER_CALL):
        part = range(start, min(start + REQUESTS_PER_CALL, len(contexts)))
        first_of = {contexts[i]: i for i in reversed(part)}
        order += sorted(part, key=lambda i: first_of[contexts[i]] != i)
    return order


def _cut_before(text: str, stops: Sequence[str]) -> str:
    return text[: min((text.index(stop) for stop in stops if stop in text), default=len(text))]

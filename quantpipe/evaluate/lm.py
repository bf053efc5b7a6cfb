"""lm-eval's view of an engine: log-likelihoods and greedy continuations of text. Knows no task and no metric.

The boundary between context and continuation is drawn by lm-eval's own TemplateLM, as for its Hugging Face model.
"""

from collections.abc import Sequence
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from quantpipe.errors import DataError
from quantpipe.evaluate.asking import Asker, GreedyAsk, TokenPair
from quantpipe.evaluate.score_tree import ScoredPair
from quantpipe.evaluate.served import ServedModel, TextCodec
from quantpipe.report import Progress, no_progress

KNOWN_GENERATION_KEYS = ("do_sample", "max_gen_toks", "temperature", "until")
DEFAULT_MAX_GEN_TOKS = 256  # lm-eval's own default


class EngineLM(TemplateLM):  # type: ignore[misc]  # lm-eval ships no types
    """An engine and its tokenizer as an lm-eval model; all requests of one kind share the engine's batches."""

    backend = "causal"

    def __init__(self, engine: ServedModel, tokenizer: TextCodec, progress: Progress = no_progress) -> None:
        super().__init__()
        self._tokenizer = tokenizer
        self._asker = Asker(engine, tokenizer, progress)

    @property
    def eot_token_id(self) -> int | None:
        """The token that ends a text."""
        return self._tokenizer.eos_token_id

    @property
    def prefix_token_id(self) -> int:
        """What an empty context is replaced by: BOS, or EOS for models without one, as lm-eval's HF model does."""
        return self._asker.prefix_token_id

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Token ids of a text, begun as the model wants texts begun, unless told otherwise; never with two BOS."""
        return self._asker.encode(string, add_special_tokens is not False)

    def encode_pair(self, context: str, continuation: str) -> TokenPair:
        """Token ids of a context and of what is scored after it, exactly as ``loglikelihood`` uses them."""
        if context:
            context_ids, continuation_ids = self._encode_pair(context, continuation)
            return context_ids, continuation_ids
        return self._asker.encode_pair("", continuation)

    def loglikelihood(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[ScoredPair]:
        """Natural-log probability of each continuation after its context, and whether it is the greedy one."""
        return self._asker.score([self.encode_pair(*request.args) for request in requests], "choices scored")

    def loglikelihood_rolling(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[float]:
        """Natural-log probability of each whole text, every token predicted once, longer texts in pieces."""
        pieces_of = [self._rolling_pieces(request.args[0]) for request in requests]
        scores = iter(self._asker.score([piece for pieces in pieces_of for piece in pieces], "text pieces scored"))
        return [sum(next(scores)[0] for _ in pieces) for pieces in pieces_of]

    def generate_until(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[str]:
        """The greedy continuation of each context, up to the first of its ``until`` strings, which is left out."""
        asked = []
        for request in requests:
            max_tokens, stops = check_generation(request.args[1])
            asked.append(GreedyAsk(self.tok_encode(request.args[0]), max_tokens, stops))
        return self._asker.answer(asked, "answers generated")

    def _rolling_pieces(self, text: str) -> list[TokenPair]:
        windows = get_rolling_token_windows(
            token_list=self.tok_encode(text, add_special_tokens=False),  # the prefix token takes the place of BOS
            prefix_token=self.prefix_token_id,
            max_seq_len=self._asker.max_model_len - 1,  # the engine reads the last token too
            context_len=1,
        )
        return [make_disjoint_window(window) for window in windows]

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[tuple[str, str], list[int], list[int]]], **_: Any
    ) -> list[ScoredPair]:
        pairs = [(context_ids, continuation_ids) for _, context_ids, continuation_ids in requests]
        return self._asker.score(pairs, "scored")


def check_generation(settings: dict[str, Any]) -> tuple[int, tuple[str, ...]]:
    """Most tokens and stop strings of one task's ``generation_kwargs``.

    DataError for a setting that is not known, and for sampling: only greedy answers are compared in pairs.
    """
    unknown = sorted(set(settings) - set(KNOWN_GENERATION_KEYS))
    if unknown:
        raise DataError(f"generation_kwargs: unknown '{unknown[0]}' (known: {', '.join(KNOWN_GENERATION_KEYS)})")
    if settings.get("do_sample") or settings.get("temperature"):
        raise DataError("generation_kwargs: sampling cannot be compared item by item; use do_sample: false")
    until = settings.get("until") or ()
    stops = (until,) if isinstance(until, str) else tuple(until)
    return int(settings.get("max_gen_toks", DEFAULT_MAX_GEN_TOKS)), stops

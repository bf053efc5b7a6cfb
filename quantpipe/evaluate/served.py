"""The part of an engine that the evals use. Anything with this shape can be evaluated."""

from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

from quantpipe.engine.request import PromptLogitsSink, RequestOutput, SamplingParams


class ServedModel(Protocol):
    """Prompts of token ids in, finished requests out, in the order of the prompts."""

    @property
    def max_model_len(self) -> int: ...

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams],
        prompt_logits_sinks: Sequence[PromptLogitsSink] | None = None,
    ) -> list[RequestOutput]: ...


class TextCodec(Protocol):
    """Text to token ids and back; ``add_special_tokens`` adds what the model wants around plain text, mostly a BOS."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def bos_token_id(self) -> int | None: ...

    @property
    def eos_token_id(self) -> int | None: ...

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]: ...

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...


@runtime_checkable
class ChatCodec(Protocol):
    """What a tokenizer has beside that for chat: the template, if any, and the special tokens it may name."""

    @property
    def chat_template(self) -> str | None: ...

    @property
    def special_tokens(self) -> Mapping[str, str]: ...

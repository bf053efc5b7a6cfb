"""What ``LLM.generate`` and ``LLM.chat`` return: texts with their tokens. Fields are called as in vLLM's outputs."""

from dataclasses import dataclass

from quantpipe.engine.request import FinishReason, TokenLogprob


@dataclass(frozen=True)
class CompletionOutput:
    """One sample of a prompt.

    ``token_ids`` are all that were generated, those of a stop string or the stop token included; ``text`` ends before
    them. ``stop_reason`` is the stop string or the token of ``stop_token_ids`` that ended it; None where it ended by
    itself. With ``finish_reason`` ``ABORT`` the sample failed, ``error`` says why, and the text is what there was.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    stop_reason: str | int | None = None
    logprobs: tuple[TokenLogprob, ...] = ()
    error: str | None = None


@dataclass(frozen=True)
class Completion:
    """A prompt and its samples, in the order of their index. ``prompt`` is None where token ids were given."""

    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[CompletionOutput, ...]
    prompt_logprobs: tuple[TokenLogprob, ...] = ()

    @property
    def text(self) -> str:
        """The text of the first sample."""
        return self.outputs[0].text

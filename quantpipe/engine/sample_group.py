"""The samples of one request on their way: which still run, and what the others came to. Knows no blocks."""

import secrets
from dataclasses import dataclass, field

from quantpipe.engine.constraint import Constraint
from quantpipe.engine.draws import sample_seed
from quantpipe.engine.prefix_cache import PrefixNamespace
from quantpipe.engine.request import FinishReason, Request, RequestOutput, SampleOutput, Sequence, TokenLogprob


@dataclass(eq=False)
class SampleGroup:
    """All sequences of a request, in the order of their index; the first reads the prompt for all of them."""

    seqs: tuple[Sequence, ...]
    _ended: dict[int, SampleOutput] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        request: Request,
        namespace: PrefixNamespace,
        eos_token_ids: frozenset[int],
        constraint: Constraint | None = None,
    ) -> "SampleGroup":
        """A sequence for each sample, with a seed of its own, and a copy of ``constraint``."""
        seed = secrets.randbits(64) if request.params.seed is None else request.params.seed
        first, *forks = (
            Sequence(
                request,
                list(request.prompt_ids),
                sample_seed(seed, index),
                namespace,
                eos_token_ids,
                index,
                constraint=None if constraint is None else constraint.copy(),
            )
            for index in range(request.params.n)
        )
        first.forks, first.num_pending_forks = tuple(forks), len(forks)
        return cls((first, *forks))

    @property
    def request(self) -> Request:
        return self.seqs[0].request

    @property
    def is_finished(self) -> bool:
        """Whether every sample has ended."""
        return len(self._ended) == len(self.seqs)

    @property
    def unended(self) -> list[Sequence]:
        """The sequences that a scheduler has: neither ended nor waiting for the prompt to be read."""
        pending = self.seqs[0].pending_forks
        return [seq for seq in self.seqs if seq.index not in self._ended and seq not in pending]

    def has_ended(self, index: int) -> bool:
        return index in self._ended

    def end(self, seq: Sequence, reason: FinishReason, error: str | None = None) -> None:
        """Keep what a sample came to."""
        token_ids = tuple(seq.token_ids[seq.num_prompt_tokens :])
        self._ended[seq.index] = SampleOutput(seq.index, token_ids, reason, tuple(seq.logprobs), error)

    def output(self) -> RequestOutput:
        """The finished request."""
        samples = tuple(self._ended[seq.index] for seq in self.seqs)
        first, request = samples[0], self.request
        return RequestOutput(
            request.request_id,
            request.prompt_ids,
            first.token_ids,
            first.finish_reason,
            first.logprobs,
            tuple(self.seqs[0].prompt_logprobs),
            first.error,
            samples,
            self.seqs[0].num_cached_tokens,
        )


def append_tokens(
    seq: Sequence, token_ids: tuple[int, ...], logprobs: tuple[TokenLogprob, ...]
) -> tuple[int, FinishReason | None]:
    """Add new tokens up to the one that ends the sample: how many were added, and why it ended."""
    num_added = 0
    reason: FinishReason | None = None
    while reason is None and num_added < len(token_ids):
        seq.token_ids.append(token_ids[num_added])
        num_added += 1
        reason = finish_reason(seq)
    seq.logprobs += logprobs[:num_added]
    return num_added, reason


def finish_reason(seq: Sequence) -> FinishReason | None:
    """Why a sequence is complete, or None: it ends with a stop token, has max_tokens, or was only to be read."""
    params, num_generated = seq.request.params, seq.num_generated_tokens
    if num_generated:
        last = seq.token_ids[-1]
        if last in params.stop_token_ids or (last in seq.eos_token_ids and not params.ignore_eos):
            return FinishReason.STOP
    elif seq.num_uncomputed_tokens:
        return None
    return FinishReason.LENGTH if num_generated >= params.max_tokens else None

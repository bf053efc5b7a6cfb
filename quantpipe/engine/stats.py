"""What an engine counts, and the picture of it that a dashboard shows. Counts only; computes no step."""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class EngineStats:
    """Counters since the engine was opened or warmed up, and what it holds now. Recomputed tokens count once.

    Sequences run and wait: one for each request, and one for each further sample once it is forked.
    ``used_blocks + cached_blocks + free_blocks == total_blocks``: cached ones are held by nobody but keep a prefix.
    Of ``prefix_query_tokens``, those of all prompts looked up, ``prefix_hit_tokens`` were found and not computed.

    ``step_tokens`` are all tokens given to the model, those read again after preemption included, in ``step_s`` seconds
    of ``steps``; ``last_step_tokens`` and ``last_step_s`` are those of the latest. ``copied_blocks`` had to be copied
    as a fork wrote into a block that others share. Attention read ``context_tokens``, and ``padded_context_tokens``
    with what was added to make contexts equally long. Of ``draft_tokens`` guessed, ``accepted_tokens`` proved right.
    ``nonfinite_failures`` are samples given up as the model's logits were no numbers.
    """

    num_running: int
    num_waiting: int
    used_blocks: int
    free_blocks: int
    total_blocks: int
    num_preemptions: int
    prompt_tokens: int
    generated_tokens: int
    steps: int
    cached_blocks: int = 0
    prefix_query_tokens: int = 0
    prefix_hit_tokens: int = 0
    prefix_evictions: int = 0
    step_tokens: int = 0
    step_s: float = field(default=0.0, compare=False)
    last_step_tokens: int = 0
    last_step_s: float = field(default=0.0, compare=False)
    copied_blocks: int = 0
    context_tokens: int = 0
    padded_context_tokens: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    nonfinite_failures: int = 0

    @property
    def kv_usage_frac(self) -> float:
        """The share of KV blocks that sequences hold."""
        return self.used_blocks / max(self.total_blocks, 1)

    @property
    def prefix_hit_frac(self) -> float:
        """The share of prompt tokens that were found; 0 while nothing was looked up."""
        return self.prefix_hit_tokens / max(self.prefix_query_tokens, 1)

    @property
    def tokens_per_step(self) -> float:
        return self.step_tokens / max(self.steps, 1)

    @property
    def padding_efficiency_frac(self) -> float:
        """The share of the context tokens read by attention that were wanted; 1 where nothing is padded."""
        return self.context_tokens / self.padded_context_tokens if self.padded_context_tokens else 1.0

    @property
    def acceptance_frac(self) -> float:
        """The share of guessed tokens that proved right; 0 while nothing was guessed."""
        return self.accepted_tokens / max(self.draft_tokens, 1)


@dataclass
class EngineCounters:
    """The counters that the engine itself keeps: fields of ``EngineStats`` by the same name."""

    prompt_tokens: int = 0
    generated_tokens: int = 0
    steps: int = 0
    step_tokens: int = 0
    step_s: float = 0.0
    last_step_tokens: int = 0
    last_step_s: float = 0.0
    copied_blocks: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    nonfinite_failures: int = 0

    def count_step(self, num_tokens: int, num_copies: int, step_s: float) -> None:
        self.steps += 1
        self.step_tokens += num_tokens
        self.step_s += step_s
        self.last_step_tokens = num_tokens
        self.last_step_s = step_s
        self.copied_blocks += num_copies

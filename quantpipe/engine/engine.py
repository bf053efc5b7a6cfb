"""The engine: requests in, tokens out. Ties the scheduler (what to compute) to the runner (computing it).

The life of a request: ``add`` checks it and queues a Sequence; each ``step`` appends what it got; where its prompt
ends, one sequence more is forked for each further sample. A sequence that ends frees its blocks at once, and the last
one leaves a RequestOutput until ``take_output``. Ended means: an end-of-sequence or stop token (kept as the last one),
``max_tokens``, ``abort``, or an error that concerns this sample only.

A step: the scheduler says who advances; shared blocks that are written into are copied; the model runs; tokens are
chosen and, where some were guessed, compared; the scheduler notes what is computed, and full blocks become known as
prefixes; samples that ended leave.

An engine belongs to one thread at a time: no method may run while another does.
"""

import itertools
import operator
import time
from collections.abc import Sequence as SequenceOf
from dataclasses import asdict
from pathlib import Path

import torch

from quantpipe.backends.protocol import DecodeLimits, Executor
from quantpipe.engine.block_pool import BlockPool
from quantpipe.engine.config import EngineConfig
from quantpipe.engine.constraint import Constraint, ConstraintCompiler, check_grammar
from quantpipe.engine.kv_cache import resolve_attention_window, resolve_max_model_len
from quantpipe.engine.memory import size_pool
from quantpipe.engine.prefix_cache import PrefixCache, PrefixNamespace
from quantpipe.engine.preflight import backend_of
from quantpipe.engine.request import (
    FinishReason,
    PromptLogitsSink,
    QosClass,
    Request,
    RequestOutput,
    SamplingParams,
    Sequence,
    StepOutput,
    TokenLogprob,
    check_request,
)
from quantpipe.engine.runner import Advanced, ModelRunner
from quantpipe.engine.sample_group import SampleGroup, append_tokens, finish_reason
from quantpipe.engine.sampling_params import check_params
from quantpipe.engine.scheduler import Advance, Scheduler, Step
from quantpipe.engine.speculative.drafter import DRAFTERS, NO_DRAFTER, Drafter
from quantpipe.engine.stats import EngineCounters, EngineStats
from quantpipe.engine.warm_up import take_first_steps
from quantpipe.errors import ArtifactError, QuantpipeError, RequestError, suggest
from quantpipe.formats.artifact import Artifact
from quantpipe.formats.digests import MANIFEST_NAME
from quantpipe.formats.kv_mode import KV_MODES

# Scoring keeps float32 logits of many positions at once: a step takes only as many as fit in this.
MAX_SCORED_BYTES = 200_000_000
# With static batching a step may find nothing to do yet; it returns at least that often, for requests to be added.
MAX_WAIT_S = 0.005


class Engine:
    """A loaded model that serves many requests at once. Use from one thread at a time.

    ``drafter`` takes the place of the one that ``config.speculative`` names. Until a ``compiler`` is set, requests
    with a grammar are refused.
    """

    def __init__(
        self,
        executor: Executor,
        config: EngineConfig,
        kv_dtype: str = "auto",
        artifact_digest: str = "",
        drafter: Drafter | None = None,
    ) -> None:
        self.config = config
        self.description = executor.description
        self.kv_dtype = kv_dtype
        self.max_model_len = resolve_max_model_len(config, self.description.max_position_embeddings)
        max_scored_rows = max(1, MAX_SCORED_BYTES // (4 * self.description.vocab_size))
        limit = self.description.max_position_embeddings
        self._window = resolve_attention_window(config, self.description.windows, limit, executor.supports_windows)
        num_blocks, self.memory = size_pool(
            executor, config, kv_dtype, self.max_model_len, self._window, max_scored_rows
        )
        kv_cache = executor.allocate_kv_cache(num_blocks, config.block_size, kv_dtype)
        if config.cuda_graphs:
            most_blocks = self._window.most_blocks(None if self._window.is_endless else self.max_model_len)
            limits = DecodeLimits(config.max_num_seqs, most_blocks, self._window.num_sinks, self._window.asked)
            executor.record_decodes(kv_cache, limits)
        self.backend_notes = (*executor.notes, *kv_cache.notes)
        self._runner = ModelRunner(executor, kv_cache, self._window)
        self._pool = BlockPool(num_blocks)
        self._prefix_cache = PrefixCache(self._pool, config.block_size)
        self._namespace = PrefixNamespace("", kv_dtype, artifact_digest, self._window.form)
        self._scheduler = Scheduler(
            self._pool,
            config,
            max_scored_rows,
            self._prefix_cache if config.prefix_cache else None,
            DRAFTERS[config.speculative]() if drafter is None and config.speculative != NO_DRAFTER else drafter,
            self._window,
        )
        self.compiler: ConstraintCompiler | None = None
        self._eos_token_ids = frozenset(self.description.eos_token_ids)
        self._unfinished: dict[str, SampleGroup] = {}
        self._outputs: dict[str, RequestOutput] = {}
        self._undelivered: list[StepOutput] = []
        self._request_numbers = itertools.count()
        self._counters = EngineCounters()
        self._context_tokens_before = executor.context_tokens

    @classmethod
    def open(cls, folder: Path, config: EngineConfig | None = None) -> "Engine":
        """Load a model folder, quantized or ordinary. ArtifactError where damaged, RecipeError where misconfigured."""
        config = config or EngineConfig()
        backend = backend_of(config)
        artifact = Artifact.open(folder)
        kv_dtype = _kv_dtype_of(artifact) if config.kv_dtype is None else config.kv_dtype
        executor = backend.load(
            folder, config.activation_divisor, config.num_threads, config.activations, config.memory_utilization
        )
        return cls(executor, config, kv_dtype, artifact.quick_digest)

    @property
    def has_unfinished(self) -> bool:
        """Whether ``step`` has anything left to compute or to return."""
        return bool(self._unfinished or self._undelivered)

    def add(
        self,
        prompt_ids: SequenceOf[int],
        params: SamplingParams,
        request_id: str | None = None,
        prompt_logits_sink: PromptLogitsSink | None = None,
        cache_salt: str = "",
        priority: int = 0,
        qos: QosClass = "standard",
        deadline_s: float | None = None,
        max_queue_s: float | None = None,
    ) -> str:
        """Queue a request and return its id. RequestError, naming the parameter, where it could never be served."""
        if request_id is None:
            request_id = f"request-{next(self._request_numbers)}"
        if request_id in self._unfinished or request_id in self._outputs:
            raise RequestError(f"request_id: '{request_id}' is in use; take its output or choose another", "request_id")
        try:
            token_ids = tuple(map(operator.index, prompt_ids))
        except TypeError as error:
            raise RequestError(f"prompt: not a list of token ids ({error})", "prompt") from None
        if bool in set(map(type, prompt_ids)):
            raise RequestError("prompt: True and False are no token ids", "prompt")
        now_s = time.monotonic()
        request = Request(
            request_id,
            token_ids,
            params,
            prompt_logits_sink,
            cache_salt,
            priority,
            qos,
            deadline_s,
            arrival_s=now_s,
            max_queue_s=max_queue_s,
        )
        check_request(request, self.description.vocab_size, self.max_model_len, self._window.is_endless)
        self._check_num_samples(params)
        namespace = self._namespace._replace(salt=cache_salt)
        group = SampleGroup.of(request, namespace, self._eos_token_ids, self.compiled(params))
        self._scheduler.add(group.seqs[0])
        self._unfinished[request_id] = group
        return request_id

    def check_params(self, params: SamplingParams) -> None:
        """Raise RequestError, naming the parameter, where a request of any prompt would be refused for ``params``."""
        check_params(params, self.description.vocab_size)
        self._check_num_samples(params)
        self.compiled(params)

    def _check_num_samples(self, params: SamplingParams) -> None:
        if params.n > self.config.max_num_seqs:
            raise RequestError(
                f"n: {params.n} samples exceed max_num_seqs {self.config.max_num_seqs}, as many as run at a time; ask "
                "for fewer or raise engine.max_num_seqs",
                "n",
            )

    def compiled(self, params: SamplingParams) -> Constraint | None:
        """What enforces the grammar of ``params``, if they have one. RequestError where that cannot be.

        May be called from any thread, in advance: it takes a while for a new grammar, and ``add`` then finds it.
        """
        if params.grammar is None:
            return None
        if self.compiler is None:
            raise RequestError("grammar: this engine was opened without a compiler of grammars", "grammar")
        if not self._eos_token_ids:
            raise RequestError("grammar: the model has no end-of-sequence token for a grammar to end with", "grammar")
        check_grammar(params.grammar)
        return self.compiler.compile(params.grammar)

    def abort(self, request_id: str) -> None:
        """Forget a request in any state, its output included; an unknown id is ignored. Nothing more comes of it."""
        self._outputs.pop(request_id, None)
        self._undelivered = [output for output in self._undelivered if output.request_id != request_id]
        group = self._unfinished.pop(request_id, None)
        if group is None:
            return
        for seq in group.unended:
            self._scheduler.remove(seq)
        self._check_idle_pool([])

    def abort_sample(self, request_id: str, index: int) -> None:
        """End one sample where it stands, with ``ABORT``; the others go on. Ignored where it has ended already.

        RequestError before its first token: until then the samples of a request are one.
        """
        group = self._unfinished.get(request_id)
        if group is None or group.has_ended(index):
            return
        if not 0 <= index < len(group.seqs) or not group.seqs[index].num_generated_tokens:
            raise RequestError(f"index: request '{request_id}' has no sample {index} yet; abort the request", "index")
        self._finish(group.seqs[index], FinishReason.ABORT)
        self._check_idle_pool([])

    def take_output(self, request_id: str) -> RequestOutput:
        """The output of a finished request, once. Outputs stay in memory until taken or aborted."""
        if request_id not in self._outputs:
            state = "is not finished" if request_id in self._unfinished else "is not known or was already taken"
            raise RequestError(f"request_id: '{request_id}' {state}", "request_id")
        return self._outputs.pop(request_id)

    def step(self) -> list[StepOutput]:
        """Compute one step. Returns what each request got that got a token or ended; [] when idle.

        If the model raises, nothing has advanced and no output is lost. If a prompt logits sink raises, its request
        is dropped, the error passes through, and the next call returns what the others got in this step.
        """
        called_s = time.monotonic()
        for seq in self._scheduler.waiting.overdue(called_s):
            self._undelivered += self._expire(seq)
        step = self._scheduler.schedule(called_s)
        if not step.advances:
            if step.wait_s > 0:
                time.sleep(min(step.wait_s, MAX_WAIT_S))
            elif self._unfinished:
                raise QuantpipeError("engine: requests are queued but none can advance; this is a bug")
            return self._flush([])
        started_s = time.monotonic()
        with torch.inference_mode():
            advanced = self._runner.run(step)
        computed_s = time.monotonic()
        self._count(step, computed_s - started_s)
        failed = [advance.seq for advance, got in zip(step.advances, advanced, strict=True) if got.error is not None]
        # Before the commit, to which guesses count that have become tokens.
        endings = [
            append_tokens(advance.seq, got.token_ids, got.logprobs)
            for advance, got in zip(step.advances, advanced, strict=True)
        ]
        self._scheduler.commit(step, failed, time.monotonic())
        outputs: list[StepOutput] = []
        for advance, got, ending in zip(step.advances, advanced, endings, strict=True):
            outputs += self._update(advance.seq, got, ending)
        flushed = self._flush(outputs)
        self._runner.times.scheduler_s += started_s - called_s
        self._runner.times.update_s += time.monotonic() - computed_s
        self._raise_sink_failure(step.advances, advanced, flushed)
        self._check_idle_pool(flushed)
        return flushed

    def generate(
        self,
        prompts: SequenceOf[SequenceOf[int]],
        params: SamplingParams | SequenceOf[SamplingParams],
        prompt_logits_sinks: SequenceOf[PromptLogitsSink] | None = None,
    ) -> list[RequestOutput]:
        """Serve all prompts to their end and return their outputs in order. All are checked before any runs."""
        all_params = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
        sinks: SequenceOf[PromptLogitsSink | None] = prompt_logits_sinks or [None] * len(prompts)
        request_ids: list[str] = []
        try:
            for prompt_ids, own_params, sink in zip(prompts, all_params, sinks, strict=True):
                request_ids.append(self.add(prompt_ids, own_params, prompt_logits_sink=sink))
            while any(request_id in self._unfinished for request_id in request_ids):
                self.step()
            return [self.take_output(request_id) for request_id in request_ids]
        finally:
            for request_id in request_ids:
                self.abort(request_id)  # only after an error is there anything left to drop

    def warm_up(self) -> None:
        """Take a long step and a wide one before anyone waits. Counters start anew; for an idle engine only."""
        if self.has_unfinished or self._outputs:
            raise QuantpipeError("engine: warm_up is for an idle engine; call it before the first request")
        take_first_steps(self)
        self._prefix_cache.clear()
        self._scheduler.num_preemptions = 0
        self._counters = EngineCounters()
        self._context_tokens_before = self._runner.executor.context_tokens

    def stats(self) -> EngineStats:
        """What the engine holds and what it has done."""
        (wanted, read), (wanted_before, read_before) = self._runner.executor.context_tokens, self._context_tokens_before
        return EngineStats(
            num_running=len(self._scheduler.running),
            num_waiting=len(self._scheduler.waiting),
            used_blocks=self._pool.num_held,
            free_blocks=self._pool.num_free,
            total_blocks=self._pool.num_blocks,
            num_preemptions=self._scheduler.num_preemptions,
            cached_blocks=self._pool.num_cached,
            prefix_query_tokens=self._prefix_cache.num_query_tokens,
            prefix_hit_tokens=self._prefix_cache.num_hit_tokens,
            prefix_evictions=self._prefix_cache.num_evictions,
            context_tokens=wanted - wanted_before,
            padded_context_tokens=read - read_before,
            **asdict(self._counters),
        )

    def step_times_s(self) -> dict[str, float]:
        """Seconds of all steps since the engine was opened, by part."""
        return self._runner.times.by_part(self._runner.executor.step_times_s)

    def _update(self, seq: Sequence, got: Advanced, ending: tuple[int, FinishReason | None]) -> list[StepOutput]:
        """What a sequence got, and the forks that begin here; nothing is said while a prompt is being read.

        ``ending`` is how many of its new tokens it took, and whether it ended with them.
        """
        seq.prompt_logprobs += got.prompt_logprobs
        forks = seq.pending_forks
        if got.error is not None:
            self._counters.nonfinite_failures += got.is_nonfinite * (1 + len(forks))
            return [self._fail(failed, got.error, is_refused=not got.is_nonfinite) for failed in (*forks, seq)]
        if got.is_undecided:
            seq.takes_drafts = False
        self._counters.accepted_tokens += min(got.num_accepted, ending[0])
        if not got.token_ids:
            reason = finish_reason(seq)
            if reason is None:
                return []
            self._finish(seq, reason)
            return [self._output(seq, (), (), reason)]
        for fork in forks:  # all of them before any ends: until then the parent holds what they share
            self._scheduler.fork(seq, fork)
        seq.num_pending_forks = 0
        outputs = [self._said(seq, got, *ending)]
        for fork, sample in zip(forks, got.forks, strict=True):
            outputs.append(self._said(fork, sample, *append_tokens(fork, sample.token_ids, sample.logprobs)))
        return outputs

    def _said(self, seq: Sequence, got: Advanced, num_added: int, reason: FinishReason | None) -> StepOutput:
        self._counters.generated_tokens += num_added
        if reason is not None:
            self._finish(seq, reason)
        return self._output(seq, got.token_ids[:num_added], got.logprobs[:num_added], reason)

    def _output(
        self,
        seq: Sequence,
        token_ids: tuple[int, ...],
        logprobs: tuple[TokenLogprob, ...],
        reason: FinishReason | None,
    ) -> StepOutput:
        is_first = seq.num_generated_tokens == len(token_ids)
        return StepOutput(
            seq.request.request_id,
            token_ids,
            logprobs,
            reason,
            index=seq.index,
            num_cached_tokens=seq.num_cached_tokens,
            prompt_logprobs=tuple(seq.prompt_logprobs) if is_first else (),
            queued_s=seq.queued_s,
        )

    def _expire(self, seq: Sequence) -> list[StepOutput]:
        """Give up a request that has waited too long, all of its samples."""
        error = f"not begun within {seq.request.max_queue_s:g} s; ask again later or allow more"
        return [self._fail(expired, error, FinishReason.EXPIRED) for expired in (*seq.pending_forks, seq)]

    def _fail(
        self, seq: Sequence, error: str, reason: FinishReason = FinishReason.ABORT, is_refused: bool = False
    ) -> StepOutput:
        self._finish(seq, reason, error)
        return StepOutput(seq.request.request_id, (), (), reason, error, seq.index, is_refused=is_refused)

    def _finish(self, seq: Sequence, reason: FinishReason, error: str | None = None) -> None:
        group = self._unfinished[seq.request.request_id]
        if seq in group.unended:
            self._scheduler.remove(seq, is_complete=reason in (FinishReason.STOP, FinishReason.LENGTH))
        group.end(seq, reason, error)
        if group.is_finished:
            del self._unfinished[seq.request.request_id]
            self._outputs[seq.request.request_id] = group.output()

    def _check_idle_pool(self, outputs: list[StepOutput]) -> None:
        """Nothing may hold a block once nothing runs: what is not given back now never will be."""
        pool = self._pool
        if self._unfinished or (pool.num_held == 0 and pool.num_available == pool.num_blocks):
            return
        self._undelivered += outputs
        raise QuantpipeError(
            f"engine: nothing runs, yet of {pool.num_blocks} KV blocks {pool.num_held} are held, {pool.num_free} free "
            f"and {pool.num_cached} cached; this is a bug, restart the engine"
        )

    def _count(self, step: Step, step_s: float) -> None:
        num_tokens = num_prompt_tokens = num_drafted = 0
        for seq, start, num_own, _, draft_ids in step.advances:
            num_tokens += num_own
            num_drafted += len(draft_ids)
            if seq.num_seen_tokens < seq.num_prompt_tokens:
                num_prompt_tokens += max(0, min(start + num_own, seq.num_prompt_tokens) - seq.num_seen_tokens)
        self._counters.prompt_tokens += num_prompt_tokens
        self._counters.draft_tokens += num_drafted
        self._counters.count_step(num_tokens, len(step.copies), step_s)

    def _flush(self, outputs: list[StepOutput]) -> list[StepOutput]:
        flushed, self._undelivered = self._undelivered + outputs, []
        return flushed

    def _raise_sink_failure(
        self, advances: tuple[Advance, ...], advanced: list[Advanced], outputs: list[StepOutput]
    ) -> None:
        failures = [
            (advance.seq, got.sink_failure)
            for advance, got in zip(advances, advanced, strict=True)
            if got.sink_failure is not None
        ]
        if not failures:
            return
        self._undelivered = outputs
        for seq, _ in failures:
            self.abort(seq.request.request_id)
        raise failures[0][1]


def _kv_dtype_of(artifact: Artifact) -> str:
    """The KV cache mode that a folder's manifest asks for."""
    if artifact.kv_cache not in KV_MODES:
        where = f"{artifact.folder / MANIFEST_NAME}: kv_cache"
        raise ArtifactError(f"{where}: unknown '{artifact.kv_cache}'{suggest(artifact.kv_cache, KV_MODES)}")
    return artifact.kv_cache

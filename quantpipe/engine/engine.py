"""The engine: requests in, tokens out. Ties the scheduler (what to compute) to the runner (computing it).

The life of a request: ``add`` checks it and queues a Sequence; each ``step`` asks the scheduler who advances, runs
that batch, and appends what came out; a sequence that ends frees its blocks at once and leaves a RequestOutput until
``take_output``. Ended means: an end-of-sequence or stop token (kept as the last token), ``max_tokens``, ``abort``,
or an error that concerns this request only.

An engine belongs to one thread at a time: no method may run while another does.
"""

import itertools
import operator
import secrets
import time
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from pathlib import Path

import torch

from quantpipe.backends import BACKENDS
from quantpipe.backends.protocol import Executor
from quantpipe.engine.block_pool import BlockPool
from quantpipe.engine.config import EngineConfig
from quantpipe.engine.kv_cache import resolve_max_model_len
from quantpipe.engine.memory import size_pool
from quantpipe.engine.prefix_cache import PrefixCache, PrefixNamespace
from quantpipe.engine.request import (
    FinishReason,
    PromptLogitsSink,
    Request,
    RequestOutput,
    SamplingParams,
    Sequence,
    StepOutput,
    check_request,
)
from quantpipe.engine.runner import Advanced, ModelRunner
from quantpipe.engine.scheduler import Advance, Scheduler
from quantpipe.errors import ArtifactError, QuantpipeError, RecipeError, RequestError, suggest
from quantpipe.formats.artifact import MANIFEST_NAME, Artifact
from quantpipe.formats.kv_mode import KV_MODES

# Scoring keeps float32 logits of many positions at once: a step takes only as many as fit in this.
MAX_SCORED_BYTES = 200_000_000
# With static batching a step may find nothing to do yet; it returns at least that often, for requests to be added.
MAX_WAIT_S = 0.005


@dataclass(frozen=True)
class EngineStats:
    """Counters since the engine was opened, and what it holds now. Recomputed tokens are not counted again.

    ``used_blocks + cached_blocks + free_blocks == total_blocks``: cached ones are held by nobody but keep a prefix.
    Of ``prefix_query_tokens``, those of all prompts looked up, ``prefix_hit_tokens`` were found and not computed.
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


class Engine:
    """A loaded model that serves many requests at once. Use from one thread at a time."""

    def __init__(
        self, executor: Executor, config: EngineConfig, kv_dtype: str = "auto", artifact_digest: str = ""
    ) -> None:
        self.config = config
        self.description = executor.description
        self.kv_dtype = kv_dtype
        self.backend_notes = executor.notes
        self.max_model_len = resolve_max_model_len(config, self.description.max_position_embeddings)
        max_scored_rows = max(1, MAX_SCORED_BYTES // (4 * self.description.vocab_size))
        num_blocks, self.memory = size_pool(executor, config, kv_dtype, self.max_model_len, max_scored_rows)
        self._runner = ModelRunner(executor, executor.allocate_kv_cache(num_blocks, config.block_size, kv_dtype))
        self._pool = BlockPool(num_blocks)
        self._prefix_cache = PrefixCache(self._pool, config.block_size)
        self._namespace = PrefixNamespace(kv_dtype=kv_dtype, artifact_digest=artifact_digest)
        self._scheduler = Scheduler(
            self._pool,
            config,
            max_scored_rows,
            self._prefix_cache if config.prefix_cache else None,
        )
        self._eos_token_ids = frozenset(self.description.eos_token_ids)
        self._unfinished: dict[str, Sequence] = {}
        self._outputs: dict[str, RequestOutput] = {}
        self._undelivered: list[StepOutput] = []
        self._request_numbers = itertools.count()
        self._num_prompt_tokens = 0
        self._num_generated_tokens = 0
        self._num_steps = 0

    @classmethod
    def open(cls, folder: Path, config: EngineConfig | None = None) -> "Engine":
        """Load a model folder, quantized or ordinary. ArtifactError where damaged, RecipeError where misconfigured."""
        config = config or EngineConfig()
        if config.backend not in BACKENDS:
            raise RecipeError(f"engine.backend: unknown '{config.backend}'{suggest(config.backend, BACKENDS)}")
        artifact = Artifact.open(folder)
        kv_dtype = _kv_dtype_of(artifact) if config.kv_dtype is None else config.kv_dtype
        executor = BACKENDS[config.backend]().load(folder, config.activation_divisor, config.num_threads)
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
        request = Request(request_id, token_ids, params, prompt_logits_sink, cache_salt, arrival_s=time.monotonic())
        check_request(request, self.description.vocab_size, self.max_model_len)
        seed = secrets.randbits(64) if params.seed is None else params.seed
        namespace = self._namespace._replace(salt=cache_salt)
        seq = Sequence(request, list(token_ids), seed, namespace, self._eos_token_ids)
        self._scheduler.add(seq)
        self._unfinished[request_id] = seq
        return request_id

    def abort(self, request_id: str) -> None:
        """Forget a request in any state, its output included; an unknown id is ignored. Nothing more comes of it."""
        self._outputs.pop(request_id, None)
        self._undelivered = [output for output in self._undelivered if output.request_id != request_id]
        seq = self._unfinished.pop(request_id, None)
        if seq is not None:
            self._scheduler.remove(seq)

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
        step = self._scheduler.schedule(time.monotonic())
        if not step.advances:
            if step.wait_s > 0:
                time.sleep(min(step.wait_s, MAX_WAIT_S))
            elif self._unfinished:
                raise QuantpipeError("engine: requests are queued but none can advance; this is a bug")
            return self._flush([])
        with torch.inference_mode():
            advanced = self._runner.run(step)
        self._count(step.advances)
        failed = [advance.seq for advance, got in zip(step.advances, advanced, strict=True) if got.error is not None]
        self._scheduler.commit(step, failed, time.monotonic())
        outputs = [self._update(advance.seq, got) for advance, got in zip(step.advances, advanced, strict=True)]
        flushed = self._flush([output for output in outputs if output is not None])
        self._raise_sink_failure(step.advances, advanced, flushed)
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

    def stats(self) -> EngineStats:
        return EngineStats(
            num_running=len(self._scheduler.running),
            num_waiting=len(self._scheduler.waiting),
            used_blocks=self._pool.num_held,
            free_blocks=self._pool.num_free,
            total_blocks=self._pool.num_blocks,
            num_preemptions=self._scheduler.num_preemptions,
            prompt_tokens=self._num_prompt_tokens,
            generated_tokens=self._num_generated_tokens,
            steps=self._num_steps,
            cached_blocks=self._pool.num_cached,
            prefix_query_tokens=self._prefix_cache.num_query_tokens,
            prefix_hit_tokens=self._prefix_cache.num_hit_tokens,
            prefix_evictions=self._prefix_cache.num_evictions,
        )

    def _update(self, seq: Sequence, got: Advanced) -> StepOutput | None:
        """Append what a sequence got, and end it where it is complete. None while its prompt is being read."""
        if got.error is not None:
            self._finish(seq, FinishReason.ABORT, got.error)
            return StepOutput(seq.request.request_id, (), (), FinishReason.ABORT, got.error)
        seq.prompt_logprobs += got.prompt_logprobs
        if got.token_id is not None:
            seq.token_ids.append(got.token_id)
            self._num_generated_tokens += 1
        if got.logprob is not None:
            seq.logprobs.append(got.logprob)
        reason = self._finish_reason(seq)
        if reason is not None:
            self._finish(seq, reason)
        elif got.token_id is None:
            return None
        token_ids = () if got.token_id is None else (got.token_id,)
        logprobs = () if got.logprob is None else (got.logprob,)
        return StepOutput(seq.request.request_id, token_ids, logprobs, reason)

    def _finish_reason(self, seq: Sequence) -> FinishReason | None:
        params = seq.request.params
        if seq.num_generated_tokens:
            last = seq.token_ids[-1]
            if last in params.stop_token_ids or (last in self._eos_token_ids and not params.ignore_eos):
                return FinishReason.STOP
        elif seq.num_uncomputed_tokens:
            return None
        return FinishReason.LENGTH if seq.num_generated_tokens >= params.max_tokens else None

    def _finish(self, seq: Sequence, reason: FinishReason, error: str | None = None) -> None:
        request = seq.request
        del self._unfinished[request.request_id]
        self._scheduler.remove(seq, is_complete=reason is not FinishReason.ABORT)
        self._outputs[request.request_id] = RequestOutput(
            request.request_id,
            request.prompt_ids,
            tuple(seq.token_ids[seq.num_prompt_tokens :]),
            reason,
            tuple(seq.logprobs),
            tuple(seq.prompt_logprobs),
            error,
        )

    def _count(self, advances: tuple[Advance, ...]) -> None:
        self._num_steps += 1
        for advance in advances:
            seq = advance.seq
            self._num_prompt_tokens += max(0, min(advance.end, seq.num_prompt_tokens) - seq.num_seen_tokens)

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

"""What one engine is built with. Plain dataclass: the runtime runs where pydantic is not installed."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args, get_origin, get_type_hints

from quantpipe.backends.protocol import ACTIVATION_BITS, Activations
from quantpipe.engine.admission import ADMISSIONS
from quantpipe.engine.batching import BATCHING_MODES
from quantpipe.engine.policies import POLICIES
from quantpipe.engine.speculative.drafter import DRAFTERS, NO_DRAFTER
from quantpipe.errors import RecipeError, suggest
from quantpipe.formats.kv_mode import kv_mode

# What settings are called elsewhere, in recipes and in vLLM, where that is not what is spelt most like it.
OTHER_NAMES = {
    "kv_cache": "kv_dtype",
    "kv_cache_dtype": "kv_dtype",
    "gpu_memory_utilization": "memory_utilization",
    "kv_cache_memory_bytes": "kv_cache_memory",
    "enable_prefix_caching": "prefix_cache",
    "scheduling_policy": "policy",
    "num_gpu_blocks_override": "num_kv_blocks",
    "num_speculative_tokens": "num_draft_tokens",
    "enforce_eager": "cuda_graphs",
}


@dataclass(frozen=True)
class EngineConfig:
    """Settings of one engine.

    ``backend`` names a row of ``quantpipe.backends.BACKENDS``. ``kv_dtype`` names a mode of ``KV_MODES``; None takes
    what the artifact's manifest asks for (``auto`` for an ordinary model folder). ``max_model_len`` None takes the
    model's own limit, at most 4096. ``activations`` is how the ``cpu`` backend holds them under weight-only integers.
    ``activation_divisor`` is the int8 activation rule of w8a8: 127 as served, 127.5 to compare with transformers.

    At most one of three sizes the pool of KV blocks: ``num_kv_blocks``; ``kv_cache_memory``, in bytes; or
    ``memory_utilization``, the share of the device's memory (RAM on a CPU) that weights, the largest steps, measured
    when the engine opens, and KV blocks may take together. Without any, ``max_num_seqs`` sequences of
    ``max_model_len`` fit, within 1 GiB. With ``prefix_cache`` the blocks of past prompts stay until their space is
    needed, and a prompt that begins like one of them does not compute that part again.

    ``policy``, ``batching`` and ``admission`` name rows of ``POLICIES``, ``BATCHING_MODES`` and ``ADMISSIONS``.
    ``static_wait_s`` is for how long nothing must have come before a ``static`` batch starts that is not full. One
    sequence reads at most ``max_prefill_chunk`` tokens of its prompt in a step. Of prompts longer than
    ``long_prompt_tokens``, at most ``max_long_prefills`` are read at a time, and shorter ones pass those that wait.
    With ``target_step_s``, prompts get fewer tokens, and fewer sequences run, where steps take longer than that.

    With ``window_tokens`` every layer sees the last so many tokens only (fewer where its own window is smaller), and
    besides the first ``sink_tokens`` of the sequence: KV blocks of what lies between are let go, so that generation
    goes on in constant memory, and ``max_model_len`` bounds the prompt alone.

    With ``cuda_graphs`` a backend that runs on a GPU records its decode steps as the engine opens: they launch faster
    then, for some seconds and some memory more. Backends on the CPU have nothing to record.

    ``speculative`` names a row of ``DRAFTERS``, or ``none``: at most ``num_draft_tokens`` guesses of what follows are
    checked in one step for each sequence, as far as there is room.
    """

    backend: str = "cpu"
    kv_dtype: str | None = None
    max_model_len: int | None = None
    max_num_seqs: int = 16
    max_num_batched_tokens: int = 512
    block_size: int = 16
    num_kv_blocks: int | None = None
    kv_cache_memory: int | None = None
    memory_utilization: float | None = None
    prefix_cache: bool = True
    policy: str = "fcfs"
    batching: str = "continuous"
    static_wait_s: float = 0.05
    admission: str = "peak"
    max_prefill_chunk: int | None = None
    max_long_prefills: int | None = None
    long_prompt_tokens: int = 1024
    target_step_s: float | None = None
    sink_tokens: int = 0
    window_tokens: int | None = None
    speculative: str = NO_DRAFTER
    num_draft_tokens: int = 4
    cuda_graphs: bool = True
    num_threads: int | None = None
    activations: Activations = "int16"
    activation_divisor: float = 127.0

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> "EngineConfig":
        """From settings by name. RecipeError for a name that is not there, and for a value of another type."""
        kinds = get_type_hints(cls)
        for name, value in settings.items():
            if name not in kinds:
                raise RecipeError(f"engine.{name}: unknown setting{suggest(name, kinds, OTHER_NAMES.get(name))}")
            if not _is_of(value, kinds[name]):
                raise RecipeError(f"engine.{name}: {value!r} is no {_called(kinds[name])}")
        return cls(**settings)

    def __post_init__(self) -> None:
        for name in (
            "max_num_seqs",
            "max_num_batched_tokens",
            "block_size",
            "long_prompt_tokens",
            "num_draft_tokens",
        ):
            if getattr(self, name) < 1:
                raise RecipeError(f"engine.{name}: {getattr(self, name)} is below 1")
        for name in (
            "max_model_len",
            "num_kv_blocks",
            "kv_cache_memory",
            "max_prefill_chunk",
            "max_long_prefills",
            "num_threads",
        ):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise RecipeError(f"engine.{name}: {getattr(self, name)} is below 1")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise RecipeError(
                f"engine.max_num_batched_tokens: {self.max_num_batched_tokens} is below max_num_seqs "
                f"{self.max_num_seqs}; each running sequence needs one token per step"
            )
        self._check_schedule()
        self._check_pool_size()
        self._check_window()
        if self.kv_dtype is not None:
            kv_mode(self.kv_dtype, "engine.kv_dtype")
        if self.activations not in ACTIVATION_BITS:
            known = suggest(self.activations, ACTIVATION_BITS)
            raise RecipeError(f"engine.activations: unknown '{self.activations}'{known}")

    def _check_schedule(self) -> None:
        for name, known in (
            ("policy", POLICIES),
            ("batching", BATCHING_MODES),
            ("admission", ADMISSIONS),
            ("speculative", (NO_DRAFTER, *DRAFTERS)),
        ):
            if getattr(self, name) not in known:
                raise RecipeError(
                    f"engine.{name}: unknown '{getattr(self, name)}'{suggest(getattr(self, name), known)}"
                )
        # Written so that NaN, which compares false with everything, is refused.
        if not 0 <= self.static_wait_s < math.inf:
            raise RecipeError(f"engine.static_wait_s: {self.static_wait_s} is not a finite time of at least 0")
        if self.target_step_s is not None and not 0 < self.target_step_s < math.inf:
            raise RecipeError(f"engine.target_step_s: {self.target_step_s} is not a finite time above 0")

    def _check_window(self) -> None:
        if self.sink_tokens < 0:
            raise RecipeError(f"engine.sink_tokens: {self.sink_tokens} is below 0")
        if self.window_tokens is None and self.sink_tokens:
            raise RecipeError(
                f"engine.sink_tokens: {self.sink_tokens} sinks stand before a window; give engine.window_tokens too"
            )
        if self.window_tokens is not None and self.window_tokens < self.block_size:
            raise RecipeError(
                f"engine.window_tokens: {self.window_tokens} is below the block size {self.block_size}; raise it, or "
                "lower engine.block_size"
            )

    def _check_pool_size(self) -> None:
        # Written so that NaN, which compares false with everything, is refused.
        if self.memory_utilization is not None and not 0 < self.memory_utilization <= 1:
            raise RecipeError(f"engine.memory_utilization: {self.memory_utilization} is outside (0, 1]")
        names = ("num_kv_blocks", "kv_cache_memory", "memory_utilization")
        given = [f"engine.{name}" for name in names if getattr(self, name) is not None]
        if len(given) > 1:
            raise RecipeError(f"{given[1]}: the pool of KV blocks is sized by {given[0]} already; give one of them")


def _is_of(value: object, kind: Any) -> bool:
    """Whether a value is of the type that a setting is annotated with; whole numbers are numbers, truth is none."""
    options = get_args(kind) or (kind,)
    if get_origin(kind) is Literal:  # which words there are, and what is near, is for later checks
        return isinstance(value, str)
    return type(value) in options or (type(value) is int and float in options)


def _called(kind: Any) -> str:
    names = {int: "whole number", float: "number", bool: "true or false", str: "text", type(None): "null"}
    if get_origin(kind) is Literal:
        return names[str]
    return " or ".join(names[option] for option in get_args(kind) or (kind,))

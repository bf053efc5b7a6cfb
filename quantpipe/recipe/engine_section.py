"""The part of a recipe that says what the runtime is like which evaluates, benches and serves.

The docstrings under the fields are the descriptions in the JSON schema and in ``recipes/README.md``.
"""

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from quantpipe.recipe.engine_rules import DEFAULT_NUM_SEQS, DEFAULT_STEP_TOKENS
from quantpipe.recipe.section import Count, Section

# Settings of an engine that are no keys of this section, and why.
SET_ELSEWHERE = {
    "kv_dtype": "quantize.kv_cache says how keys and values are cached, and the engine takes it from the artifact",
    "activation_divisor": "w8a8 is judged by the rule that it is served with; leave it out",
}


class EngineSection(Section):
    """The runtime that evaluates, benches and serves."""

    set_elsewhere: ClassVar[Mapping[str, str]] = {**SET_ELSEWHERE, "kv_cache": SET_ELSEWHERE["kv_dtype"]}

    backend: Literal["cpu", "torch", "triton", "reference"] = "cpu"
    """What executes the model: `cpu` compiled kernels of its own, where the machine has a C++ compiler; `torch` torch's
    operators; `triton` kernels on a CUDA GPU (docs/serving.md). `reference` is slow and plain: the specification that
    others are tested against."""
    max_model_len: Count | None = None
    """Most tokens of one sequence, prompt and output. Absent: the model's own limit, at most 4096."""
    max_num_seqs: Count = DEFAULT_NUM_SEQS
    """Most sequences that run at once."""
    max_num_batched_tokens: Count = DEFAULT_STEP_TOKENS
    """Token budget of one step, shared by prompts and running sequences: at least `max_num_seqs`."""
    block_size: Count = 16
    """Tokens of one block of keys and values; prefixes are shared by whole blocks."""
    num_kv_blocks: Count | None = None
    """How many of these blocks there are."""
    kv_cache_memory: Count | None = None
    """Instead, bytes for keys and values. Absent as well: room for `max_num_seqs` sequences of `max_model_len`, within
    1 GiB."""
    memory_utilization: Annotated[float, Field(gt=0, le=1)] | None = None
    """Instead, the share of the memory (RAM on a CPU) that weights, steps, and keys and values take together. A run has
    two engines at a time, the candidate's and the baseline's, with such a share each."""
    prefix_cache: bool = True
    """Whether a prompt that begins like an earlier one finds that part computed."""
    policy: Literal["fcfs", "priority", "shortest", "deadline"] = "fcfs"
    """Who goes first: who came first; lower `priority`; who has the least left to do; or the least slack before its
    deadline. Under each, waiting counts, so that nobody starves."""
    admission: Literal["peak", "reserve", "greedy"] = "peak"
    """Whom the key-value cache has room for: the most it will hold if outputs are as long as those of late; all of
    `max_tokens`; or the prompts alone. What proves too much is computed again later."""
    batching: Literal["continuous", "dynamic", "static"] = "continuous"
    """`continuous` lets sequences join at every step. The others, for comparison, run whole batches: `dynamic` of what
    waits, `static` of `max_num_seqs` where so many come."""
    static_wait_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.05
    """For how long nothing must have come before a `static` batch starts that is not full."""
    max_prefill_chunk: Count | None = None
    """Most tokens of one prompt read in a step. Absent: as many as the step has."""
    max_long_prefills: Count | None = None
    """Most prompts longer than `long_prompt_tokens` that are read at a time; shorter ones pass those that wait."""
    long_prompt_tokens: Count = 1024
    """What a long prompt exceeds."""
    target_step_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """How long a step should take: where it takes longer, prompts get fewer tokens and fewer sequences run."""
    speculative: Literal["none", "ngram"] = "none"
    """Whether tokens are guessed ahead and checked together: `ngram` guesses what followed the same words before. It
    pays where outputs repeat the prompt or themselves, and changes no token."""
    num_draft_tokens: Count = 4
    """Most tokens guessed for a sequence in a step."""
    window_tokens: Annotated[int, Field(ge=16)] | None = None
    """How many tokens each layer looks back on. What lies further back is given up, so that text goes on without end in
    constant memory, and `max_model_len` bounds prompts alone. Absent: as far as the model does."""
    sink_tokens: Annotated[int, Field(ge=0)] = 0
    """How many first tokens stay in sight of that window: without some, 4 say, most models lose the thread."""
    cuda_graphs: bool = True
    """Whether the `triton` backend records its decode steps as it opens: faster steps, for seconds and memory at the
    start. Other backends have nothing to record."""
    num_threads: Count | None = None
    """CPU threads. Absent: all cores."""
    activations: Literal["int8", "int16", "float32"] = "int16"
    """What the `cpu` backend rounds activations to under weight-only schemes, per token and weight group: `int8` is
    fastest, `int16` nearly as close as `float32`, which rounds nothing. `w8a8` has its own rule."""

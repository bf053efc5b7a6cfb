"""What the memory of an engine is for: weights, KV blocks, the activations of a step, and the workspace around them.

Shapes: T tokens of the step, S sequences, B KV blocks of each.
"""

from dataclasses import dataclass

import torch

from quantpipe.backends.protocol import BatchInput, Executor
from quantpipe.engine.attention_window import AttentionWindow
from quantpipe.engine.config import EngineConfig
from quantpipe.engine.device_memory import DeviceMemory, memory_of
from quantpipe.engine.kv_cache import ceil_div, resolve_num_kv_blocks
from quantpipe.engine.speculative.drafter import NO_DRAFTER
from quantpipe.errors import RecipeError


@dataclass(frozen=True)
class StepMemory:
    """What the largest steps take beyond weights and KV blocks.

    ``activation_bytes`` come and go with each step. ``workspace_bytes`` stay: buffers kept from step to step and, on
    the host, the interpreter and its libraries.
    """

    activation_bytes: int
    workspace_bytes: int


@dataclass(frozen=True)
class MemoryAccount:
    """Bytes of an engine by purpose. ``step`` is None where the pool was not sized by what steps take."""

    weight_bytes: int
    kv_cache_bytes: int
    step: StepMemory | None = None


def size_pool(
    executor: Executor,
    config: EngineConfig,
    kv_dtype: str,
    max_model_len: int,
    window: AttentionWindow,
    max_logit_rows: int,
) -> tuple[int, MemoryAccount]:
    """How many KV blocks the engine gets, and what its memory is for. Measures steps for ``memory_utilization`` only.

    RecipeError where not one sequence of ``max_model_len`` would fit.
    """
    bytes_per_block = executor.kv_bytes_per_block(config.block_size, kv_dtype)
    step: StepMemory | None = None
    measured_bytes: int | None = None
    if config.memory_utilization is not None:
        memory = memory_of(executor.device)
        longest = min(max_model_len, window.most_blocks(max_model_len) * config.block_size)
        step = profile_steps(executor, config, kv_dtype, longest, max_logit_rows, memory)
        measured_bytes = kv_cache_bytes_within(config.memory_utilization, executor.weight_bytes, step, memory)
    num_blocks = resolve_num_kv_blocks(config, max_model_len, window, bytes_per_block, measured_bytes)
    return num_blocks, MemoryAccount(executor.weight_bytes, num_blocks * bytes_per_block, step)


def profile_steps(
    executor: Executor,
    config: EngineConfig,
    kv_dtype: str,
    max_model_len: int,
    max_logit_rows: int,
    memory: DeviceMemory,
) -> StepMemory:
    """Run the largest chunk and the largest decode step on a small cache, and measure what they take.

    The decode's contexts add up to what ``memory_utilization`` could hold at most.
    """
    block_size = config.block_size
    num_blocks = ceil_div(max_model_len, block_size)
    kv_cache = executor.allocate_kv_cache(num_blocks + config.max_num_seqs, block_size, kv_dtype)
    pool_tokens = memory.available_bytes() // executor.kv_bytes_per_block(block_size, kv_dtype) * block_size
    context_len = max(1, min(max_model_len, pool_tokens // config.max_num_seqs))
    chunk_len = min(config.max_num_batched_tokens, max_model_len)
    with torch.inference_mode():
        memory.reset_peak()
        chunk = largest_batch(1, chunk_len, max_model_len, min(chunk_len, max_logit_rows), num_blocks, block_size)
        executor.forward(chunk, kv_cache)
        chunk_peak_bytes = memory.peak_bytes()
        num_read = min(largest_decode(config), context_len, max(1, max_logit_rows // config.max_num_seqs))
        decode = largest_batch(config.max_num_seqs, num_read, context_len, num_read, num_blocks, block_size)
        if executor.device.type == "cuda":
            memory.reset_peak()
        executor.forward(decode, kv_cache)
    decode_peak_bytes = memory.peak_bytes()
    recorded_bytes = 0
    if config.cuda_graphs and executor.device.type == "cuda":
        # What a recorded decode computes with stays its own, and so do its logits.
        logits_bytes = 4 * config.max_num_seqs * executor.description.vocab_size
        recorded_bytes = max(0, decode_peak_bytes - memory.used_bytes()) + logits_bytes
    del kv_cache
    used_bytes = memory.used_bytes()
    return StepMemory(
        activation_bytes=max(0, max(chunk_peak_bytes, decode_peak_bytes) - used_bytes),
        workspace_bytes=max(0, used_bytes - executor.weight_bytes) + recorded_bytes,
    )


def largest_decode(config: EngineConfig) -> int:
    """How many tokens each sequence reads at most when all decode: its own one, and guesses."""
    if config.speculative == NO_DRAFTER:
        return 1
    return min(1 + config.num_draft_tokens, config.max_num_batched_tokens // config.max_num_seqs)


def largest_batch(
    num_seqs: int, query_len: int, context_len: int, num_logit_rows: int, num_shared_blocks: int, block_size: int
) -> BatchInput:
    """``num_seqs`` sequences alike, that share every block but their last: as much work as if they shared none."""
    num_blocks = ceil_div(context_len, block_size)
    table_SB = torch.arange(num_blocks).repeat(num_seqs, 1)
    if query_len == 1:
        table_SB[:, -1] = num_shared_blocks + torch.arange(num_seqs)
    positions_ST = torch.arange(context_len - query_len, context_len).repeat(num_seqs, 1)
    slots_ST = table_SB.gather(1, positions_ST // block_size) * block_size + positions_ST % block_size
    first_rows_S1 = torch.arange(1, num_seqs + 1).unsqueeze(1) * query_len - num_logit_rows
    return BatchInput(
        token_ids_T=torch.zeros(num_seqs * query_len, dtype=torch.int64),
        positions_T=positions_ST.flatten(),
        slot_mapping_T=slots_ST.flatten(),
        query_lens=(query_len,) * num_seqs,
        context_lens=(context_len,) * num_seqs,
        block_table_SB=table_SB,
        logit_rows_R=(first_rows_S1 + torch.arange(num_logit_rows)).flatten(),
    )


def kv_cache_bytes_within(memory_utilization: float, weight_bytes: int, step: StepMemory, memory: DeviceMemory) -> int:
    """What is left for KV blocks of this share of the device. RecipeError where others have taken it already."""
    total_bytes = memory.total_bytes()
    needed_bytes = weight_bytes + step.activation_bytes + step.workspace_bytes
    kv_bytes = int(memory_utilization * total_bytes) - needed_bytes
    available_bytes = memory.available_bytes() - step.activation_bytes
    if kv_bytes > available_bytes:
        fraction = max(0.0, (available_bytes + needed_bytes) / total_bytes)
        raise RecipeError(
            f"engine.memory_utilization: {memory_utilization} of {total_bytes:,} bytes leaves {kv_bytes:,} for keys "
            f"and values, and {max(0, available_bytes):,} are available; lower it to {int(fraction * 100) / 100}"
        )
    return max(0, kv_bytes)

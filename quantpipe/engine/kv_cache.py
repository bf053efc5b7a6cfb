"""How long a sequence may be and how many KV blocks there are. Knows sizes, not storage."""

from quantpipe.engine.config import EngineConfig
from quantpipe.errors import RecipeError

DEFAULT_MAX_MODEL_LEN = 4096
DEFAULT_KV_CACHE_MEMORY = 1 << 30


def resolve_max_model_len(config: EngineConfig, model_limit: int) -> int:
    """The longest prompt plus generation: as configured, else the model's own limit but at most 4096."""
    if config.max_model_len is None:
        return min(model_limit, DEFAULT_MAX_MODEL_LEN)
    if config.max_model_len > model_limit:
        raise RecipeError(
            f"engine.max_model_len: {config.max_model_len:,} exceeds the model's own limit of {model_limit:,} positions"
        )
    return config.max_model_len


def resolve_num_kv_blocks(
    config: EngineConfig, max_model_len: int, bytes_per_block: int, measured_bytes: int | None = None
) -> int:
    """The pool's size in blocks; ``measured_bytes`` is what ``memory_utilization`` leaves for it, where that is set.

    RecipeError where not even one sequence of ``max_model_len`` fits, which could then never be served.
    """
    blocks_per_seq = ceil_div(max_model_len, config.block_size)
    if config.num_kv_blocks is not None:
        if config.num_kv_blocks < blocks_per_seq:
            raise RecipeError(
                f"engine.num_kv_blocks: {config.num_kv_blocks:,} blocks of {config.block_size} tokens do not hold one "
                f"sequence of max_model_len {max_model_len:,}; raise it to {blocks_per_seq:,} or lower "
                f"engine.max_model_len to {config.num_kv_blocks * config.block_size:,}"
            )
        return config.num_kv_blocks
    given_bytes = config.kv_cache_memory if measured_bytes is None else measured_bytes
    num_affordable = (DEFAULT_KV_CACHE_MEMORY if given_bytes is None else given_bytes) // bytes_per_block
    if num_affordable < blocks_per_seq:
        remedy = f"or lower engine.max_model_len to {num_affordable * config.block_size:,}" if num_affordable else ""
        raise RecipeError(_too_small(config, max_model_len, blocks_per_seq * bytes_per_block, measured_bytes, remedy))
    if given_bytes is not None and config.prefix_cache:
        return num_affordable  # what running sequences cannot fill keeps prefixes
    return min(num_affordable, blocks_per_seq * config.max_num_seqs)


def ceil_div(numerator: int, denominator: int) -> int:
    """The quotient, rounded up."""
    return -(-numerator // denominator)


def _too_small(
    config: EngineConfig, max_model_len: int, needed_bytes: int, measured_bytes: int | None, remedy: str
) -> str:
    """The message where a pool cannot hold one sequence."""
    sequence = f"one sequence of max_model_len {max_model_len:,}"
    if measured_bytes is not None:
        return (
            f"engine.memory_utilization: {config.memory_utilization} leaves {measured_bytes:,} bytes for keys and "
            f"values, and {sequence} takes {needed_bytes:,}; raise it {remedy}"
        ).rstrip()
    given_bytes = DEFAULT_KV_CACHE_MEMORY if config.kv_cache_memory is None else config.kv_cache_memory
    return (
        f"engine.kv_cache_memory: {given_bytes:,} bytes do not hold {sequence}; raise it to {needed_bytes:,} {remedy}"
    ).rstrip()

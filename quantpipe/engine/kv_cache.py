"""How long a sequence may be and how many KV blocks there are. Knows sizes, not storage."""

from quantpipe.engine.config import EngineConfig
from quantpipe.errors import RecipeError

DEFAULT_MAX_MODEL_LEN = 4096


def resolve_max_model_len(config: EngineConfig, model_limit: int) -> int:
    """The longest prompt plus generation: as configured, else the model's own limit but at most 4096."""
    if config.max_model_len is None:
        return min(model_limit, DEFAULT_MAX_MODEL_LEN)
    if config.max_model_len > model_limit:
        raise RecipeError(
            f"engine.max_model_len: {config.max_model_len:,} exceeds the model's own limit of {model_limit:,} positions"
        )
    return config.max_model_len


def resolve_num_kv_blocks(config: EngineConfig, max_model_len: int, bytes_per_block: int) -> int:
    """The pool's size: ``num_kv_blocks``, or enough for ``max_num_seqs`` full sequences within ``kv_cache_bytes``.

    RecipeError where not even one sequence of ``max_model_len`` fits, which could then never be served.
    """
    blocks_per_seq = -(-max_model_len // config.block_size)
    if config.num_kv_blocks is not None:
        if config.num_kv_blocks < blocks_per_seq:
            raise RecipeError(
                f"engine.num_kv_blocks: {config.num_kv_blocks:,} blocks of {config.block_size} tokens do not hold one "
                f"sequence of max_model_len {max_model_len:,}; raise it to {blocks_per_seq:,} or lower "
                f"engine.max_model_len to {config.num_kv_blocks * config.block_size:,}"
            )
        return config.num_kv_blocks
    num_affordable = config.kv_cache_bytes // bytes_per_block
    if num_affordable < blocks_per_seq:
        remedy = f"raise it to {blocks_per_seq * bytes_per_block:,}"
        if num_affordable:
            remedy += f" or lower engine.max_model_len to {num_affordable * config.block_size:,}"
        raise RecipeError(
            f"engine.kv_cache_bytes: {config.kv_cache_bytes:,} bytes do not hold one sequence of max_model_len "
            f"{max_model_len:,}; {remedy}"
        )
    return min(num_affordable, blocks_per_seq * config.max_num_seqs)

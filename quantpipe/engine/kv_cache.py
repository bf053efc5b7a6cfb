"""How long a sequence may be, what it looks back on, and how many KV blocks there are. Knows sizes, not storage."""

from collections.abc import Sequence

from quantpipe.engine.attention_window import AttentionWindow
from quantpipe.engine.config import EngineConfig
from quantpipe.errors import RecipeError

DEFAULT_MAX_MODEL_LEN = 4096
DEFAULT_KV_CACHE_MEMORY = 1 << 30


def resolve_max_model_len(config: EngineConfig, model_limit: int) -> int:
    """The longest prompt plus generation: as configured, else the model's own limit but at most 4096.

    With ``window_tokens`` the longest prompt, which may exceed what the model knows: it never sees that much at a time.
    """
    if config.max_model_len is None:
        return min(model_limit, DEFAULT_MAX_MODEL_LEN)
    if config.max_model_len > model_limit and config.window_tokens is None:
        raise RecipeError(
            f"engine.max_model_len: {config.max_model_len:,} exceeds the model's own limit of {model_limit:,} positions"
        )
    return config.max_model_len


def resolve_attention_window(
    config: EngineConfig, own_windows: Sequence[int | None], max_positions: int, supports_windows: bool
) -> AttentionWindow:
    """For layers with ``own_windows``. RecipeError where the model or the backend cannot do what is asked.

    Nothing turns keys otherwise as a text grows here: ``max_positions`` is as far as a model's rope stays the same.
    """
    asked = config.window_tokens
    if asked is not None and not supports_windows:
        raise RecipeError(f"engine.window_tokens: backend '{config.backend}' has no windows; choose another backend")
    if asked is not None and config.sink_tokens + asked > max_positions:
        raise RecipeError(
            f"engine.window_tokens: {asked:,} with {config.sink_tokens:,} sinks exceed the model's own limit of "
            f"{max_positions:,} positions; lower it to {max(0, max_positions - config.sink_tokens):,}"
        )
    windows = [min((w for w in (own, asked) if w is not None), default=None) for own in own_windows]
    bounded = [window for window in windows if window is not None]
    if len(bounded) < len(windows) or not supports_windows:
        return AttentionWindow(config.block_size)
    most = config.max_num_batched_tokens
    return AttentionWindow(
        config.block_size,
        config.sink_tokens,
        asked,
        widest=max(bounded),
        reach=sum(window - 1 for window in bounded),
        max_chunk=min(most, config.max_prefill_chunk or most),
    )


def resolve_num_kv_blocks(
    config: EngineConfig,
    max_model_len: int,
    window: AttentionWindow,
    bytes_per_block: int,
    measured_bytes: int | None = None,
) -> int:
    """The pool's size in blocks; ``measured_bytes`` is what ``memory_utilization`` leaves for it, where that is set.

    RecipeError where not even one sequence of ``max_model_len`` fits, which could then never be served.
    """
    blocks_per_seq = window.most_blocks(None if window.is_endless else max_model_len)
    is_windowed = window.is_endless or blocks_per_seq < ceil_div(max_model_len, config.block_size)
    if config.num_kv_blocks is not None:
        if config.num_kv_blocks < blocks_per_seq and is_windowed:
            raise RecipeError(
                f"engine.num_kv_blocks: {config.num_kv_blocks:,} blocks of {config.block_size} tokens do not hold "
                f"{_held(config, window)}; raise it to {blocks_per_seq:,} or lower {_remedy(window)}"
            )
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
        sequence = f"one sequence of max_model_len {max_model_len:,}"
        remedy = f"or lower engine.max_model_len to {num_affordable * config.block_size:,}" if num_affordable else ""
        if is_windowed:
            sequence, remedy = _held(config, window), f"or lower {_remedy(window)}"
        raise RecipeError(_too_small(config, sequence, blocks_per_seq * bytes_per_block, measured_bytes, remedy))
    if given_bytes is not None and config.prefix_cache:
        return num_affordable  # what running sequences cannot fill keeps prefixes
    return min(num_affordable, blocks_per_seq * config.max_num_seqs)


def ceil_div(numerator: int, denominator: int) -> int:
    """The quotient, rounded up."""
    return -(-numerator // denominator)


def _held(config: EngineConfig, window: AttentionWindow) -> str:
    """What a pool has to hold of one sequence that lets go of blocks."""
    sinks = f"{config.sink_tokens:,} sinks, " if config.sink_tokens else ""
    return f"one sequence's {sinks}window of {window.widest or 0:,} tokens and chunk of {window.max_chunk:,}"


def _remedy(window: AttentionWindow) -> str:
    return "engine.window_tokens or max_prefill_chunk" if window.is_endless else "engine.max_prefill_chunk"


def _too_small(config: EngineConfig, sequence: str, needed_bytes: int, measured_bytes: int | None, remedy: str) -> str:
    """The message where a pool cannot hold one sequence."""
    if measured_bytes is not None:
        return (
            f"engine.memory_utilization: {config.memory_utilization} leaves {measured_bytes:,} bytes for keys and "
            f"values, and {sequence} takes {needed_bytes:,}; raise it {remedy}"
        ).rstrip()
    given_bytes = DEFAULT_KV_CACHE_MEMORY if config.kv_cache_memory is None else config.kv_cache_memory
    return (
        f"engine.kv_cache_memory: {given_bytes:,} bytes do not hold {sequence}; raise it to {needed_bytes:,} {remedy}"
    ).rstrip()

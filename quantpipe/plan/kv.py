"""Bytes of keys and values: of a token, of a sequence with its windows, and what one step reads of them."""

from quantpipe.engine.attention_window import AttentionWindow
from quantpipe.formats.kv_mode import KV_MODES
from quantpipe.plan.devices import Kind
from quantpipe.plan.shape import ModelShape

BLOCK_TOKENS = 16  # the engine's default block size
# Bytes of a number in the compute dtype, which keys and values have that are not rounded.
COMPUTE_BYTES: dict[Kind, int] = {"cpu": 4, "gpu": 2}


def token_bytes(shape: ModelShape, kv_dtype: str, compute_bytes: int) -> int:
    """Of one token in all layers."""
    mode = KV_MODES[kv_dtype]
    return sum(mode.token_bytes(own.num_kv_heads, own.head_dim, compute_bytes) for own in shape.attention)


def held_tokens(shape: ModelShape, context: int, max_chunk: int) -> int:
    """How many tokens' room a sequence of ``context`` tokens takes, in whole blocks.

    Blocks hold every layer's keys and values, so a window saves memory only where every layer has one.
    """
    windows = [own.window for own in shape.attention]
    widest = None if None in windows else max(window for window in windows if window is not None)
    window = AttentionWindow(BLOCK_TOKENS, widest=widest, max_chunk=max_chunk)
    return window.most_blocks(context) * BLOCK_TOKENS


def sequence_bytes(shape: ModelShape, kv_dtype: str, compute_bytes: int, context: int, max_chunk: int) -> int:
    """What a sequence of ``context`` tokens holds at most."""
    return token_bytes(shape, kv_dtype, compute_bytes) * held_tokens(shape, context, max_chunk)


def read_bytes(shape: ModelShape, kv_dtype: str, compute_bytes: int, context: int) -> int:
    """What the next token of such a sequence reads: in each layer no more than its window."""
    mode = KV_MODES[kv_dtype]
    return sum(
        seen_tokens(context, own.window) * mode.token_bytes(own.num_kv_heads, own.head_dim, compute_bytes)
        for own in shape.attention
    )


def seen_tokens(context: int, window: int | None) -> int:
    """How many tokens the last of ``context`` sees."""
    return context if window is None else min(context, window)

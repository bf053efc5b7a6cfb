"""What must hold between the settings of a recipe's engine. Works on the plain data, as ``rules`` does."""

from collections.abc import Iterator, Mapping
from typing import Any

from quantpipe.recipe.document import Problem, value_at

DEFAULT_STEP_TOKENS, DEFAULT_NUM_SEQS = 512, 16


def find_engine_conflicts(data: Mapping[str, Any]) -> Iterator[Problem]:
    """Settings of the ``engine`` section that contradict each other."""
    yield from _memory_problems(data)
    yield from _window_problems(data)
    yield from _step_problems(data)


def _window_problems(data: Mapping[str, Any]) -> Iterator[Problem]:
    num_sinks = value_at(data, ("engine", "sink_tokens"))
    if type(num_sinks) is int and num_sinks > 0 and value_at(data, ("engine", "window_tokens")) is None:
        text = "sinks stand before a window, and there is none; add engine.window_tokens"
        yield Problem(("engine", "sink_tokens"), text, at_key=True, needs=("engine", "window_tokens"))
    window, block_size = (value_at(data, ("engine", name)) for name in ("window_tokens", "block_size"))
    if type(window) is int and type(block_size) is int and window < block_size:
        text = f"found {window}, below block_size {block_size}; raise it, or lower block_size"
        yield Problem(("engine", "window_tokens"), text)


def _step_problems(data: Mapping[str, Any]) -> Iterator[Problem]:
    """Each running sequence needs a token of a step."""
    defaults = {"max_num_batched_tokens": DEFAULT_STEP_TOKENS, "max_num_seqs": DEFAULT_NUM_SEQS}
    found = {name: value_at(data, ("engine", name)) for name in defaults}
    most, num_seqs = (default if found[name] is None else found[name] for name, default in defaults.items())
    if type(most) is int and type(num_seqs) is int and 0 < most < num_seqs:
        name = "max_num_batched_tokens" if found["max_num_batched_tokens"] is not None else "max_num_seqs"
        text = (
            f"max_num_batched_tokens {most} is below max_num_seqs {num_seqs}, and each running sequence needs one "
            "token per step; raise the former, or lower the latter"
        )
        yield Problem(("engine", name), text)


def _memory_problems(data: Mapping[str, Any]) -> Iterator[Problem]:
    names = ("num_kv_blocks", "kv_cache_memory", "memory_utilization")
    first, *others = [name for name in names if value_at(data, ("engine", name)) is not None] or [""]
    for name in others:
        text = f"found {first} too, which sizes the same memory; give one of them"
        yield Problem(("engine", name), text, at_key=True)

"""Which blocks are held, and what need not be read, against what each token sees written out."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quantpipe.engine.attention_window import AttentionWindow
from quantpipe.engine.config import EngineConfig
from quantpipe.engine.kv_cache import resolve_attention_window, resolve_max_model_len, resolve_num_kv_blocks
from quantpipe.errors import RecipeError

windows = st.builds(
    lambda block_size, num_sinks, window, max_chunk: AttentionWindow(
        block_size, num_sinks, window, window, window - 1, max_chunk
    ),
    st.integers(1, 7),
    st.integers(0, 9),
    st.integers(1, 20),
    st.integers(1, 12),
)


def sees(query: int, key: int, num_sinks: int, window: int | None) -> bool:
    return key <= query and (window is None or key > query - window or key < num_sinks)


@given(windows, st.integers(0, 80))
def test_exactly_the_blocks_that_no_later_token_sees_are_dropped(window: AttentionWindow, num_computed: int) -> None:
    block_size, num_sinks = window.block_size, window.num_sinks
    unseen = [
        not any(sees(num_computed, key, num_sinks, window.widest) for key in range(first, first + block_size))
        for first in range(0, num_computed - block_size + 1, block_size)
    ]
    assert window.num_dropped(num_computed) == sum(unseen[window.num_sink_blocks :])


@given(windows, st.integers(1, 200), st.lists(st.integers(1, 12), min_size=1, max_size=30))
def test_no_step_of_a_sequence_needs_more_blocks_than_it_may_hold(
    window: AttentionWindow, num_tokens: int, chunks: list[int]
) -> None:
    ends = [0]
    while ends[-1] < num_tokens:
        chunk = min(chunks[len(ends) % len(chunks)], window.max_chunk)
        ends.append(min(num_tokens, ends[-1] + chunk))
    most = max(window.num_blocks(end) - window.num_dropped(start) for start, end in pairwise(ends))
    assert most <= window.most_blocks(num_tokens) <= window.most_blocks(None)


def test_bound_is_reached() -> None:
    window = AttentionWindow(4, 3, 10, 10, 9, max_chunk=5)
    held = [window.num_blocks(start + 5) - window.num_dropped(start) for start in range(100)]
    assert max(held) == window.most_blocks(None) == 6


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 4), st.integers(0, 5), st.lists(st.integers(1, 6), min_size=1, max_size=3), st.integers(0, 40))
def test_what_follows_a_gap_is_right_though_what_lies_in_it_was_never_read(
    block_size: int, num_sinks: int, layer_windows: list[int], position: int
) -> None:
    reach = sum(window - 1 for window in layer_windows)
    window = AttentionWindow(block_size, num_sinks, max(layer_windows), max(layer_windows), reach)
    first = window.first_needed(position)
    assert first % block_size == 0 and first <= position
    tokens = [key for key in range(position + 10) if key < window.num_sink_blocks * block_size or key >= first]
    is_right = dict.fromkeys(tokens, True)
    for own in layer_windows:
        is_right = {
            query: all(is_right.get(key, False) for key in range(query + 1) if sees(query, key, num_sinks, own))
            for query in tokens
        }
    assert all(is_right[query] for query in tokens if query >= position)


def test_gap_is_as_long_as_it_can_be() -> None:
    window = AttentionWindow(4, 3, 6, 6, reach=10)
    assert window.first_needed(100) == 88
    assert window.first_needed(17) == 0  # one block would be left out, and that is the sinks'


def resolve(
    config: EngineConfig, *own_windows: int | None, limit: int = 100, supported: bool = True
) -> AttentionWindow:
    return resolve_attention_window(config, own_windows, limit, supported)


def test_blocks_are_let_go_only_where_every_layer_has_a_window() -> None:
    config = EngineConfig(block_size=4)
    assert resolve(config, 9, None) == resolve(config, None) == AttentionWindow(4)
    own = resolve(config, 9, 7)
    assert (own.widest, own.reach, own.asked, own.is_endless, own.form) == (9, 14, None, False, "full")
    config = EngineConfig(block_size=4, sink_tokens=2, window_tokens=8, max_prefill_chunk=6)
    asked = resolve(config, 9, None, 7)
    assert asked == AttentionWindow(4, 2, 8, 8, 7 + 7 + 6, max_chunk=6)
    assert (asked.is_endless, asked.form) == (True, "sinks 2, window 8")


def test_backend_without_windows_keeps_everything_and_refuses_to_be_asked_for_one() -> None:
    assert resolve(EngineConfig(block_size=4), 9, 7, supported=False) == AttentionWindow(4)
    with pytest.raises(RecipeError, match=r"engine\.window_tokens: backend 'cpu' has no windows"):
        resolve(EngineConfig(block_size=4, window_tokens=8), None, supported=False)


def test_sinks_and_window_stay_within_the_models_positions_and_prompts_need_not() -> None:
    config = EngineConfig(block_size=4, sink_tokens=4, window_tokens=97, max_model_len=1000)
    with pytest.raises(RecipeError, match=r"97 with 4 sinks exceed the model's own limit of 100 .* lower it to 96"):
        resolve(config, None)
    assert resolve_max_model_len(config, 100) == 1000


def test_pool_need_only_hold_what_one_sequence_holds() -> None:
    config = EngineConfig(
        block_size=4, sink_tokens=4, window_tokens=8, max_num_seqs=2, max_num_batched_tokens=8, max_model_len=100
    )
    window = resolve(config, None)
    assert resolve_num_kv_blocks(config, 100, window, 1) == 2 * window.most_blocks(None) == 2 * 6
    small = EngineConfig(block_size=4, sink_tokens=4, window_tokens=8, max_num_batched_tokens=16, num_kv_blocks=7)
    with pytest.raises(RecipeError) as caught:
        resolve_num_kv_blocks(small, 100, resolve(small, None), 1)
    assert str(caught.value) == (
        "engine.num_kv_blocks: 7 blocks of 4 tokens do not hold one sequence's 4 sinks, window of 8 tokens and chunk "
        "of 16; raise it to 8 or lower engine.window_tokens or max_prefill_chunk"
    )
    poor = EngineConfig(block_size=4, window_tokens=8, kv_cache_memory=10)
    with pytest.raises(RecipeError, match=r"10 bytes do not hold one sequence's window of 8 tokens and chunk of 512"):
        resolve_num_kv_blocks(poor, 100, resolve(poor, None), 1)

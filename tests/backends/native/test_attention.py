"""Attention of the compiled kernels equals the reference's, for any mix of sequences, cache mode and head size."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from native_attention import Heads, NativeAttention, Part, by_reference, in_two_steps, lay_out, random_qkv

from quantpipe.backends.cpu.native.library import Library, NativeError
from quantpipe.formats.kv_mode import KV_MODES

# Float32 sums in another order, of numbers near 1.
FLOAT32_NOISE = 1e-5
HEAD_DIMS = (8, 64, 80, 96, 128, 256)


def check(library: Library, heads: Heads, lens: list[tuple[int, int]], block_size: int, kv_dtype: str) -> None:
    parts = lay_out(lens, block_size, seed=0)
    num_blocks = 1 + sum(len(part.blocks) for part in parts)
    attention = NativeAttention(library, heads, num_blocks, block_size, kv_dtype)
    qkv = random_qkv(heads, parts, seed=1)
    found = in_two_steps(attention, parts, qkv)
    expected = by_reference(heads, kv_dtype, attention.scales, parts, qkv)
    torch.testing.assert_close(found, expected, rtol=0, atol=FLOAT32_NOISE)


@given(st.data())
@settings(max_examples=25, deadline=None)
def test_any_mix_of_decodes_and_chunks_equals_the_reference(
    library: Library, instruction_set: str, data: st.DataObject
) -> None:
    num_kv_heads, group = data.draw(st.integers(1, 3)), data.draw(st.sampled_from((1, 2, 3, 7, 9)))
    window = data.draw(st.none() | st.integers(1, 80))
    heads = Heads(num_kv_heads * group, num_kv_heads, data.draw(st.sampled_from((8, 24, 64, 80))), window)
    lens = st.tuples(st.integers(0, 150), st.one_of(st.just(1), st.integers(0, 70)))
    check(
        library,
        heads,
        data.draw(st.lists(lens, min_size=1, max_size=4)),
        data.draw(st.sampled_from((1, 4, 16, 32, 33))),
        data.draw(st.sampled_from(list(KV_MODES))),
    )


@pytest.mark.parametrize("kv_dtype", KV_MODES)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_every_head_size_and_cache_mode_equals_the_reference(
    library: Library, instruction_set: str, head_dim: int, kv_dtype: str
) -> None:
    check(library, Heads(4, 2, head_dim), [(40, 1), (0, 30), (100, 1), (17, 9)], 16, kv_dtype)


def test_long_contexts_that_are_looked_at_in_pieces_equal_the_reference(library: Library) -> None:
    check(library, Heads(2, 1, 16), [(2500, 1), (1023, 1), (1024, 1), (1100, 2)], 16, "auto")
    check(library, Heads(2, 1, 16, window=1500), [(2500, 1)], 16, "int8_per_token_head")


def test_heads_that_turn_in_part_or_not_at_all_equal_the_reference(library: Library) -> None:
    for num_pairs in (0, 3, 16):
        check(library, Heads(2, 2, 64, num_pairs=num_pairs), [(20, 4)], 16, "auto")


@pytest.mark.parametrize("kv_dtype", KV_MODES)
def test_a_row_does_not_depend_on_its_neighbours_or_the_threads(library: Library, kv_dtype: str) -> None:
    heads, lens = Heads(6, 2, 64), [(300, 1), (10, 20), (1200, 1)]
    parts = lay_out(lens, 16, seed=0)
    qkv = random_qkv(heads, parts, seed=1)

    def run(chosen: list[int], num_threads: int) -> torch.Tensor:
        attention = NativeAttention(library, heads, 120, 16, kv_dtype, num_threads)
        return in_two_steps(attention, [parts[s] for s in chosen], [qkv[s] for s in chosen])

    together = run([0, 1, 2], 1)
    assert torch.equal(run([0, 1, 2], 3), together)
    assert torch.equal(torch.cat([run([s], 1) for s in range(3)]), together)


@pytest.mark.parametrize("bad", (torch.nan, torch.inf, -torch.inf))
@pytest.mark.parametrize("kv_dtype", KV_MODES)
@pytest.mark.parametrize("column", ("key", "value"))
def test_a_head_that_overflowed_is_not_finite_where_it_is_seen(
    library: Library, column: str, kv_dtype: str, bad: float
) -> None:
    heads = Heads(2, 2, 64)
    parts = lay_out([(20, 1), (20, 1)], 16, seed=0)
    qkv = random_qkv(heads, parts, seed=1)
    qkv[0][5, 2 if column == "key" else 4, 3] = bad  # the first KV head
    found = in_two_steps(NativeAttention(library, heads, 8, 16, kv_dtype), parts, qkv)
    assert not found[0, 0].isfinite().all()
    assert found[0, 1].isfinite().all()
    assert found[1].isfinite().all()


@pytest.mark.parametrize("kv_dtype", KV_MODES)
def test_what_a_block_held_before_is_not_seen(library: Library, kv_dtype: str) -> None:
    heads = Heads(2, 1, 64)
    attention = NativeAttention(library, heads, 4, 16, kv_dtype)
    broken = torch.full((48, 4, 64), torch.nan)
    attention.run([Part(0, 48, (0, 1, 2))], broken)
    parts = [Part(20, 1, (1, 2))]
    qkv = random_qkv(heads, parts, seed=1)
    found = in_two_steps(attention, parts, qkv)
    expected = by_reference(heads, kv_dtype, attention.scales, parts, qkv)
    torch.testing.assert_close(found, expected, rtol=0, atol=FLOAT32_NOISE)


def test_a_step_without_tokens_is_nothing(library: Library) -> None:
    attention = NativeAttention(library, Heads(2, 1, 64), 4, 16, "auto")
    assert attention.run([Part(3, 0, (1,))], torch.empty(0, 4, 64)).shape == (0, 2, 64)


def test_slots_and_blocks_outside_of_the_cache_are_refused(library: Library) -> None:
    attention = NativeAttention(library, Heads(2, 1, 64), 4, 16, "auto")
    with pytest.raises(NativeError, match=r"slot 64 is outside the cache"):
        attention.run([Part(0, 1, (4,))], torch.zeros(1, 4, 64))
    with pytest.raises(NativeError, match=r"sequence 0: block -1"):
        attention.run([Part(16, 1, (-1, 1))], torch.zeros(1, 4, 64))

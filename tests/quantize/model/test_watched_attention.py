"""A watched model computes what an ordinary one computes, and shows queries, keys and values as a cache gets them."""

from typing import Any

import pytest
import torch
from architectures import ARCHITECTURES, NUM_BLOCKS, MakeModel
from torch import Tensor
from transformers import AttentionInterface, AutoModelForCausalLM, DynamicCache

from quantpipe.quantize.model.watched_attention import AttentionCall, watched_attention, watching_attention


def open_model(make_model: MakeModel, name: str, attention: str) -> Any:
    return AutoModelForCausalLM.from_pretrained(make_model(name), attn_implementation=attention).eval()


def random_ids(num_sequences: int = 2, num_tokens: int = 19) -> Tensor:
    return torch.randint(3, 120, (num_sequences, num_tokens), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", ARCHITECTURES)
@torch.no_grad()
def test_watched_model_computes_the_same_numbers(tiny_model: MakeModel, name: str, padded: bool) -> None:
    ids, mask = random_ids(), torch.ones(2, 19, dtype=torch.int64)
    mask[0, :7] = not padded
    calls: list[AttentionCall] = []
    expected = open_model(tiny_model, name, "sdpa")(input_ids=ids, attention_mask=mask).logits
    model = open_model(tiny_model, name, watched_attention())
    with watching_attention(calls.append):
        found = model(input_ids=ids, attention_mask=mask).logits
    assert torch.equal(found, expected)
    assert len(calls) == NUM_BLOCKS
    for call in calls:
        assert torch.equal(call.is_real_SL, mask.bool())
    model(input_ids=ids)
    assert len(calls) == NUM_BLOCKS, "nobody watches any more"


@torch.no_grad()
def test_what_is_shown_is_what_the_cache_holds(tiny_model: MakeModel) -> None:
    calls: list[AttentionCall] = []
    model = open_model(tiny_model, "qwen3", watched_attention())
    cache = DynamicCache()
    with watching_attention(calls.append):
        model(input_ids=random_ids(), past_key_values=cache, use_cache=True)
    for call, layer in zip(calls, cache.layers, strict=True):
        assert torch.equal(call.key_SJLD, layer.keys) and torch.equal(call.value_SJLD, layer.values)
        assert call.query_SHLD.shape == (2, 4, 19, 16)


@pytest.mark.parametrize("name", ["llama", "gemma3"])
@torch.no_grad()
def test_part_of_a_call_attends_as_it_did_in_the_whole(tiny_model: MakeModel, name: str) -> None:
    calls: list[AttentionCall] = []
    model = open_model(tiny_model, name, watched_attention())
    with watching_attention(calls.append):
        model(input_ids=random_ids(), attention_mask=torch.ones(2, 19).long())
    for call in calls:
        part = call.first_sequence(13)
        whole_SLHD = call.output(call.query_SHLD, call.key_SJLD, call.value_SJLD)
        found_SLHD = part.output(part.query_SHLD, part.key_SJLD, part.value_SJLD)
        torch.testing.assert_close(found_SLHD, whole_SLHD[:1, :13])


def test_watcher_is_forgotten_even_after_an_error() -> None:
    calls: list[AttentionCall] = []
    with pytest.raises(ZeroDivisionError), watching_attention(calls.append):
        raise ZeroDivisionError
    attend = AttentionInterface()[watched_attention()]
    heads = torch.ones(1, 1, 2, 4)
    attend(torch.nn.Module(), heads, heads, heads, None)
    assert not calls

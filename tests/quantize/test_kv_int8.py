"""Errors of the KV cache modes and static scales do not depend on how tokens are batched, padded or stored."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import pytest
import torch
from architectures import NUM_BLOCKS, MakeModel
from torch import Tensor
from transformers import AttentionInterface, AutoModelForCausalLM

from quantpipe.errors import DataError, RecipeError
from quantpipe.quantize import kv_int8
from quantpipe.quantize.kv_int8 import MEASURED_MODES, KVLayerRecord, KVObserver
from quantpipe.quantize.model.watched_attention import AttentionCall, watched_attention, watching_attention


def open_model(make_model: MakeModel, name: str = "llama", attention: str | None = None) -> Any:
    attention = attention or watched_attention()
    return AutoModelForCausalLM.from_pretrained(make_model(name), attn_implementation=attention).eval()


def random_ids(num_sequences: int, num_tokens: int = 16) -> Tensor:
    return torch.randint(3, 120, (num_sequences, num_tokens), generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def calls_of(model: Any, batches: Sequence[Tensor], layer: int, mask: Tensor | None = None) -> list[AttentionCall]:
    calls: list[AttentionCall] = []
    # Positions count real tokens only, as they do when a model generates from padded prompts.
    position_ids = None if mask is None else (mask.cumsum(-1) - 1).clamp_min(0)
    with watching_attention(calls.append):
        for ids in batches:
            model(input_ids=ids, attention_mask=mask, position_ids=position_ids, use_cache=False)
    return calls[layer::NUM_BLOCKS]


def observe(observer: KVObserver, layer: int, calls: Sequence[AttentionCall]) -> KVLayerRecord:
    """Show the observer calls as they would come from running a block."""
    with observer.observing(layer):
        for call in calls:
            attend = AttentionInterface()[watched_attention()]
            attend(call.module, call.query_SHLD, call.key_SJLD, call.value_SJLD, call.mask, **call.settings)
    return observer.record_of(layer)


@pytest.fixture(scope="module")
def model(tiny_model: MakeModel) -> Any:
    return open_model(tiny_model)


def test_finer_modes_have_smaller_errors(model: Any) -> None:
    errors = observe(KVObserver("auto"), 0, calls_of(model, [random_ids(4)], 0)).errors
    assert set(errors) == set(MEASURED_MODES)
    assert 0 < errors["int8_per_token_head"] < errors["int8_static"] < errors["k_int8_v_int4"]
    assert errors["k_int8_v_int4"] < errors["int4_per_token_head"] < 0.1


def test_static_scales_cover_every_token_of_every_batch(model: Any) -> None:
    ids = random_ids(6)
    observer = KVObserver("int8_static")
    expected = []
    for layer in range(NUM_BLOCKS):
        calls = calls_of(model, [ids[:4], ids[4:]], layer)
        observe(observer, layer, calls)
        expected.append(torch.cat([call.key_SJLD for call in calls]).abs().amax((0, 2, 3)))
    scales = observer.finish(NUM_BLOCKS).scales
    assert scales is not None
    for scale_J, absmax_J in zip(scales.key, expected, strict=True):
        torch.testing.assert_close(127 * scale_J, absmax_J, rtol=1e-6, atol=0)


def test_maxima_and_errors_do_not_depend_on_batching(model: Any) -> None:
    ids = random_ids(5)
    at_once, apart = (
        observe(KVObserver("auto"), 0, calls_of(model, batches, 0))
        for batches in ([ids], [row.unsqueeze(0) for row in ids])
    )
    assert at_once.num_tokens == apart.num_tokens == 80
    assert at_once.key_absmax == pytest.approx(apart.key_absmax, rel=1e-5)
    assert at_once.value_absmax == pytest.approx(apart.value_absmax, rel=1e-5)
    for mode in MEASURED_MODES:
        assert at_once.errors[mode] == pytest.approx(apart.errors[mode], rel=0.5)  # one sampled sequence against five


def test_padding_does_not_count(model: Any) -> None:
    ids = random_ids(2)
    plain = observe(KVObserver("auto"), 1, calls_of(model, [ids], 1))
    padded_ids = torch.nn.functional.pad(ids, (9, 0), value=127)
    mask = torch.nn.functional.pad(torch.ones_like(ids), (9, 0))
    padded = observe(KVObserver("auto"), 1, calls_of(model, [padded_ids], 1, mask))
    assert padded.num_tokens == plain.num_tokens
    assert padded.value_absmax == pytest.approx(plain.value_absmax, rel=1e-5)
    assert padded.key_absmax == pytest.approx(plain.key_absmax, rel=1e-4)
    for mode in MEASURED_MODES:
        assert padded.errors[mode] == pytest.approx(plain.errors[mode], rel=0.05)


def test_only_a_bounded_sample_is_kept(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_int8, "SAMPLED_TOKENS", 24)
    kept: list[int] = []
    first_sequence = AttentionCall.first_sequence

    def counting(call: AttentionCall, num_tokens: int) -> AttentionCall:
        part = first_sequence(call, num_tokens)
        kept.append(part.key_SJLD.untyped_storage().nbytes() // (2 * 16 * 4))
        return part

    monkeypatch.setattr(AttentionCall, "first_sequence", counting)
    observe(KVObserver("auto"), 0, calls_of(model, list(random_ids(6).view(3, 2, -1)), 0))
    assert kept == [16, 8]


def test_record_restored_from_json_gives_the_same_result(model: Any) -> None:
    observer, restored = KVObserver("int8_static"), KVObserver("int8_static")
    for layer in range(NUM_BLOCKS):
        record = observe(observer, layer, calls_of(model, [random_ids(2)], layer))
        restored.restore(KVLayerRecord(**json.loads(json.dumps(asdict(record)))))
    expected, found = observer.finish(NUM_BLOCKS), restored.finish(NUM_BLOCKS)
    assert found.modes == expected.modes
    assert found.scales is not None and expected.scales is not None
    for name, scale_J in expected.scales.tensors().items():
        assert torch.equal(found.scales.tensors()[name], scale_J)


def test_mean_and_worst_layer_are_reported(model: Any) -> None:
    observer = KVObserver("int8_per_token_head")
    for layer, error in enumerate((0.25, 0.75)):
        observer.restore(KVLayerRecord(layer, 8, dict.fromkeys(MEASURED_MODES, error), (1.0,), (1.0,)))
    record = observer.finish(2)
    assert record.scales is None
    found = record.modes["int8_static"]
    assert (found.mean_error, found.worst_error, found.worst_layer) == (0.5, 0.75, 1)


def test_layer_that_shows_no_attention_is_an_error(tiny_model: MakeModel) -> None:
    observer, unwatched = KVObserver("int8_static"), open_model(tiny_model, attention="sdpa")
    with pytest.raises(DataError, match="layer 3 saw no calibration token"), observer.observing(3):
        unwatched(input_ids=random_ids(1))
    with pytest.raises(DataError, match="layer 0 saw no calibration token"):
        observer.finish(4)


def test_tokens_that_are_all_padding_do_not_count_as_seen(model: Any) -> None:
    [call] = calls_of(model, [random_ids(1)], 0)
    hidden = torch.zeros(1, 1, 16, 16, dtype=torch.bool)
    with pytest.raises(DataError, match="layer 0 saw no calibration token"):
        observe(KVObserver("int8_static"), 0, [AttentionCall(**{**vars(call), "mask": hidden})])


def test_unknown_mode_is_refused() -> None:
    with pytest.raises(RecipeError, match=r"quantize.kv_cache: unknown 'int4'"):
        KVObserver("int4")

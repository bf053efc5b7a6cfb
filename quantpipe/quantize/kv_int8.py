"""What each KV cache mode does to a model's attention, measured layer by layer, and the scales that static modes need.

Shapes: S sequences, L tokens, J KV heads, D head_dim.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from quantpipe.errors import DataError
from quantpipe.formats.kv_mode import KV_MODES, KVMode, kv_mode
from quantpipe.formats.kv_rounding import round_kv, static_scale
from quantpipe.formats.kv_scales import KVScales
from quantpipe.quantize.model.watched_attention import AttentionCall, watching_attention

# Errors are measured on about so many tokens of a layer, so that memory does not grow with the samples.
SAMPLED_TOKENS = 1024
MEASURED_MODES = tuple(name for name in KV_MODES if name != "auto")


@dataclass(frozen=True)
class KVLayerRecord:
    """What one layer's attention showed; plain numbers, so that it can be stored and restored.

    ``errors``: for each mode the squared error of the attention output relative to its square. ``key_absmax`` and
    ``value_absmax``: the largest magnitude in each KV head over every token.
    """

    layer: int
    num_tokens: int
    errors: Mapping[str, float]
    key_absmax: tuple[float, ...]
    value_absmax: tuple[float, ...]


@dataclass(frozen=True)
class KVModeRecord:
    """Attention-output error of one mode: the mean over layers, and the worst layer."""

    mean_error: float
    worst_error: float
    worst_layer: int


@dataclass(frozen=True)
class KVRecord:
    """Every mode's error, and the static scales where the mode chosen needs them."""

    modes: Mapping[str, KVModeRecord]
    scales: KVScales | None


class KVObserver:
    """Measures, layer by layer, what each KV cache mode does to the attention output.

    Holds the tokens of one layer at a time, ``SAMPLED_TOKENS`` of them; its memory does not grow with samples. A layer
    should be observed as it will serve: after its linears are quantized.
    """

    def __init__(self, mode: str) -> None:
        self._mode = kv_mode(mode, "quantize.kv_cache")
        self._records: dict[int, KVLayerRecord] = {}

    @contextmanager
    def observing(self, layer: int) -> Iterator[None]:
        """Within it, run the block of that layer on every batch. DataError where it shows no attention at the end."""
        seen = _LayerSeen(layer)
        with watching_attention(seen.update):
            yield
        self._records[layer] = seen.record()

    def record_of(self, layer: int) -> KVLayerRecord:
        return self._records[layer]

    def restore(self, record: KVLayerRecord) -> None:
        """Take over what an earlier run measured."""
        self._records[record.layer] = record

    def finish(self, num_layers: int) -> KVRecord:
        """The whole model's record. DataError for a layer that was never observed."""
        for layer in range(num_layers):
            if layer not in self._records:
                raise DataError(_unseen(layer))
        records = [self._records[layer] for layer in range(num_layers)]
        return KVRecord({name: _mode_record(name, records) for name in MEASURED_MODES}, self._scales(records))

    def _scales(self, records: list[KVLayerRecord]) -> KVScales | None:
        if not self._mode.needs_scales:
            return None
        key, value = (
            tuple(static_scale(torch.tensor(absmax)) for absmax in of_layers)
            for of_layers in ([r.key_absmax for r in records], [r.value_absmax for r in records])
        )
        return KVScales(key, value)


class _LayerSeen:
    """The maxima of one layer over all calls, and the sample its errors are measured on."""

    def __init__(self, layer: int) -> None:
        self._layer = layer
        self._num_tokens = 0
        self._num_sampled = 0
        self._sample: list[AttentionCall] = []
        self._key_absmax_J = self._value_absmax_J = torch.zeros(1)

    def update(self, call: AttentionCall) -> None:
        if self._sample and call.module is not self._sample[0].module:
            raise DataError(f"KV cache: layer {self._layer} has several attentions; its cache cannot be quantized")
        is_real_SL = call.is_real_SL
        self._num_tokens += int(is_real_SL.sum())
        self._key_absmax_J = torch.maximum(self._key_absmax_J, _absmax(call.key_SJLD, is_real_SL))
        self._value_absmax_J = torch.maximum(self._value_absmax_J, _absmax(call.value_SJLD, is_real_SL))
        num_wanted = SAMPLED_TOKENS - self._num_sampled
        if num_wanted > 0:
            self._sample.append(call.first_sequence(num_wanted))
            self._num_sampled += int(self._sample[-1].is_real_SL.sum())

    def record(self) -> KVLayerRecord:
        if not self._num_tokens:
            raise DataError(_unseen(self._layer))
        key_J1, value_J1 = (static_scale(x_J).unsqueeze(-1) for x_J in (self._key_absmax_J, self._value_absmax_J))
        errors = {name: self._error(KV_MODES[name], key_J1, value_J1) for name in MEASURED_MODES}
        key_absmax, value_absmax = (tuple(x_J.tolist()) for x_J in (self._key_absmax_J, self._value_absmax_J))
        return KVLayerRecord(self._layer, self._num_tokens, errors, key_absmax, value_absmax)

    def _error(self, mode: KVMode, key_scale_J1: Tensor, value_scale_J1: Tensor) -> float:
        error = energy = 0.0
        for call in self._sample:
            is_real_SL = call.is_real_SL
            key_SJLD = round_kv(call.key_SJLD.transpose(1, 2), mode.key, key_scale_J1).transpose(1, 2)
            value_SJLD = round_kv(call.value_SJLD.transpose(1, 2), mode.value, value_scale_J1).transpose(1, 2)
            exact = call.output(call.query_SHLD, call.key_SJLD, call.value_SJLD)[is_real_SL].double()
            rounded = call.output(call.query_SHLD, key_SJLD, value_SJLD)[is_real_SL].double()
            error += float((rounded - exact).square().sum())
            energy += float(exact.square().sum())
        return error / max(energy, torch.finfo(torch.float64).tiny)


def _absmax(x_SJLD: Tensor, is_real_SL: Tensor) -> Tensor:
    """The largest magnitude [J] in each head over the tokens that are not padding."""
    absmax_SJL = x_SJLD.detach().float().abs().amax(-1)
    return absmax_SJL.masked_fill(~is_real_SL.unsqueeze(1), 0.0).amax((0, 2))


def _mode_record(name: str, records: list[KVLayerRecord]) -> KVModeRecord:
    errors = [record.errors[name] for record in records]
    worst = max(range(len(errors)), key=errors.__getitem__)
    return KVModeRecord(sum(errors) / len(errors), errors[worst], worst)


def _unseen(layer: int) -> str:
    return (
        f"KV cache: layer {layer} saw no calibration token through transformers' attention interface; use "
        "`kv_cache: auto` or `int8_per_token_head`, which need no calibration"
    )

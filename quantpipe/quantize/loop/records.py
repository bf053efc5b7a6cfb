"""What quantizing a model gives: integers, changed tensors, and a record of what happened to each linear."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from quantpipe.formats.artifact_writer import QuantWeight
from quantpipe.quantize.kv_int8 import KVLayerRecord
from quantpipe.quantize.transforms.transform import TransformRecord


@dataclass(frozen=True)
class LayerRecord:
    """What happened to one linear.

    Errors are those of its output on the calibration tokens (of its weights, where no statistics were collected),
    relative and squared: 0 is lossless, 1 is as bad as all-zero weights. ``error_before`` is round to nearest with
    absmax scales, ``error_after`` what was chosen. ``num_rows_nearest`` counts the rows, among all linears solved
    together with it, for which rounding to nearest was better than the solver. ``seconds`` is a measurement of this
    run: it belongs in no artifact.
    """

    name: str
    scheme: str
    error_before: float
    error_after: float
    damp_frac: float
    num_rows_nearest: int
    num_tokens: int
    seconds: float


@dataclass(frozen=True)
class QuantizedModel:
    """Every quantized linear by its full name, and a record of each.

    ``tensors`` are the other tensors that transforms changed (norms, biases, embeddings), by their full names and as
    they are stored; ``added`` are those that the base model does not store (a head that was tied), and
    ``config_updates`` what changes in config.json with them. ``transformed`` is what was done to each group of
    linears, ``kv`` what each layer's attention showed, where that was observed.
    """

    weights: Mapping[str, QuantWeight]
    layers: tuple[LayerRecord, ...]
    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    added: Mapping[str, Tensor] = field(default_factory=dict)
    config_updates: Mapping[str, Any] = field(default_factory=dict)
    transformed: tuple[TransformRecord, ...] = ()
    kv: tuple[KVLayerRecord, ...] = ()

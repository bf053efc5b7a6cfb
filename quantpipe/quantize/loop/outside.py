"""What lies outside the decoder blocks: what transforms changed there, and linears there that are quantized (the head).

Shapes: N out_features, K in_features.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quantpipe.formats.artifact_writer import QuantWeight
from quantpipe.formats.scheme import WeightScheme
from quantpipe.quantize.loop.checkpoint import PartResult
from quantpipe.quantize.loop.records import LayerRecord
from quantpipe.quantize.model.loading import StreamedModel
from quantpipe.quantize.solvers.rtn import solve_rtn
from quantpipe.quantize.solvers.scales import round_weight
from quantpipe.quantize.solvers.solver import Solution, SolverInput, SolverOptions, row_energy

# Rows of an output head solved at a time: one has a row for each token of the vocabulary.
ROWS_AT_ONCE = 16384


@dataclass(frozen=True)
class OutsideChanges:
    """Tensors that differ from the stored ones, tensors that nothing stored, and what changes in config.json."""

    tensors: Mapping[str, Tensor]
    added: Mapping[str, Tensor]
    config_updates: Mapping[str, Any]


@torch.no_grad()
def outside_changes(model: StreamedModel) -> OutsideChanges:
    """Compare the parameters outside the blocks with what is stored, and round those that changed to the stored dtype.

    A parameter that is stored nowhere was tied to another; if it is one of its own now, it has to be added.
    """
    artifact = model.artifact
    outside = {name: model.module.get_parameter(name) for name in model.outside()}
    stored = {name for name in outside if name in artifact.stored}
    tensors: dict[str, Tensor] = {}
    added: dict[str, Tensor] = {}
    for name, parameter in outside.items():
        if name in stored:
            before = artifact.tensor(name)
            if not torch.equal(parameter, before.float()):
                tensors[name] = parameter.to(before.dtype)
                parameter.copy_(tensors[name])
        elif not any(parameter is outside[other] for other in stored):
            added[name] = parameter.to(model.dtype_of(name))
            parameter.copy_(added[name])
    return OutsideChanges(tensors, added, _untied(artifact.config) if added else {})


@torch.no_grad()
def solve_outside(
    model: StreamedModel, schemes: Mapping[str, WeightScheme], changes: OutsideChanges
) -> tuple[PartResult, OutsideChanges]:
    """Round the linears outside the blocks to the scales that fit their weights best; a tied one becomes untied.

    Returns what was solved, and ``changes`` with what follows from that.
    """
    result = PartResult(tensors=dict(changes.tensors))
    added, config_updates = dict(changes.added), dict(changes.config_updates)
    for name, scheme in schemes.items():
        stored_name = f"{name}.weight"
        weight_NK = model.module.get_parameter(stored_name)
        weight, record = _round(name, weight_NK, scheme, model.dtype_of(stored_name))
        result.weights[name] = weight
        result.layers.append(record)
        result.tensors.pop(stored_name, None)
        added.pop(stored_name, None)
        if stored_name not in model.artifact.stored:
            config_updates |= _untied(model.artifact.config)
    return result, OutsideChanges(changes.tensors, added, config_updates)


def _round(
    name: str, weight_NK: Tensor, scheme: WeightScheme, scale_dtype: torch.dtype
) -> tuple[QuantWeight, LayerRecord]:
    """Round a weight to the scales with the least squared error, a part of its rows at a time."""
    started_s = time.monotonic()
    parts: list[Solution] = []
    energy = before = after = 0.0
    for start in range(0, len(weight_NK), ROWS_AT_ONCE):
        rows_NK = weight_NK[start : start + ROWS_AT_ONCE].float()
        given = SolverInput(rows_NK, scheme, scale_dtype, None, SolverOptions(scales="absmax"))
        parts.append(round_weight(rows_NK, scheme, scale_dtype, None))
        energy += float(row_energy(rows_NK, None).sum())
        before += float(row_energy(rows_NK - solve_rtn(given).dequantized(), None).sum())
        after += float(row_energy(rows_NK - parts[-1].dequantized(), None).sum())
    zeros = [part.zero_NG for part in parts if part.zero_NG is not None]
    weight = QuantWeight(
        torch.cat([part.q_NK for part in parts]),
        torch.cat([part.scale_NG for part in parts]),
        scheme,
        torch.cat(zeros) if zeros else None,
    )
    energy = max(energy, torch.finfo(torch.float64).tiny)
    seconds = time.monotonic() - started_s
    return weight, LayerRecord(name, scheme.label, before / energy, after / energy, 0.0, 0, 0, seconds)


def _untied(config: Mapping[str, Any]) -> dict[str, Any]:
    """The changes of config.json that untie the head, also in a part of its own for text."""
    updates: dict[str, Any] = {"tie_word_embeddings": False}
    if isinstance(config.get("text_config"), dict):
        updates["text_config"] = config["text_config"] | updates
    return updates

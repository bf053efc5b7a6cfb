"""The block-by-block loop: collect what a block's linears read, solve, write back, propagate to the next block.

Memory holds one block in float32 (two for `propagate: both`), the statistics of one group of linears (or of as many as
fit a budget), and a few batches of activations, whatever the size of the model and of the calibration set. The base
model is never changed.

Shapes: S sequences, L tokens per sequence, D hidden size, T tokens, N out_features, K in_features.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from quantpipe.quantize.loop.block_solving import Block, Method, fake_quantize_input, solve_block
from quantpipe.quantize.loop.checkpoint import PartResult, WorkFolder, block_part
from quantpipe.quantize.loop.outside import outside_changes, solve_outside
from quantpipe.quantize.loop.records import LayerRecord, QuantizedModel
from quantpipe.quantize.model.block_kwargs import BlockKwargs
from quantpipe.quantize.model.block_runs import FULL, QUANTIZED, Positions, StoredBatches, capture_block_inputs
from quantpipe.quantize.model.loading import StreamedModel
from quantpipe.quantize.targets.discover import Targets
from quantpipe.quantize.transforms.transform import TransformInput, TransformRecord
from quantpipe.report import Progress

__all__ = ["LayerRecord", "Method", "QuantizedModel", "fake_quantize_input", "quantize_blocks"]

HEAD_PART, ADDED_PART = "head", "added"


@torch.no_grad()
def quantize_blocks(
    model: StreamedModel,
    targets: Targets,
    method: Method,
    token_ids_SL: npt.NDArray[np.int64] | None,
    work_folder: Path,
    fingerprint: str,
    progress: Progress,
    position_ids_SL: npt.NDArray[np.int64] | None = None,
) -> QuantizedModel:
    """Rewrite every block by the method's transforms and quantize every target.

    Finished blocks are kept in ``work_folder``; a run with the same ``fingerprint`` goes on after the last of them. The
    result is read from there when it is asked for: remove the folder (``discard_work``) when it is not needed any more.
    ``token_ids_SL`` is None where nothing reads data; ``position_ids_SL`` where every sequence is one document. Raises
    DataError where weights are not finite, or where no token reaches a linear.
    """
    work = WorkFolder.open(work_folder, fingerprint)
    changes = outside_changes(model)
    finished, num_blocks = work.num_finished_blocks(), len(model.blocks.blocks)
    kwargs = None
    if token_ids_SL is not None and method.runs_blocks and finished < num_blocks:
        streams = (QUANTIZED, FULL) if method.propagate == "both" else (QUANTIZED,)
        positions = None if position_ids_SL is None else Positions(position_ids_SL, work.kwargs())
        hidden = work.hidden(0) if finished == 0 else None
        kwargs = capture_block_inputs(model, token_ids_SL, hidden, streams, positions)
    loop = _Loop(model, targets, method, kwargs, work)
    for record in work.read([block_part(index) for index in range(finished)]).kv:
        if method.kv is not None:
            method.kv.restore(record)
    for index in progress(range(finished, num_blocks), num_blocks - finished, "blocks quantized"):
        work.finish_block(index, loop.quantize(index))
    head, changes = solve_outside(model, targets.outside(model.blocks.path), changes)
    work.write(HEAD_PART, head)
    work.write(ADDED_PART, PartResult(tensors=dict(changes.added)))
    result = work.read([*map(block_part, range(num_blocks)), HEAD_PART])
    return QuantizedModel(
        result.weights,
        result.layers,
        result.tensors,
        work.read([ADDED_PART]).tensors,
        changes.config_updates,
        result.transformed,
        result.kv,
    )


@dataclass(frozen=True)
class _Loop:
    """What all blocks share."""

    model: StreamedModel
    targets: Targets
    method: Method
    kwargs: BlockKwargs | None
    work: WorkFolder

    def quantize(self, index: int) -> PartResult:
        """Transform and solve block ``index``, and write the hidden states that enter the next one."""
        name, schemes = self.model.blocks.name(index), self.targets.inside(self.model.blocks.name(index))
        original = self.model.load_block(index)
        module = self.model.work_copy(original)
        linears = {leaf: linear for leaf, linear in module.named_modules() if leaf in schemes}
        dtypes = {leaf: original.get_parameter(f"{leaf}.weight").dtype for leaf in linears}
        batches = None if self.kwargs is None else StoredBatches(self.work.hidden(index), self.kwargs, index)
        block = Block(name, module, _all_linear(linears), schemes, dtypes, batches)
        result = PartResult()
        for transform in self.method.transforms:
            done = transform(TransformInput(module, original, block.linears, batches or [], schemes, name))
            result.transformed += [_with_full_names(record, name) for record in done]
        result.tensors |= _changed_tensors(original, block)
        is_last = index + 1 == len(self.model.blocks.blocks)
        solved = solve_block(
            block, self.method, index, None if is_last else self.work.hidden(index + 1), self.model.work_copy
        )
        for leaf, each in solved.items():
            result.weights[f"{name}.{leaf}"] = each.weight
            result.layers.append(replace(each.record, name=f"{name}.{leaf}"))
        if self.method.kv is not None and batches is not None:
            result.kv.append(self.method.kv.record_of(index))
        return result


def _all_linear(modules: Mapping[str, nn.Module]) -> dict[str, nn.Linear]:
    return {name: module for name, module in modules.items() if isinstance(module, nn.Linear)}


def _changed_tensors(original: nn.Module, block: Block) -> dict[str, Tensor]:
    """Parameters that transforms changed and that are not about to be quantized, by full name and as stored.

    The work copy takes on the stored values, so that what follows is computed with what is going to be read back.
    """
    changed: dict[str, Tensor] = {}
    for leaf, before in original.named_parameters():
        parameter = block.module.get_parameter(leaf)
        if leaf.removesuffix(".weight") in block.linears or torch.equal(parameter, before.float()):
            continue
        changed[f"{block.name}.{leaf}"] = parameter.to(before.dtype, copy=True)
        parameter.copy_(changed[f"{block.name}.{leaf}"])
    return changed


def _with_full_names(record: TransformRecord, block_name: str) -> TransformRecord:
    linears = tuple(f"{block_name}.{leaf}" for leaf in record.linears)
    producer = None if record.producer is None else f"{block_name}.{record.producer}"
    return replace(record, linears=linears, producer=producer)

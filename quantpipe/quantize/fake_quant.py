"""The quantized model simulated in transformers: what the artifact must reproduce, bit rounding apart.

Shapes: S sequences, L tokens per sequence, V vocabulary.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from quantpipe.formats.artifact_writer import EXPERT_PART
from quantpipe.quantize.loop.block_solving import fake_quantize_input
from quantpipe.quantize.loop.records import QuantizedModel
from quantpipe.quantize.model.loading import StreamedModel, put_parameter


@dataclass(frozen=True)
class Reader:
    """What a reader of artifacts does its own way.

    ``divisor``: 8-bit activations are rounded to absmax / divisor. ``rounds_experts``: the weights of a mixture's
    experts are rounded to the dtype of their scales when they are read.
    """

    divisor: float
    rounds_experts: bool


# vLLM's rule, and that of compressed-tensors inside transformers.
SERVED = Reader(divisor=127.0, rounds_experts=False)
TRANSFORMERS = Reader(divisor=127.5, rounds_experts=True)


@torch.no_grad()
def simulated_logits(
    model: StreamedModel,
    quantized: QuantizedModel | None,
    token_ids_SL: npt.NDArray[np.int64],
    reader: Reader = SERVED,
    nudge: float = 0.0,
) -> Tensor:
    """float32 logits [S, L, V] of ``model`` with each quantized weight replaced by what its integers stand for.

    The model is left as it was; None for ``quantized`` runs it as it is. Blocks are loaded one at a time. Where a
    scheme quantizes activations they are rounded per token, as ``reader`` does. ``nudge`` disturbs the embeddings by
    that relative amount.
    """
    quantized = quantized or QuantizedModel({}, ())

    def rewrite(index: int, block: nn.Module) -> None:
        _rewrite(block, f"{model.blocks.name(index)}.", quantized, reader)

    hooks = [
        model.module.get_submodule(name).register_forward_pre_hook(partial(fake_quantize_input, divisor=reader.divisor))
        for name, weight in quantized.weights.items()
        if not name.startswith(f"{model.blocks.path}.") and weight.scheme.activation_bits is not None
    ]
    if nudge:
        embedding = model.module.get_input_embeddings()  # type: ignore[operator]  # every transformers model has it
        hooks.append(embedding.register_forward_hook(partial(_nudge_output, amount=nudge)))
    try:
        with _outside_replaced(model, quantized), model.running(rewrite):
            logits_SLV: Tensor = model.module(input_ids=torch.from_numpy(token_ids_SL), use_cache=False).logits
    finally:
        for hook in hooks:
            hook.remove()
    return logits_SLV.float()


def _rewrite(block: nn.Module, prefix: str, quantized: QuantizedModel, reader: Reader) -> None:
    """Give a loaded block what the quantized model has in its place."""
    for leaf, parameter in block.named_parameters():
        name = f"{prefix}{leaf}"
        if name.removesuffix(".weight") in quantized.weights:
            weight = quantized.weights[name.removesuffix(".weight")]
            meant_NK = weight.dequantized()
            is_rounded = reader.rounds_experts and EXPERT_PART in name
            parameter.copy_(meant_NK.to(weight.scale_NG.dtype) if is_rounded else meant_NK)
            if weight.scheme.activation_bits is not None:
                linear = block.get_submodule(leaf.removesuffix(".weight"))
                linear.register_forward_pre_hook(partial(fake_quantize_input, divisor=reader.divisor))
        elif name in quantized.tensors:
            parameter.copy_(quantized.tensors[name])


@contextmanager
def _outside_replaced(model: StreamedModel, quantized: QuantizedModel) -> Iterator[None]:
    """Within it, the parameters outside the blocks are those of the quantized model."""
    before = {name: model.module.get_parameter(name) for name in model.outside()}
    changed = {name: quantized.tensors[name] for name in before if name in quantized.tensors}
    # What is tied to a changed parameter changes with it, unless it is one of its own from now on.
    tied = {name: changed[other] for name in before for other in changed if before[name] is before[other]}
    for name, tensor in {**tied, **changed, **quantized.added}.items():
        put_parameter(model.module, name, tensor.float())
    for name in before:
        if name.removesuffix(".weight") in quantized.weights:
            put_parameter(model.module, name, quantized.weights[name.removesuffix(".weight")].dequantized())
    try:
        yield
    finally:
        for name, parameter in before.items():
            path, _, leaf = name.rpartition(".")
            model.module.get_submodule(path).register_parameter(leaf, parameter)


def _nudge_output(_module: nn.Module, _args: tuple[Tensor, ...], output: Tensor, amount: float) -> Tensor:
    noise = torch.randn(output.shape, generator=torch.Generator().manual_seed(0))
    return output * (1 + amount * noise)

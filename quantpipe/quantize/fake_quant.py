"""The quantized model simulated in transformers: what the artifact must reproduce, bit rounding apart."""

from collections.abc import Mapping
from functools import partial

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from quantpipe.formats.artifact_writer import QuantWeight
from quantpipe.formats.layout import decode
from quantpipe.quantize.sequential import QuantizedModel, fake_quantize_input


@torch.no_grad()
def fake_quantize(model: nn.Module, quantized: QuantizedModel) -> None:
    """Turn ``model`` into float32, replace each quantized weight by q * scale and each changed tensor, in place."""
    model.float()
    for name, tensor in quantized.tensors.items():
        model.get_parameter(name).copy_(tensor)
    for name, weight in quantized.weights.items():
        linear = model.get_submodule(name)
        assert isinstance(linear, nn.Linear)
        linear.weight.copy_(decode(weight.q_NK, weight.scale_NG))


@torch.no_grad()
def fake_quantized_logits(
    model: nn.Module,
    weights: Mapping[str, QuantWeight],
    token_ids_SL: npt.NDArray[np.int64],
    divisor: float,
    nudge: float = 0.0,
) -> Tensor:
    """float32 logits [S, L, V] of a model treated by ``fake_quantize``.

    Where a scheme quantizes activations they are rounded per token with ``divisor``: 127 as our runtime serves,
    127.5 as transformers simulates. ``nudge`` disturbs the embeddings by that relative amount.
    """
    hooks = [
        model.get_submodule(name).register_forward_pre_hook(partial(fake_quantize_input, divisor=divisor))
        for name, weight in weights.items()
        if weight.scheme.activation_bits is not None
    ]
    if nudge:
        embedding = model.get_input_embeddings()  # type: ignore[operator]  # every transformers model has it
        hooks.append(embedding.register_forward_hook(partial(_nudge_output, amount=nudge)))
    logits_SLV: Tensor = model(input_ids=torch.from_numpy(token_ids_SL), use_cache=False).logits
    for hook in hooks:
        hook.remove()
    return logits_SLV.float()


def _nudge_output(_module: nn.Module, _args: tuple[Tensor, ...], output: Tensor, amount: float) -> Tensor:
    noise = torch.randn(output.shape, generator=torch.Generator().manual_seed(0))
    return output * (1 + amount * noise)

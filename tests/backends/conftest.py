"""Tiny random model folders, ordinary and quantized, and steps over hand-chosen blocks."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from quantpipe.backends.protocol import BatchInput
from quantpipe.formats.artifact import Artifact
from quantpipe.formats.artifact_writer import QuantWeight, quantization_config, write_artifact
from quantpipe.formats.layout import absmax_scale, encode, minmax_scale
from quantpipe.formats.scheme import WeightScheme
from quantpipe.models import describe

TINY: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.1,
    "sliding_window": None,
    "pad_token_id": 0,
}
# (token_ids, number of tokens already in the cache, blocks)
Part = tuple[Sequence[int], int, Sequence[int]]


@pytest.fixture(scope="session")
def make_folder(tmp_path_factory: pytest.TempPathFactory, add_kv_scales: Callable[[Path], Path]) -> Callable[..., Path]:
    """Saves a random model with static KV scales, quantized to nearest (but lm_head) with ``scheme``.

    Equal calls share a folder.
    """
    made: dict[str, Path] = {}

    def make(
        scheme: WeightScheme | Mapping[str, WeightScheme] | None = None,
        scale_dtype: torch.dtype = torch.bfloat16,
        decoded: bool = False,
        **settings: Any,
    ) -> Path:
        key = repr((scheme, scale_dtype, decoded, settings))
        if key not in made:
            folder = tmp_path_factory.mktemp("model") / "base"
            save_random(folder, **settings)
            if scheme is not None:
                schemes = {"": scheme} if isinstance(scheme, WeightScheme) else scheme
                folder = quantize(folder, schemes, scale_dtype, decoded)
            made[key] = add_kv_scales(folder)
        return made[key]

    return make


def save_random(folder: Path, model_type: str = "llama", nan_token: int | None = None, **settings: Any) -> None:
    """Weights, norms and biases are all random, so that none can be left out unseen. ``nan_token`` breaks one token."""
    generator = torch.Generator().manual_seed(1)
    config = AutoConfig.for_model(model_type, **{**TINY, **settings})
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            offset = 1.0 if parameter.ndim == 1 else 0.0
            parameter.copy_(offset + 0.1 * torch.randn(parameter.shape, generator=generator))
        if nan_token is not None:
            model.model.embed_tokens.weight[nan_token] = torch.nan
    model.save_pretrained(folder)


def quantize(
    folder: Path, schemes: Mapping[str, WeightScheme], scale_dtype: torch.dtype, decoded: bool = False
) -> Path:
    """Rounds to nearest in the scheme given for the end of a linear's name, else in that of "", which spares lm_head.

    ``decoded`` stores what the integers mean instead of them.
    """
    base = Artifact.open(folder)
    weights = {}
    for spec in describe(base).linears():
        scheme = schemes.get(spec.name.split(".")[-1], schemes[""])
        if spec.name == "lm_head" and "lm_head" not in schemes:
            continue
        weight_NK = base.tensor(f"{spec.name}.weight")
        zero_NG = None
        if scheme.symmetric:
            scale_NG = absmax_scale(weight_NK, scheme, scale_dtype)
        else:
            scale_NG, zero_NG = minmax_scale(weight_NK, scheme, scale_dtype)
        weights[spec.name] = QuantWeight(encode(weight_NK, scale_NG, scheme, zero_NG), scale_NG, scheme, zero_NG)
    target = folder.parent / "quantized"
    if decoded:
        tensors = {f"{name}.weight": weight.dequantized() for name, weight in weights.items()}
        write_artifact(target, base, {}, None, {}, tensors=tensors)
        return target
    ignored = [] if "lm_head" in schemes else ["lm_head"]
    config = quantization_config({name: weight.scheme for name, weight in weights.items()}, ignored)
    write_artifact(target, base, weights, config, {})
    return target


@pytest.fixture(scope="session")
def make_batch() -> Callable[..., BatchInput]:
    """A step of several sequences; logits of every row unless ``rows`` names some.

    ``dropped`` says for each of them how many blocks it lost behind its sink blocks.
    """

    def make(
        parts: Sequence[Part],
        block_size: int,
        rows: Sequence[int] | None = None,
        num_sinks: int = 0,
        window: int | None = None,
        dropped: Sequence[int] = (),
    ) -> BatchInput:
        positions = [range(start, start + len(token_ids)) for token_ids, start, _ in parts]
        num_sink_blocks = -(-num_sinks // block_size)

        def slot(position: int, blocks: Sequence[int], num_dropped: int) -> int:
            index = position // block_size
            return blocks[index - num_dropped * (index >= num_sink_blocks)] * block_size + position % block_size

        slots = [
            [slot(p, blocks, num_dropped) for p in ps]
            for ps, (_, _, blocks), num_dropped in zip(positions, parts, dropped or [0] * len(parts), strict=True)
        ]
        widest = max(len(blocks) for _, _, blocks in parts)
        num_tokens = sum(len(token_ids) for token_ids, _, _ in parts)
        return BatchInput(
            token_ids_T=torch.tensor(list(itertools.chain(*(token_ids for token_ids, _, _ in parts)))),
            positions_T=torch.tensor(list(itertools.chain(*positions))),
            slot_mapping_T=torch.tensor(list(itertools.chain(*slots))),
            query_lens=tuple(len(token_ids) for token_ids, _, _ in parts),
            context_lens=tuple(start + len(token_ids) for token_ids, start, _ in parts),
            block_table_SB=torch.tensor([[*blocks, *[0] * (widest - len(blocks))] for _, _, blocks in parts]),
            logit_rows_R=torch.tensor(range(num_tokens) if rows is None else rows, dtype=torch.int64),
            num_sinks=num_sinks,
            window=window,
            dropped_blocks=tuple(dropped),
        )

    return make

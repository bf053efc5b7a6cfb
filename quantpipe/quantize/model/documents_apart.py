"""Whether a model keeps documents of one sequence apart when positions start anew at each: found out, not assumed.

transformers masks attention across documents where a model hands its positions on to the mask, but some do not, and
layers that carry a state from token to token need more than a mask.

Shapes: S sequences, L tokens, D hidden size.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quantpipe.errors import RecipeError
from quantpipe.quantize.model.block_kwargs import Kwargs, interned, map_leaves
from quantpipe.quantize.model.block_runs import Batch, Entrance, run_block
from quantpipe.quantize.model.loading import StreamedModel

# Some norms and ropes compute in float32 whatever they are given. What leaks from another document is far larger.
TOLERANCE = 1e-4
NUM_TOKENS = (7, 9)


@torch.no_grad()
def check_documents_apart(model: StreamedModel) -> None:
    """Raise RecipeError where a document computes something else beside another one than alone.

    Two short documents are run together and each alone, in float64, through one block of every kind.
    """
    entrance, documents = Entrance(model), _documents(model)
    together_SL = np.concatenate(documents, axis=1)
    positions_SL = np.concatenate([_positions(ids_SL) for ids_SL in documents], axis=1)
    kept: list[Tensor] = []
    try:
        whole_SLD, whole_kwargs = entrance.run(together_SL, positions_SL)
    except TypeError as error:  # an unknown argument, seen where the model is called
        raise _refusal(model, "takes no position ids") from error
    alone = [entrance.run(ids_SL, _positions(ids_SL)) for ids_SL in documents]
    if not _agree(whole_SLD, [entered_SLD for entered_SLD, _ in alone], None):
        raise _refusal(model, "gives tokens other embeddings behind another document")
    shared = [map_leaves(each, partial(interned, kept=kept)) for each in whole_kwargs]
    for index in one_of_each_kind(model, shared):
        block = model.load_block(index).double()
        whole = Batch(whole_SLD, shared[index]).first_sequence(torch.float64)
        parts = [Batch(x_SLD, kwargs[index]).first_sequence(torch.float64) for x_SLD, kwargs in alone]
        outputs = [run_block(block, part) for part in parts]
        if not _agree(run_block(block, whole), outputs, whole.hidden_SLD):
            raise _refusal(model, f"lets one document of a sequence reach the next (in {model.blocks.name(index)})")


def _documents(model: StreamedModel) -> list[npt.NDArray[np.int64]]:
    embedding: Any = model.module.get_input_embeddings()  # type: ignore[operator]  # all transformers models
    generator = np.random.default_rng(0)
    return [generator.integers(0, len(embedding.weight), (1, length)) for length in NUM_TOKENS]


def _positions(token_ids_SL: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    return np.arange(token_ids_SL.shape[1], dtype=np.int64)[None]


def _agree(whole_SLD: Tensor, parts: list[Tensor], entered_SLD: Tensor | None) -> bool:
    """Whether every token comes out as it does alone, relative to what was added to the stream that entered."""
    expected_SLD = torch.cat(parts, dim=1)
    error_L = (whole_SLD - expected_SLD)[0].norm(dim=-1)
    added_SLD = expected_SLD if entered_SLD is None else expected_SLD - entered_SLD
    return bool((error_L <= TOLERANCE * added_SLD[0].norm(dim=-1)).all())


def one_of_each_kind(model: StreamedModel, kwargs: list[Kwargs]) -> Iterator[int]:
    """The first block of those that are built alike and called with the same."""
    seen: set[tuple[Any, ...]] = set()
    for index, block in enumerate(model.blocks.blocks):
        built = tuple((name, type(module)) for name, module in block.named_modules())
        called = repr(map_leaves(kwargs[index], lambda leaf: id(leaf) if isinstance(leaf, Tensor) else type(leaf)))
        if (built, called) not in seen:
            seen.add((built, called))
            yield index


def _refusal(model: StreamedModel, reason: str) -> RecipeError:
    return RecipeError(
        f"calibration: packing 'separate': {type(model.module).__name__} {reason}; use packing 'concatenate' or "
        "'truncate'"
    )

"""The base model as a transformers module whose decoder blocks come from disk one at a time. Never reads from a hub.

Memory holds what lies outside the blocks (embeddings, final norm, head) in float32 and one block, whatever the number
of blocks. Which dtype a tensor is stored in is read from the headers of the weight files.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from quantpipe.errors import ArtifactError, DataError, QuantpipeError
from quantpipe.formats.artifact import Artifact
from quantpipe.formats.artifact_writer import dtype_name
from quantpipe.quantize.model.architecture import causal_config, check_causal, load_refusal
from quantpipe.quantize.model.gpt2 import as_opt
from quantpipe.quantize.model.structure import StoredNames, stored_names, unroll
from quantpipe.quantize.targets.discover import DecoderBlocks, find_blocks

Rewrite = Callable[[int, nn.Module], None]

_DTYPES = {dtype_name(dtype): dtype for dtype in (torch.float32, torch.float16, torch.bfloat16)}


@dataclass(frozen=True)
class StreamedModel:
    """A model whose blocks are read when they are asked for.

    ``module`` is the transformers model: real float32 parameters outside the blocks, buffers real everywhere, the
    parameters of the blocks on the meta device in the dtypes they are stored in. ``blocks`` are its decoder blocks.
    ``artifact`` holds the tensors under the names that they have in ``module``. ``base`` is what an artifact of this
    model is written from; ``names`` tells under which names it stores them.
    """

    module: nn.Module
    blocks: DecoderBlocks
    artifact: Artifact
    base: Artifact
    names: StoredNames

    @classmethod
    def open(cls, folder: Path, trust_remote_code: bool = False, attention: str = "sdpa") -> "StreamedModel":
        """Build the model of ``folder`` and read what lies outside its blocks; ``attention`` is transformers' name.

        Raises ArtifactError where the folder holds no decoder-only language model that transformers knows, lacks a
        parameter, or stores it in another shape; DataError where a weight outside the blocks is NaN or infinite;
        RecipeError where the model has no decoder blocks.
        """
        base = as_opt(Artifact.open(folder))
        module = _skeleton(base, trust_remote_code, attention)
        unroll(module)
        blocks = find_blocks(module)
        names = stored_names(module, base)
        model = cls(module, blocks, names.seen_through(base), base, names)
        for index, block in enumerate(blocks.blocks):
            for name, parameter in list(block.named_parameters()):
                full_name = f"{blocks.name(index)}.{name}"
                dtype = model.stored_dtype(full_name, parameter.shape)
                put_parameter(block, name, torch.empty(parameter.shape, dtype=dtype, device="meta"))
        model._load_outside()
        return model

    def load_block(self, index: int) -> nn.Module:
        """A copy of block ``index`` with its weights as they are stored. DataError names a NaN or infinite one."""
        meta = self.blocks.blocks[index]
        block = self._copy(meta)
        parameters = dict(meta.named_parameters())
        for name in meta.state_dict():
            full_name = f"{self.blocks.name(index)}.{name}"
            if name in parameters:
                put_parameter(block, name, self.stored(full_name))
            elif full_name in self.artifact.stored:
                block.get_buffer(name).copy_(self.stored(full_name))
        return block

    def work_copy(self, block: nn.Module) -> nn.Module:
        """A copy of a block, or of a copy of one, in float32."""
        return self._copy(block).float()

    @contextmanager
    def running(self, rewrite: Rewrite | None = None) -> Iterator[nn.Module]:
        """A context in which ``module`` runs whole, in float32: each block is loaded when called and freed after.

        ``rewrite(index, block)`` may change the loaded block in place before it runs.
        """

        def run(index: int, *args: Any, **kwargs: Any) -> Any:
            block = self.load_block(index).float()
            if rewrite is not None:
                rewrite(index, block)
            return block(*args, **kwargs)

        with self.replaced([partial(run, index) for index in range(len(self.blocks.blocks))]):
            yield self.module

    @contextmanager
    def replaced(self, forwards: Sequence[Callable[..., Any]]) -> Iterator[None]:
        """A context in which each block, when it is called, runs the function of its place in ``forwards`` instead."""
        for block, forward in zip(self.blocks.blocks, forwards, strict=True):
            block.forward = forward
        try:
            yield
        finally:
            for block in self.blocks.blocks:
                del block.forward

    @property
    def max_positions(self) -> int | None:
        """How many tokens of a sequence the model has positions for; None where it is made for any number."""
        config: Any = self.module.config
        text = config.get_text_config()
        limit: int | None = getattr(text, "max_position_embeddings", None)
        return None if getattr(text, "alibi", False) else limit

    def outside(self) -> list[str]:
        """Names of the parameters outside the blocks, tied ones under each of their names."""
        prefix = f"{self.blocks.path}."
        every = self.module.named_parameters(remove_duplicate=False)
        return [name for name, _ in every if not name.startswith(prefix)]

    def stored(self, name: str) -> Tensor:
        """A parameter as it is stored. Raises DataError where it is NaN or infinite."""
        tensor = self.artifact.tensor(name)
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise DataError(
                f"{self.artifact.folder}: weight {name} holds NaN or infinite values; fix or re-download the base model"
            )
        return tensor

    def dtype_of(self, name: str) -> torch.dtype:
        """The dtype that a parameter is stored in, or the one it was tied to."""
        tied: dict[str, str] = dict(self.module.all_tied_weights_keys)  # type: ignore[arg-type]  # target -> source
        others = [name, tied.get(name, name), *(target for target, source in tied.items() if source == name)]
        stored = next((other for other in others if other in self.artifact.stored), name)
        return self.stored_dtype(stored, self.module.get_parameter(stored).shape)

    def check_finite(self) -> None:
        """Read every weight once. DataError names the first that is NaN or infinite, before anything takes long."""
        for name in sorted(self.artifact.stored):
            self.stored(name)

    def stored_dtype(self, name: str, shape: torch.Size) -> torch.dtype:
        """The dtype a parameter is stored in. ArtifactError where it is missing, of another shape, or quantized."""
        folder = self.artifact.folder
        if name not in self.artifact.stored:
            raise ArtifactError(f"{folder}: tensor {name} is missing; the folder is incomplete, fetch it again")
        spec = self.artifact.stored[name].spec
        if spec.shape != tuple(shape):
            raise ArtifactError(
                f"{folder}: tensor {name} has shape {list(spec.shape)}, config.json makes it {list(shape)}"
            )
        if spec.dtype not in _DTYPES:
            raise ArtifactError(
                f"{folder}: tensor {name} is stored as {spec.dtype}; give a model in {', '.join(_DTYPES)}"
            )
        return _DTYPES[spec.dtype]

    def _copy(self, block: nn.Module) -> nn.Module:
        # What a block shares with the model is not copied: the configuration, and a replaced forward (see `replaced`).
        shared = (self.module.config, vars(block).get("forward"))
        copied: nn.Module = copy.deepcopy(block, {id(each): each for each in shared})
        vars(copied).pop("forward", None)
        return copied

    def _load_outside(self) -> None:
        """Read everything outside the blocks in float32, and tie what the configuration ties."""
        tied: dict[str, str] = dict(self.module.all_tied_weights_keys)  # type: ignore[arg-type]  # target -> source
        for name in self.outside():
            parameter = self.module.get_parameter(name)
            if name in self.artifact.stored or name not in tied | {source: "" for source in tied.values()}:
                self.stored_dtype(name, parameter.shape)
                put_parameter(self.module, name, self.stored(name).float())
        for name, buffer in self.module.named_buffers():
            if name in self.artifact.stored and not name.startswith(f"{self.blocks.path}."):
                buffer.copy_(self.stored(name))
        for target, source in tied.items():
            self._tie(target, source)

    def _tie(self, target: str, source: str) -> None:
        """Make two names one parameter, unless both are stored and differ (as transformers does)."""
        names = [name for name in (source, target) if name in self.artifact.stored]
        if not names:
            self.stored_dtype(source, self.module.get_parameter(source).shape)
        parameters = [self.module.get_parameter(name) for name in names]
        if all(torch.equal(parameters[0], parameter) for parameter in parameters[1:]):
            for name in (source, target):
                path, _, leaf = name.rpartition(".")
                setattr(self.module.get_submodule(path), leaf, parameters[0])


def check_supported(folder: Path, trust_remote_code: bool = False) -> None:
    """Raise ArtifactError or RecipeError where ``folder`` holds a kind of model that is not quantized."""
    find_blocks(_skeleton(as_opt(Artifact.open(folder)), trust_remote_code, attention="sdpa"))


def _skeleton(base: Artifact, trust_remote_code: bool, attention: str) -> nn.Module:
    """The model of ``base`` with parameters on the meta device; buffers are computed, in float32."""
    from accelerate import init_empty_weights
    from transformers import AutoModelForCausalLM

    try:
        config = causal_config(base, trust_remote_code, attention)
        with init_empty_weights(include_buffers=False):
            module: nn.Module = AutoModelForCausalLM.from_config(
                config, dtype=torch.float32, attn_implementation=attention, trust_remote_code=trust_remote_code
            )
    except QuantpipeError:
        raise
    except Exception as error:  # nearly any: code of each family computes with whatever config.json says
        what = f"{base.folder}/config.json: transformers cannot load this model"
        raise ArtifactError(f"{what}: {load_refusal(error)}") from error
    check_causal(module, base)
    return module.eval().requires_grad_(False)


def put_parameter(module: nn.Module, name: str, tensor: Tensor) -> None:
    """Replace a parameter by a new one that holds ``tensor``."""
    path, _, leaf = name.rpartition(".")
    module.get_submodule(path).register_parameter(leaf, nn.Parameter(tensor, requires_grad=False))

"""Models of random weights, drawn on the device where they are to run: only their shapes mean something."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quantpipe.backends.triton.executor import TritonExecutor
from quantpipe.backends.triton.loading import load_weights
from quantpipe.backends.triton.weight_bytes import WeightBytes, weight_bytes
from quantpipe.formats.artifact import Artifact, StoredTensor
from quantpipe.formats.scheme import TensorSpec, WeightScheme
from quantpipe.formats.weight_file import FileStamp, TensorPlace
from quantpipe.models import describe
from quantpipe.models.description import DecoderDescription

Config = dict[str, Any]
EIGHT_BILLION: Config = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128_256,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500_000.0,
    "tie_word_embeddings": False,
}
# As wide, and quickly made.
SMALL: Config = EIGHT_BILLION | {"num_hidden_layers": 2, "vocab_size": 32_000}
# About the spread of trained weights; hidden states stay within what float16 holds.
WEIGHT_STD = 0.02
CPU = torch.device("cpu")
_NOWHERE = Path("random weights")
_NO_STAMP = FileStamp(0, 0, 0)
_SCALE_DTYPE = "BF16"


@dataclass(frozen=True)
class RandomArtifact(Artifact):
    """A folder that is nowhere: its tensors are drawn when they are read."""

    device: torch.device = CPU
    shapes: Mapping[str, TensorSpec] = field(default_factory=dict)

    def tensor(self, name: str) -> Tensor:
        """Norms of ones, integers over their whole range, everything else with ``WEIGHT_STD``."""
        spec = self.shapes[name]
        suffix = name.rsplit(".", 1)[1]
        scheme = self.schemes.get(name.rsplit(".", 1)[0])
        if suffix == "weight_packed":
            words = torch.randint(-(1 << 31), 1 << 31, spec.shape, device=self.device)
            return words.to(torch.int32)
        if suffix == "weight_scale":
            assert scheme is not None
            # Integers that are drawn evenly have a spread of range / sqrt(12).
            spread = (1 << scheme.bits) / 12**0.5
            return torch.full(spec.shape, WEIGHT_STD / spread, dtype=torch.bfloat16, device=self.device)
        if spec.dtype == "I8":
            return torch.randint(-127, 128, spec.shape, dtype=torch.int8, device=self.device)
        if len(spec.shape) == 1:
            return torch.ones(spec.shape, dtype=torch.bfloat16, device=self.device)
        return torch.randn(spec.shape, dtype=torch.bfloat16, device=self.device).mul_(WEIGHT_STD)


def random_artifact(config: Config, scheme: WeightScheme | None, device: torch.device) -> RandomArtifact:
    """Of a symmetric ``scheme`` in all linears but lm_head; None is bfloat16."""
    plain = describe(Artifact(_NOWHERE, config, None, {}))
    names = [linear.name for linear in plain.linears() if linear.name != plain.lm_head.name]
    schemes = {} if scheme is None else dict.fromkeys(names, scheme)
    shapes = _shapes(plain, schemes)
    stored = {
        name: StoredTensor(name, TensorPlace(_NOWHERE, _NO_STAMP, spec, 0, 0), spec) for name, spec in shapes.items()
    }
    return RandomArtifact(_NOWHERE, config, None, stored, schemes, device, shapes)


def random_model(
    config: Config, scheme: WeightScheme | None, device: torch.device, dtype: torch.dtype = torch.bfloat16
) -> TritonExecutor:
    """Loaded as a folder would be."""
    artifact = random_artifact(config, scheme, device)
    return load_weights(artifact, describe(artifact), device, dtype, activation_divisor=127.0)


def needed_bytes(config: Config, scheme: WeightScheme | None, dtype: torch.dtype = torch.bfloat16) -> WeightBytes:
    """What such a model's weights take."""
    artifact = random_artifact(config, scheme, CPU)
    return weight_bytes(describe(artifact), artifact, dtype)


def _shapes(description: DecoderDescription, schemes: Mapping[str, WeightScheme]) -> dict[str, TensorSpec]:
    shapes = {description.embedding_name: TensorSpec("BF16", (description.vocab_size, description.hidden_size))}
    shapes |= {f"{norm.name}.weight": TensorSpec("BF16", (norm.size,)) for norm in description.norms()}
    for linear in description.linears():
        size = (linear.out_features, linear.in_features)
        scheme = schemes.get(linear.name)
        stored = {"weight": TensorSpec("BF16", size)} if scheme is None else scheme.tensors(*size, _SCALE_DTYPE)
        shapes |= {f"{linear.name}.{suffix}": spec for suffix, spec in stored.items()}
    return shapes

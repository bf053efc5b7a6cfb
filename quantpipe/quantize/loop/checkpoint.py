"""What a run has finished, on disk block by block: it goes on where it was killed, and ends with the same bytes.

A work folder holds ``<fingerprint>/block-00000.safetensors`` (integers, scales, changed tensors) and ``.json``
(records) for each finished block, and ``hidden-00001/``, the hidden states that enter the next one. The ``.json`` is
renamed into place last: a block counts as finished when it is there. Results are read back when they are asked for, so
that memory does not grow with the number of blocks. Never pickles.
"""

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from quantpipe.disk import GO_ON, writing
from quantpipe.formats.artifact_writer import QuantWeight
from quantpipe.formats.scheme import WeightScheme
from quantpipe.quantize.kv_int8 import KVLayerRecord
from quantpipe.quantize.loop.records import LayerRecord
from quantpipe.quantize.model.block_runs import HiddenStates
from quantpipe.quantize.transforms.transform import TransformRecord

# Marks a folder as a run's own, to be removed when it is stale.
MARKER_NAME = "quantpipe-work.json"


@dataclass
class PartResult:
    """What one block came to, or what lies outside the blocks: by full names of modules and tensors."""

    weights: dict[str, QuantWeight] = field(default_factory=dict)
    tensors: dict[str, Tensor] = field(default_factory=dict)
    layers: list[LayerRecord] = field(default_factory=list)
    transformed: list[TransformRecord] = field(default_factory=list)
    kv: list[KVLayerRecord] = field(default_factory=list)


@dataclass(frozen=True)
class WorkFolder:
    """The folder of one run, named by the fingerprint of everything its results depend on."""

    folder: Path

    @classmethod
    def open(cls, root: Path, fingerprint: str) -> "WorkFolder":
        """The folder of this run, made if it is not there; those of other runs under ``root`` are removed."""
        folder = root / fingerprint
        discard_work(root, keep=folder)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / MARKER_NAME).write_text("{}\n", encoding="utf-8")
        return cls(folder)

    def num_finished_blocks(self) -> int:
        """How many blocks are done, from the first on. What a killed run left of later ones is removed."""
        finished = 0
        while self._record_path(block_part(finished)).exists():
            finished += 1
        for path in self.folder.glob("hidden-*"):
            if path.name != self._hidden_name(finished):
                shutil.rmtree(path)
        return finished

    def hidden(self, index: int) -> HiddenStates:
        """The hidden states that enter block ``index``."""
        folder = self.folder / self._hidden_name(index)
        folder.mkdir(exist_ok=True)
        return HiddenStates(folder)

    def kwargs(self) -> Path:
        """A folder for what blocks are called with in each batch; written anew by every run."""
        folder = self.folder / "kwargs"
        folder.mkdir(exist_ok=True)
        return folder

    def finish_block(self, index: int, result: PartResult) -> None:
        """Store the result of a block, after which the hidden states that entered it are not needed any more."""
        self.write(block_part(index), result)
        shutil.rmtree(self.folder / self._hidden_name(index), ignore_errors=True)

    def write(self, part: str, result: PartResult) -> None:
        """Store a result, whole or not at all."""
        tensors = {f"tensor:{name}": tensor.contiguous() for name, tensor in result.tensors.items()}
        for name, weight in result.weights.items():
            tensors |= {f"{key}:{name}": tensor.contiguous() for key, tensor in _parts_of(weight).items()}
        partial = self.folder / f"{part}.partial"
        with writing(self._tensors_path(part), GO_ON):
            save_file(tensors, partial)
            partial.replace(self._tensors_path(part))
        record = {
            "weights": {name: asdict(weight.scheme) for name, weight in result.weights.items()},
            "tensors": list(result.tensors),
            "layers": [asdict(layer) for layer in result.layers],
            "transformed": [asdict(each) for each in result.transformed],
            "kv": [asdict(each) for each in result.kv],
        }
        with writing(self._record_path(part), GO_ON):
            partial.write_text(json.dumps(record), encoding="utf-8")
            partial.replace(self._record_path(part))

    def read(self, parts: Sequence[str]) -> "StoredResult":
        """The results of several parts together; tensors are read when they are asked for."""
        records = {part: json.loads(self._record_path(part).read_text(encoding="utf-8")) for part in parts}
        weights = {
            name: (self._tensors_path(part), WeightScheme(**scheme))
            for part, record in records.items()
            for name, scheme in record["weights"].items()
        }
        tensors = {name: self._tensors_path(part) for part, record in records.items() for name in record["tensors"]}
        return StoredResult(
            StoredWeights(weights),
            StoredTensors(tensors),
            tuple(LayerRecord(**each) for record in records.values() for each in record["layers"]),
            tuple(_transform_record(each) for record in records.values() for each in record["transformed"]),
            tuple(_kv_record(each) for record in records.values() for each in record["kv"]),
        )

    def _tensors_path(self, part: str) -> Path:
        return self.folder / f"{part}.safetensors"

    def _record_path(self, part: str) -> Path:
        return self.folder / f"{part}.json"

    def _hidden_name(self, index: int) -> str:
        return f"hidden-{index:05d}"


def block_part(index: int) -> str:
    """The name of a block's part of the results."""
    return f"block-{index:05d}"


def discard_work(root: Path, keep: Path | None = None) -> None:
    """Remove what runs left under ``root``, ``keep`` apart. For the caller, once the artifact is written."""
    for marker in sorted(root.glob(f"*/{MARKER_NAME}")):
        if marker.parent != keep:
            shutil.rmtree(marker.parent)
    if keep is None and root.is_dir() and not any(root.iterdir()):
        root.rmdir()


@dataclass(frozen=True)
class StoredWeights(Mapping[str, QuantWeight]):
    """Quantized weights by full name, each read from its file when it is asked for."""

    entries: Mapping[str, tuple[Path, WeightScheme]]

    def __getitem__(self, name: str) -> QuantWeight:
        path, scheme = self.entries[name]
        with safe_open(path, framework="pt") as file:
            known = set(file.keys())
            zero_NG = file.get_tensor(f"zero:{name}") if f"zero:{name}" in known else None
            return QuantWeight(file.get_tensor(f"q:{name}"), file.get_tensor(f"scale:{name}"), scheme, zero_NG)

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)


@dataclass(frozen=True)
class StoredTensors(Mapping[str, Tensor]):
    """Changed tensors by full name, each read from its file when it is asked for."""

    entries: Mapping[str, Path]

    def __getitem__(self, name: str) -> Tensor:
        with safe_open(self.entries[name], framework="pt") as file:
            tensor: Tensor = file.get_tensor(f"tensor:{name}")
            return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)


@dataclass(frozen=True)
class StoredResult:
    """The results of many parts, in their order."""

    weights: StoredWeights
    tensors: StoredTensors
    layers: tuple[LayerRecord, ...]
    transformed: tuple[TransformRecord, ...]
    kv: tuple[KVLayerRecord, ...]


def _parts_of(weight: QuantWeight) -> dict[str, Tensor]:
    parts = {"q": weight.q_NK, "scale": weight.scale_NG}
    return parts if weight.zero_NG is None else parts | {"zero": weight.zero_NG}


def _transform_record(stored: dict[str, Any]) -> TransformRecord:
    return TransformRecord(**stored | {"linears": tuple(stored["linears"])})


def _kv_record(stored: dict[str, Any]) -> KVLayerRecord:
    absmax = {key: tuple(stored[key]) for key in ("key_absmax", "value_absmax")}
    return KVLayerRecord(**stored | absmax)

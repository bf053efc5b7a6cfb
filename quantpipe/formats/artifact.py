"""A model folder, opened for reading: which tensors it holds, how each linear is quantized, and whether it is intact.

Reads ordinary Hugging Face folders and compressed-tensors ones alike. Opening checks structure (names, dtypes,
shapes) because other readers load a folder with missing tensors silently; ``verify`` checks every digest as well.
torch is imported once a tensor is read, so that what headers say is known without it.
"""

import hashlib
import json
import re
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quantpipe.errors import ArtifactError, RecipeError
from quantpipe.formats.config_kinds import check_kinds, check_num_layers, shown
from quantpipe.formats.digests import (
    MANIFEST_NAME,
    Hashing,
    artifact_digest,
    read_json,
    weight_files,
)
from quantpipe.formats.dtypes import DTYPE_BYTES, torch_dtype
from quantpipe.formats.scheme import TensorSpec, WeightScheme, scheme_from_config_group
from quantpipe.formats.weight_file import TensorPlace, read_header

if TYPE_CHECKING:
    import torch

# A module is quantized where any of these is stored: a partly deleted module must not pass for an ordinary one.
_QUANTIZED_SUFFIXES = ("weight_packed", "weight_scale", "weight_shape", "weight_zero_point")


@dataclass(frozen=True)
class StoredTensor:
    """Where a tensor lies, under which ``name``, and what its file's header says of it.

    A folder may be read under other names and as another layout than its files hold: then ``view`` makes what is read
    of it, and ``spec`` is what that gives.
    """

    name: str
    place: TensorPlace
    spec: TensorSpec
    view: "Callable[[torch.Tensor], torch.Tensor] | None" = None

    @property
    def file(self) -> Path:
        return self.place.file


@dataclass(frozen=True)
class Artifact:
    """An opened model folder. ``schemes`` maps the names of quantized modules to how they are stored."""

    folder: Path
    config: dict[str, Any]
    manifest: dict[str, Any] | None
    stored: Mapping[str, StoredTensor]
    schemes: Mapping[str, WeightScheme] = field(default_factory=dict)

    @classmethod
    def open(cls, folder: Path) -> "Artifact":
        """Open ``folder`` and check that every tensor it promises is there with the right dtype and shape.

        Raises ArtifactError that names the first tensor at fault.
        """
        artifact = cls._read(folder)
        for problem in artifact.structural_problems():
            raise ArtifactError(f"{folder}: {problem}")
        return artifact

    @classmethod
    def _read(cls, folder: Path) -> "Artifact":
        if not folder.is_dir():
            raise ArtifactError(f"{folder}: no such folder; give the folder that holds config.json")
        config_path = folder / "config.json"
        config = read_json(config_path)
        check_kinds(config_path, config)
        manifest_path = folder / MANIFEST_NAME
        manifest = read_json(manifest_path) if manifest_path.exists() else None
        stored = {
            name: StoredTensor(name, place, place.spec)
            for file in weight_files(folder)
            for name, place in read_header(file).items()
        }
        check_num_layers(config_path, config, len(stored))
        return cls(folder, config, manifest, stored, _schemes(folder, config, stored))

    def tensor_names(self) -> frozenset[str]:
        return frozenset(self.stored)

    def scheme_of(self, module: str) -> WeightScheme | None:
        return self.schemes.get(module)

    def tensor(self, name: str) -> "torch.Tensor":
        """Read one tensor. Raises ArtifactError where there is none of that name."""
        if name not in self.stored:
            raise ArtifactError(f"{self.folder}: tensor {name} is missing; the folder is incomplete, make it again")
        stored = self.stored[name]
        tensor = _read(stored)
        return tensor if stored.view is None else stored.view(tensor)

    @property
    def kv_cache(self) -> str:
        """The KV cache dtype this artifact was judged with; ``auto`` for an ordinary folder."""
        return str((self.manifest or {}).get("kv_cache", "auto"))

    @cached_property
    def digest(self) -> str:
        """SHA-256 over config.json, weight files in order of name, and KV scales: what is served, whoever wrote it."""
        return artifact_digest(self.folder)

    @cached_property
    def quick_digest(self) -> str:
        """Tells folders apart without reading their weights: by the digests in the manifest, else by file stamps."""
        described: object = self.manifest
        if described is None:
            stats = {str(file.resolve()): file.stat() for file in {tensor.file for tensor in self.stored.values()}}
            described = sorted((name, stat.st_size, stat.st_mtime_ns) for name, stat in stats.items())
        return hashlib.sha256(json.dumps([self.config, described], sort_keys=True).encode()).hexdigest()

    def structural_problems(self) -> Iterator[str]:
        """What does not hold of names, dtypes and shapes; reads headers only (and the small ``weight_shape``)."""
        for name, promised in (self.manifest or {}).get("tensors", {}).items():
            found = self.stored.get(name)
            if found is None:
                yield f"tensor {name} is missing; the manifest lists it"
            elif found.spec != TensorSpec(promised["dtype"], tuple(promised["shape"])):
                yield f"tensor {name} is {_show(found.spec)}; the manifest says {promised['dtype']} {promised['shape']}"
        for module, scheme in self.schemes.items():
            yield from self._module_problems(module, scheme)

    def _module_problems(self, module: str, scheme: WeightScheme) -> Iterator[str]:
        anchor = "weight_shape" if scheme.is_packed else "weight"
        scale_name, anchor_name = f"{module}.weight_scale", f"{module}.{anchor}"
        for name in (scale_name, anchor_name):
            if name not in self.stored:
                yield f"tensor {name} is missing; scheme {scheme.name} stores it"
                return
        shape: tuple[int, ...] = self.stored[anchor_name].spec.shape
        if scheme.is_packed:
            shape = _integers(self.stored[anchor_name])
        if len(shape) != 2:
            yield f"tensor {anchor_name} does not describe a matrix"
            return
        expected = scheme.tensors(*shape, scale_dtype=self.stored[scale_name].spec.dtype)
        for suffix, spec in expected.items():
            found = self.stored.get(f"{module}.{suffix}")
            if found is None:
                yield f"tensor {module}.{suffix} is missing; scheme {scheme.name} stores it"
            elif found.spec != spec:
                yield f"tensor {module}.{suffix} is {_show(found.spec)}; scheme {scheme.name} stores {_show(spec)}"


def verify(folder: Path, hashing: Hashing | None = None) -> list[str]:
    """Every fault found in an artifact: structure, the SHA-256 of each tensor and of each other file. [] is clean.

    ``hashing`` of this folder may have begun before. Raises ArtifactError where the folder cannot be read at all, or
    carries no manifest to verify against.
    """
    artifact = Artifact._read(folder)
    if artifact.manifest is None:
        raise ArtifactError(f"{folder}: no {MANIFEST_NAME}, so there is nothing to verify against")
    return [*artifact.structural_problems(), *_digest_problems(artifact, hashing or Hashing(folder))]


def require_intact(folder: Path, hashing: Hashing | None = None) -> None:
    """Raise ArtifactError for the first fault of a folder that has a manifest; an ordinary folder has none to break.

    ``hashing`` of this folder may have begun before.
    """
    artifact = Artifact.open(folder)
    if artifact.manifest is None:
        return
    for problem in _digest_problems(artifact, hashing or Hashing(folder)):
        raise ArtifactError(f"{folder}: {problem}; make the artifact again, or fetch it again")


def tensor_digest(tensor: "torch.Tensor") -> str:
    """SHA-256 of a tensor's bytes in row-major order."""
    return hashlib.sha256(_bytes_of(tensor.contiguous())).hexdigest()


def matches(module: str, pattern: str, class_name: str = "Linear") -> bool:
    """Whether a ``targets`` or ``ignore`` entry names this module: exactly, by ``re:`` regex, or by class."""
    if pattern.startswith("re:"):
        return re.match(pattern[3:], module) is not None
    return pattern in (module, class_name)


def _schemes(folder: Path, config: dict[str, Any], stored: Mapping[str, StoredTensor]) -> dict[str, WeightScheme]:
    declared = config.get("quantization_config")
    modules = sorted({m for name, tensor in stored.items() if (m := _quantized_module(name, tensor)) is not None})
    if not declared:
        if modules:
            raise ArtifactError(f"{folder}: {modules[0]} is stored quantized, but config.json declares no scheme")
        return {}
    if declared.get("quant_method") != "compressed-tensors":
        raise ArtifactError(
            f"{folder}/config.json: quantization_config: quant_method '{declared.get('quant_method')}' cannot be "
            "served; known: compressed-tensors"
        )
    groups = _config_groups(folder, declared)
    scheme_of_group = cache(lambda number: scheme_from_config_group(groups[number]))
    try:
        return {module: scheme_of_group(_group_of(module, groups, declared.get("ignore") or [])) for module in modules}
    except RecipeError as error:
        raise ArtifactError(f"{folder}: {error}") from error


def _config_groups(folder: Path, declared: dict[str, Any]) -> list[dict[str, Any]]:
    """What is declared of quantized modules. ArtifactError where it is no mapping of mappings."""
    groups = declared.get("config_groups") or {}
    found = list(groups.values()) if isinstance(groups, dict) else [groups]
    for group in found:
        if not isinstance(group, dict) or not all(
            isinstance(group.get(key, kind()), kind | None)
            for key, kind in (("weights", dict), ("input_activations", dict), ("targets", list))
        ):
            raise ArtifactError(f"{folder}/config.json: quantization_config.config_groups: {shown(group)} is no group")
    return found


def _group_of(module: str, groups: list[dict[str, Any]], ignore: list[str]) -> int:
    """The number of the config group that declares a module's scheme."""
    if any(matches(module, pattern) for pattern in ignore):
        raise RecipeError(f"{module} is listed under ignore, yet is stored quantized")
    targets = [group.get("targets") or [] for group in groups]
    by_name = (n for n, own in enumerate(targets) if any(t != "Linear" and matches(module, t) for t in own))
    by_class = (n for n, own in enumerate(targets) if "Linear" in own)
    for number in chain(by_name, by_class):
        return number
    raise RecipeError(f"{module} is stored quantized, but no config group targets it")


def _quantized_module(name: str, tensor: StoredTensor) -> str | None:
    module, _, suffix = name.rpartition(".")
    if suffix in _QUANTIZED_SUFFIXES or (suffix == "weight" and tensor.spec.dtype == "I8"):
        return module
    return None


def _digest_problems(artifact: Artifact, hashing: Hashing) -> Iterator[str]:
    """What differs from the manifest, is not listed there, or listed and not there."""
    manifest, digests = artifact.manifest or {}, hashing.result()
    promised = manifest.get("tensors", {})
    for name, entry in promised.items():
        if name in artifact.stored and digests.tensors.get(name) != entry["sha256"]:
            yield f"tensor {name} differs from its digest in the manifest"
    for name in sorted(artifact.stored.keys() - promised.keys()):
        yield f"tensor {name} is not in the manifest"
    for name, digest in manifest.get("files", {}).items():
        if not (artifact.folder / name).is_file():
            yield f"file {name} is missing; the manifest lists it"
        elif digests.files.get(name) != digest:
            yield f"file {name} differs from its digest in the manifest"


def _read(stored: StoredTensor) -> "torch.Tensor":
    import torch

    place = stored.place
    if place.spec.dtype not in DTYPE_BYTES:
        raise ArtifactError(f"{place.file}: cannot read {stored.name}: dtype {place.spec.dtype} is not known")
    tensor = torch.empty(place.spec.shape, dtype=torch_dtype(place.spec.dtype))
    try:
        place.read_into(_bytes_of(tensor))
    except OSError as error:
        raise ArtifactError(f"{place.file}: cannot read {stored.name}: {error}") from error
    return tensor


def _integers(stored: StoredTensor) -> tuple[int, ...]:
    """The numbers of a small I64 tensor, read without torch; none where it is of another dtype."""
    if stored.place.spec.dtype != "I64":
        return ()
    buffer = bytearray(stored.place.num_bytes)
    try:
        stored.place.read_into(memoryview(buffer))
    except OSError as error:
        raise ArtifactError(f"{stored.file}: cannot read {stored.name}: {error}") from error
    return struct.unpack(f"<{len(buffer) // DTYPE_BYTES['I64']}q", buffer)


def _bytes_of(tensor: "torch.Tensor") -> memoryview:
    """The memory of a dense tensor."""
    import torch

    return tensor.flatten().view(torch.uint8).numpy().data


def _show(spec: TensorSpec) -> str:
    return f"{spec.dtype} {list(spec.shape)}"

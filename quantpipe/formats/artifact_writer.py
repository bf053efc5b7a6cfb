"""Writes an artifact: a base model folder with some linears replaced by their quantized tensors, and its manifest.

Everything is written into a temporary folder beside the target and renamed at the end, so that a run that is
interrupted, or a disk that fills up, leaves no half-written artifact. Tensors are read and written one shard at a
time: memory does not grow with the model.
"""

import contextlib
import json
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from quantpipe.disk import GO_ON, disk_refusal
from quantpipe.errors import DataError
from quantpipe.formats.artifact import Artifact, tensor_digest
from quantpipe.formats.digests import INDEX_NAME, MANIFEST_NAME, WEIGHTS_NAME, file_digest
from quantpipe.formats.layout import decode, pack
from quantpipe.formats.scheme import TensorSpec, WeightScheme

MIXED_FORMAT = "mixed-precision"
EXPERT_PART, EXPERTS_TARGET = ".experts.", "re:.*[.]experts[.].*"
MAX_SHARD_BYTES = 5 * 10**9
MANIFEST_VERSION = 1
# The release of the format this writer follows; readers use it to choose a parser.
COMPRESSED_TENSORS_VERSION = "0.20.1"

# What belongs to a model beside its weights. Code (*.py) and pickles are never copied.
_COMPANION_SUFFIXES = (".json", ".jinja", ".model", ".txt")
_NOT_COMPANIONS = ("config.json", MANIFEST_NAME, INDEX_NAME)
_PARTIAL_PREFIX = ".partial-"


@dataclass(frozen=True)
class QuantWeight:
    """One quantized linear: signed integers [N, K] (int8), scales [N, G] in their stored dtype, and the scheme.

    ``zero_NG`` (int8) are the zero points of an asymmetric scheme, None for a symmetric one.
    """

    q_NK: torch.Tensor
    scale_NG: torch.Tensor
    scheme: WeightScheme
    zero_NG: torch.Tensor | None = None

    def dequantized(self) -> torch.Tensor:
        """What the weight means, float32 [N, K]."""
        return decode(self.q_NK, self.scale_NG, self.zero_NG)

    def stored_tensors(self, module: str) -> dict[str, torch.Tensor]:
        """Full tensor name -> what is stored, as ``WeightScheme.tensors`` lists it."""
        if not self.scheme.is_packed:
            return {f"{module}.weight": self.q_NK, f"{module}.weight_scale": self.scale_NG}
        stored = {
            f"{module}.weight_packed": pack(self.q_NK, self.scheme.bits),
            f"{module}.weight_scale": self.scale_NG,
            f"{module}.weight_shape": torch.tensor(self.q_NK.shape, dtype=torch.int64),
        }
        if self.zero_NG is not None:
            # Packed along the output features, unlike the weights.
            stored[f"{module}.weight_zero_point"] = pack(self.zero_NG.T, self.scheme.bits).T.contiguous()
        return stored


def quantization_config(schemes: Mapping[str, WeightScheme], ignore: list[str]) -> dict[str, Any]:
    """The ``quantization_config`` of config.json for linears in ``schemes``, beside those named in ``ignore``.

    The commonest scheme is declared for every Linear, others by the names of theirs.
    """
    counted = Counter(schemes.values())
    # Of equally common schemes the one that comes first in the model, so that the same model gives the same file.
    commonest = max(counted, key=lambda scheme: counted[scheme])
    groups = {"group_0": commonest.config_group(["Linear"])}
    for number, scheme in enumerate((scheme for scheme in counted if scheme != commonest), 1):
        names = [name for name, found in schemes.items() if found == scheme]
        groups[f"group_{number}"] = scheme.config_group(_targets(names))
    formats = {group["format"] for group in groups.values()}
    return {
        "quant_method": "compressed-tensors",
        "version": COMPRESSED_TENSORS_VERSION,
        "format": formats.pop() if len(formats) == 1 else MIXED_FORMAT,
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": ignore,
        # vLLM refuses an integer KV scheme here; ours lies in the manifest and in a sidecar.
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
    }


def _targets(names: list[str]) -> list[str]:
    """Names as targets. transformers stacks experts when it loads them, and knows theirs by this pattern only."""
    others = [name for name in names if EXPERT_PART not in name]
    return others if len(others) == len(names) else [*others, EXPERTS_TARGET]


def write_artifact(
    target: Path,
    base: Artifact,
    weights: Mapping[str, QuantWeight],
    quantization: dict[str, Any] | None,
    manifest: Mapping[str, Any],
    max_shard_bytes: int = MAX_SHARD_BYTES,
    tensors: Mapping[str, torch.Tensor] | None = None,
    added: Mapping[str, torch.Tensor] | None = None,
    config_updates: Mapping[str, Any] | None = None,
    sidecars: Mapping[str, Mapping[str, torch.Tensor]] | None = None,
) -> Artifact:
    """Write ``base`` with ``weights`` and ``tensors`` in place of its own into the folder ``target``, atomically.

    ``tensors`` have the names, shapes and dtypes of stored ones; ``added`` are stored beside them (an untied head).
    Weights of modules that the base stores no weight for (a head that was tied) are added too. ``config_updates``
    replace fields of config.json; ``sidecars`` are safetensors files by name that other readers do not look at.
    ``manifest`` is completed with the digest of every tensor and file. An artifact already at ``target`` is replaced
    only when the new one is complete. Returns the new artifact, reopened. Raises DataError where the disk is full, the
    folder cannot be written, or ``tensors`` do not fit the base.
    """
    tensors, added = tensors or {}, dict(added or {})
    check_replaceable(target)
    for name, tensor in tensors.items():
        _check_replacement(base, name, tensor)
    for module in sorted(module for module in weights if f"{module}.weight" not in base.stored):
        added.pop(f"{module}.weight", None)
        added |= weights[module].stored_tensors(module)
    replaced = _Replaced(base, weights, tensors, added)
    with _atomic_folder(target) as partial:
        written = _write_shards(partial, replaced, _plan_shards(replaced, max_shard_bytes))
        config = {key: value for key, value in base.config.items() if key != "quantization_config"}
        config |= config_updates or {}
        if quantization is not None:
            config["quantization_config"] = quantization
        _write_json(partial / "config.json", config)
        for path in companion_files(base.folder):
            shutil.copyfile(path, partial / path.name)
        weight_files = {path.name for path in partial.glob("*.safetensors")}
        for name, content in (sidecars or {}).items():
            _save_tensors(content, partial / name)
        others = sorted(path for path in partial.iterdir() if path.name not in weight_files)
        complete = {
            "format_version": MANIFEST_VERSION,
            **manifest,
            "files": {path.name: file_digest(path) for path in others},
            "tensors": written,
        }
        _write_json(partial / MANIFEST_NAME, complete)
        Artifact.open(partial)
    return Artifact.open(target)


def check_replaceable(target: Path) -> None:
    """Raise DataError where ``target`` is or holds something that is no artifact: it would be lost."""
    if target.is_symlink() or (target.exists() and not target.is_dir()):
        kind = "a link" if target.is_symlink() else "a file"
        raise DataError(f"{target}: is {kind}, no artifact of quantpipe; move it, or choose another `output`")
    if target.is_dir() and not (target / MANIFEST_NAME).exists() and any(target.iterdir()):
        raise DataError(
            f"{target}: holds files that are no artifact of quantpipe; move them, or choose another `output`"
        )


def companion_files(folder: Path) -> list[Path]:
    """Tokenizer, chat template, generation settings: what must travel with the weights, in order of name."""
    return sorted(
        path
        for path in folder.iterdir()
        if path.is_file() and path.suffix in _COMPANION_SUFFIXES and path.name not in _NOT_COMPANIONS
    )


def estimated_bytes(base: Artifact) -> int:
    """An upper bound of an artifact's size: quantized weights never take more room than the base model's."""
    return sum(tensor.file.stat().st_size for tensor in {t.file: t for t in base.stored.values()}.values())


def _check_replacement(base: Artifact, name: str, tensor: torch.Tensor) -> None:
    if name not in base.stored:
        raise DataError(f"{base.folder}: tensor {name} was changed, but the base model stores none of that name")
    found = TensorSpec(dtype_name(tensor.dtype), tuple(tensor.shape))
    stored = base.stored[name].spec
    if found != stored:
        raise DataError(
            f"{base.folder}: tensor {name} was changed into {found.dtype} {list(found.shape)}, but the base model "
            f"stores {stored.dtype} {list(stored.shape)}; convert the base model to one dtype"
        )


@dataclass(frozen=True)
class _Replaced:
    """What is stored in place of the base model's tensors, and what is added."""

    base: Artifact
    weights: Mapping[str, QuantWeight]
    changed: Mapping[str, torch.Tensor]
    added: Mapping[str, torch.Tensor]

    def names(self) -> list[str]:
        """Base tensors and added ones, in order of name."""
        return sorted({*self.base.stored, *self.added})

    def stored(self, name: str) -> dict[str, torch.Tensor]:
        """What is stored in place of ``name``: its quantized, changed or added form, or itself."""
        if name in self.added:
            return {name: self.added[name]}
        module, _, suffix = name.rpartition(".")
        if suffix == "weight" and module in self.weights:
            return self.weights[module].stored_tensors(module)
        return {name: self.changed[name] if name in self.changed else self.base.tensor(name)}


def _plan_shards(replaced: _Replaced, max_bytes: int) -> list[list[str]]:
    """Names per shard, in order of name, so that no shard grows beyond ``max_bytes``."""
    shards: list[list[str]] = [[]]
    size = 0
    for name in replaced.names():
        num_bytes = sum(t.nbytes for t in replaced.stored(name).values())
        if shards[-1] and size + num_bytes > max_bytes:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += num_bytes
    return shards


def _write_shards(partial: Path, replaced: _Replaced, shards: list[list[str]]) -> dict[str, dict[str, Any]]:
    written: dict[str, dict[str, Any]] = {}
    weight_map: dict[str, str] = {}
    total_bytes = 0
    for number, names in enumerate(shards, 1):
        file_name = WEIGHTS_NAME if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        tensors = {key: tensor for name in names for key, tensor in replaced.stored(name).items()}
        _save_tensors(tensors, partial / file_name)
        written |= {name: _entry(tensor) for name, tensor in tensors.items()}
        weight_map |= dict.fromkeys(tensors, file_name)
        total_bytes += sum(tensor.nbytes for tensor in tensors.values())
    if len(shards) > 1:
        _write_json(partial / INDEX_NAME, {"metadata": {"total_size": total_bytes}, "weight_map": weight_map})
    return dict(sorted(written.items()))


def _save_tensors(tensors: Mapping[str, torch.Tensor], path: Path) -> None:
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path, metadata={"format": "pt"})
    path.chmod(0o644)  # safetensors makes it private; servers run under other users


# Dtype names as safetensors spells them in a file's header.
_DTYPE_NAMES = {
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.int32: "I32",
    torch.int64: "I64",
    torch.bool: "BOOL",
}


def dtype_name(dtype: torch.dtype) -> str:
    """A dtype as safetensors spells it; DataError for one that artifacts do not hold."""
    if dtype not in _DTYPE_NAMES:
        raise DataError(f"a tensor of dtype {dtype} cannot be stored (known: {', '.join(_DTYPE_NAMES.values())})")
    return _DTYPE_NAMES[dtype]


def _entry(tensor: torch.Tensor) -> dict[str, Any]:
    return {"dtype": dtype_name(tensor.dtype), "shape": list(tensor.shape), "sha256": tensor_digest(tensor)}


@contextlib.contextmanager
def _atomic_folder(target: Path) -> Iterator[Path]:
    """A new folder beside ``target`` that becomes it on success and vanishes on any failure."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        for stale in target.parent.glob(f"{_PARTIAL_PREFIX}{target.name}-*"):
            shutil.rmtree(stale, ignore_errors=True)
        partial = Path(tempfile.mkdtemp(prefix=f"{_PARTIAL_PREFIX}{target.name}-", dir=target.parent))
    except OSError as error:
        raise DataError(f"{target}: cannot be written: {error.strerror}; choose another `output`") from error
    try:
        yield partial
        partial.chmod(0o755)  # mkdtemp makes it private; an artifact is read by servers under other users
        _replace_folder(partial, target)
    except (OSError, SafetensorError) as error:
        reason = disk_refusal(error)
        if reason is not None:
            raise DataError(f"{target}: {reason} and {GO_ON}") from error
        raise DataError(f"{target}: cannot be written: {error}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _replace_folder(new: Path, target: Path) -> None:
    if not target.exists():
        new.rename(target)
        return
    with tempfile.TemporaryDirectory(prefix=f"{_PARTIAL_PREFIX}{target.name}-old-", dir=target.parent) as trash:
        target.rename(Path(trash) / target.name)
        new.rename(target)


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")

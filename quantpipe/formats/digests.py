"""SHA-256 of what a manifest lists, computed in threads of its own. Knows no torch: it runs while that is imported."""

import hashlib
import json
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from quantpipe.errors import ArtifactError
from quantpipe.formats.weight_file import TensorPlace, read_header

MANIFEST_NAME = "quantpipe.json"
WEIGHTS_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
KV_SCALES_NAME = "kv_scales.safetensors"
_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True)
class FolderDigests:
    """Of a folder that has a manifest: digests by name, of every tensor and of those listed files that are there."""

    tensors: dict[str, str] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)


class Hashing:
    """Begins to hash a folder; ``result`` waits for it. Its threads do not keep a process alive that gives up."""

    def __init__(self, folder: Path, num_threads: int | None = None) -> None:
        self._folder = folder
        self._digests = FolderDigests()
        self._failure: Exception | None = None
        self._lock = threading.Lock()
        self._tasks = self._list_tasks()
        self._threads = [
            threading.Thread(target=self._work, name="hashing", daemon=True)
            for _ in range(num_threads or os.cpu_count() or 1)
        ]
        for thread in self._threads:
            thread.start()

    def result(self) -> FolderDigests:
        """Empty without a manifest. ArtifactError for the first file that cannot be read."""
        for thread in self._threads:
            thread.join()
        if isinstance(self._failure, OSError):
            raise ArtifactError(f"{self._failure.filename or self._folder}: cannot be read: {self._failure.strerror}")
        if self._failure is not None:
            raise self._failure
        return self._digests

    def _work(self) -> None:
        buffer = memoryview(bytearray(_CHUNK_BYTES))
        while self._failure is None:
            try:
                with self._lock:
                    task = next(self._tasks, None)
                if task is None:
                    return
                task(buffer)
            except Exception as error:  # told to whom waits for the result
                self._failure = error

    def _list_tasks(self) -> Iterator[Callable[[memoryview], None]]:
        manifest_path = self._folder / MANIFEST_NAME
        if not manifest_path.exists():
            return
        for file in weight_files(self._folder):
            for name, place in read_header(file).items():
                yield partial(self._hash_tensor, name, place)
        for name in read_json(manifest_path).get("files", {}):
            if (self._folder / name).is_file():
                yield partial(self._hash_file, name)

    def _hash_tensor(self, name: str, place: TensorPlace, buffer: memoryview) -> None:
        total = hashlib.sha256()
        for chunk in place.chunks(buffer):
            total.update(chunk)
        self._digests.tensors[name] = total.hexdigest()

    def _hash_file(self, name: str, _buffer: memoryview) -> None:
        self._digests.files[name] = file_digest(self._folder / name)


def file_digest(path: Path) -> str:
    """SHA-256 of a file, read in chunks."""
    total = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            total.update(chunk)
    return total.hexdigest()


def weight_files(folder: Path) -> Sequence[Path]:
    """In order of name. ArtifactError where one is missing."""
    index_path = folder / INDEX_NAME
    if index_path.exists():
        names = sorted(set(read_json(index_path).get("weight_map", {}).values()))
        files = [folder / name for name in names]
    else:
        files = [folder / WEIGHTS_NAME]
    for file in files:
        if not file.is_file():
            raise ArtifactError(f"{file}: no such file; a model folder holds its weights as safetensors")
    return files


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object. ArtifactError."""
    try:
        loaded = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ArtifactError(f"{path}: no such file; a model folder holds it") from error
    except (OSError, ValueError) as error:
        raise ArtifactError(f"{path}: not readable as JSON: {error}") from error
    if not isinstance(loaded, dict):
        raise ArtifactError(f"{path}: holds a JSON {type(loaded).__name__}; an object is expected")
    return loaded

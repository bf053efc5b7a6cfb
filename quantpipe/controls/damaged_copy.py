"""Damaged copies of an artifact, with a manifest that fits what they hold.

Digests would find any damage. They are made to fit, so that it is the evaluation that must find it.
"""

import json
import shutil
from pathlib import Path

import torch

from quantpipe.controls.control import Damage
from quantpipe.formats.artifact import Artifact, tensor_digest
from quantpipe.formats.digests import MANIFEST_NAME, file_digest


def write_damaged(artifact: Artifact, damage: Damage, folder: Path) -> Path:
    """Write the copy to ``folder``, which must not be there yet. What is not damaged is linked to, not copied."""
    folder.mkdir(parents=True)
    changed = {artifact.stored[name].file.name for name in damage.tensors} | {MANIFEST_NAME, *damage.files}
    for path in artifact.folder.iterdir():
        if path.name not in changed and path.is_file():
            (folder / path.name).symlink_to(path.resolve())
    for file in {artifact.stored[name].file for name in damage.tensors}:
        shutil.copyfile(file, folder / file.name)
    for name, tensor in damage.tensors.items():
        _overwrite(artifact, name, tensor, folder)
    for name, content in damage.files.items():
        (folder / name).write_bytes(content)
    if artifact.manifest is not None:
        manifest = _fitting(artifact.manifest, damage, folder)
        (folder / MANIFEST_NAME).write_text(json.dumps(manifest, indent=2, ensure_ascii=False), encoding="utf-8")
    return folder


def _overwrite(artifact: Artifact, name: str, tensor: torch.Tensor, folder: Path) -> None:
    place = artifact.stored[name].place
    content = tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()
    assert len(content) == place.num_bytes, f"{name}: a control changed its size"
    with (folder / place.file.name).open("r+b") as file:
        file.seek(place.offset)
        file.write(content)


def _fitting(manifest: dict[str, object], damage: Damage, folder: Path) -> dict[str, object]:
    complete = json.loads(json.dumps(manifest))
    for name, tensor in damage.tensors.items():
        if name in complete.get("tensors", {}):
            complete["tensors"][name]["sha256"] = tensor_digest(tensor)
    for name in damage.files:
        if "files" in complete:
            complete["files"][name] = file_digest(folder / name)
    return dict(complete)

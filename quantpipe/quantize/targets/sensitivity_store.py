"""Measured sensitivities on disk: a run that was killed goes on with the very figures that it chose schemes by."""

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from quantpipe.disk import GO_ON, writing
from quantpipe.formats.scheme import WeightScheme
from quantpipe.quantize.targets.allocate import LinearSet

_FILE_NAME = "sensitivity.json"
_DTYPES = {str(dtype): dtype for dtype in (torch.float32, torch.float16, torch.bfloat16)}


def remembered(work_folder: Path, measure: Callable[[], list[LinearSet]]) -> list[LinearSet]:
    """What ``measure`` gives, kept in ``work_folder``, whole or not at all; read from there if it stands there already.

    The folder must belong to one fingerprint of everything that the figures depend on.
    """
    path = work_folder / _FILE_NAME
    if path.exists():
        return [_linear_set(stored) for stored in json.loads(path.read_text(encoding="utf-8"))]
    sets = measure()
    partial = path.with_suffix(".partial")
    with writing(path, GO_ON):
        partial.write_text(json.dumps([_stored(part) for part in sets], indent=1), encoding="utf-8")
        partial.replace(path)
    return sets


def _stored(part: LinearSet) -> dict[str, Any]:
    return {
        "shapes": {name: list(shape) for name, shape in part.shapes.items()},
        "scheme": asdict(part.scheme),
        "scale_dtype": str(part.scale_dtype),
        "kl": part.kl,
    }


def _linear_set(stored: dict[str, Any]) -> LinearSet:
    shapes = {name: (num_out, num_in) for name, (num_out, num_in) in stored["shapes"].items()}
    return LinearSet(shapes, WeightScheme(**stored["scheme"]), _DTYPES[stored["scale_dtype"]], stored["kl"])

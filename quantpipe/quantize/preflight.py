"""A trial of what comes last, before anything that takes long: what goes into an artifact beside its weights is copied
to where it is going to be, and read back as readers do."""

import json
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

from quantpipe.errors import DataError
from quantpipe.formats.artifact import Artifact
from quantpipe.formats.artifact_writer import check_replaceable, companion_files


def check_save(target: Path, base: Artifact) -> None:
    """Raise DataError where an artifact of ``base`` cannot be written at ``target``, or would not load afterwards.

    What is wrong with ``target`` begins with ``output``, the key of the recipe that it lies under.
    """
    try:
        check_replaceable(target)
    except DataError as error:
        raise DataError(f"output: {error}") from error
    was_there = target.parent.exists()
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".trial-{target.name}-", dir=target.parent) as trial:
            companions = companion_files(base.folder)
            for path in companions:
                shutil.copyfile(path, Path(trial) / path.name)
            _check_loads(Path(trial), base.folder, [path.name for path in companions])
    except OSError as error:
        raise DataError(f"output: {target}: cannot be written: {error.strerror or error}; choose another") from error
    finally:
        if not was_there:  # a run that is refused leaves nothing behind
            with suppress(OSError):
                target.parent.rmdir()


def _check_loads(trial: Path, origin: Path, companions: list[str]) -> None:
    from transformers import GenerationConfig

    for name in companions:
        if name.endswith(".json"):
            try:
                json.loads((trial / name).read_text(encoding="utf-8"))
            except ValueError as error:
                raise DataError(f"{origin / name}: not readable as JSON: {error}; fix or re-download it") from error
    if "generation_config.json" not in companions:
        return
    try:
        GenerationConfig.from_pretrained(trial, local_files_only=True)
    except (ValueError, TypeError) as error:
        reason = " ".join(str(error).split())
        raise DataError(
            f"{origin / 'generation_config.json'}: transformers would not load an artifact with it: {reason}; fix it"
        ) from error

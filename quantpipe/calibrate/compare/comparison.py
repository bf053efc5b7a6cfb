"""Calibration sets against each other: quantize with each and each seed, measure on held-out text of every domain.

All candidates are made first and then measured, so that the engines and the quantizer never hold weights at once. What
stands in ``compare/`` under the recipe's output from an earlier run is used again if nothing it depends on has changed.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from quantpipe.calibrate.compare.comparison_report import (
    COMPARISON_NAME,
    REPORT_NAME,
    Comparison,
    DomainText,
    MeasuredRun,
    comparison_record,
    render_markdown,
)
from quantpipe.calibrate.compare.comparison_texts import HeldOutText, Wanted, domain_texts, named_sets
from quantpipe.calibrate.recipe_blocks import calibrate
from quantpipe.calibrate.self_text.own_texts import own_texts
from quantpipe.calibration.checks.leakage import EvalText
from quantpipe.candidate import make_candidate, open_checked
from quantpipe.engine.engine import Engine
from quantpipe.errors import RecipeError
from quantpipe.evaluate.divergence import measure_divergence
from quantpipe.evaluate.seed_spread import compare_seeds
from quantpipe.formats.artifact import Artifact
from quantpipe.gate.record import library_versions, write_text_atomically
from quantpipe.judgement import engine_config, read_texts
from quantpipe.pipeline import check_windows, only_run, resolve_served
from quantpipe.recipe.lines import naming_lines
from quantpipe.recipe.schema import Recipe
from quantpipe.report import Reporter
from quantpipe.sources.base_model import BaseModel

COMPARE_FOLDER = "compare"
FIDELITY_NAME = "fidelity.json"


@dataclass(frozen=True)
class ComparedRun:
    """One candidate to be made: a set by its name, a seed, and the recipe that says both."""

    set_name: str
    seed: int
    recipe: Recipe


# Makes the candidate of a run, or finds it made before.
Make = Callable[[ComparedRun], Artifact]


def compare_sets(
    recipe: Recipe, folders: Sequence[Path], num_seeds: int, wanted: Wanted, cache_folder: Path, reporter: Reporter
) -> Comparison:
    """Quantize with each set and seed and compare what comes out; see ``compare_runs``.

    Raises RecipeError and DataError before any candidate is made where one of the sets cannot be built, or there is
    nothing to compare on.
    """
    sets = named_sets(folders)
    runs = runs_of(recipe, {name: definition.file for name, definition in sets.items()}, num_seeds)
    with naming_lines(recipe), only_run(recipe.output / COMPARE_FOLDER):
        base = resolve_served(recipe, cache_folder, reporter)
        check_windows(recipe, base, "--window-tokens", wanted.window_tokens)
        open_checked(runs[0].recipe, base)  # all runs ask for the same but for set and seed: refused before any is read
        output = recipe.output / COMPARE_FOLDER
        write = own_texts(base, engine_config(recipe), output, reporter)
        texts, held_out = domain_texts(sets, wanted, base.folder, write, reporter.progress)
        write.close()
        compared_with = (*_evaluated_texts(recipe, base), *held_out)
        for run in runs[: len(sets)]:  # one of each set: what cannot be built is refused now
            calibrate(run.recipe, base, compared_with, reporter)

        def make(run: ComparedRun) -> Artifact:
            return make_candidate(run.recipe, base, engine_config(recipe), reporter, compared_with).artifact

        return compare_runs(recipe, runs, base, texts, make, reporter)


def runs_of(recipe: Recipe, sets: Mapping[str, Path], num_seeds: int) -> tuple[ComparedRun, ...]:
    """Every set with every seed, from the recipe's own seed on; each has a folder of its own under ``compare/``.

    Raises RecipeError where the recipe reads no calibration set.
    """
    section = recipe.calibration
    if section is None or recipe.quantize is None:
        raise RecipeError(
            f"{recipe.name}: nothing in it reads a calibration set; add calibration, and what learns from it"
        )
    runs = []
    for seed in range(section.seed, section.seed + num_seeds):
        for name, folder in sets.items():
            calibration = section.model_copy(update={"set": folder, "seed": seed, "coverage": "none"})
            output = recipe.output / COMPARE_FOLDER / f"{name}-{seed}"
            changed = recipe.model_copy(update={"calibration": calibration, "output": output})
            runs.append(ComparedRun(name, seed, changed))
    return tuple(runs)


def compare_runs(
    recipe: Recipe,
    runs: Sequence[ComparedRun],
    base: BaseModel,
    texts: Sequence[HeldOutText],
    make: Make,
    reporter: Reporter,
) -> Comparison:
    """Make every candidate, measure each on every domain, and write ``comparison.json`` and ``comparison.md``."""
    made = []
    for number, run in enumerate(runs, start=1):
        reporter.stage(f"candidate {number} of {len(runs)}: {run.set_name}, seed {run.seed}")
        made.append((run, make(run)))
    meter = Meter(recipe, base, texts, reporter)
    measured = tuple(_measured(run, artifact, meter.mean_kl(artifact)) for run, artifact in made)
    values: dict[str, dict[str, list[float]]] = {text.label: {} for text in texts}
    for each in measured:
        for domain, kl in each.mean_kl:
            values[domain].setdefault(each.set_name, []).append(kl)
    spreads, differences = compare_seeds(values)
    comparison = Comparison(
        recipe_name=recipe.name,
        base_origin=base.origin,
        base_digest=base.digest,
        seeds=tuple(dict.fromkeys(run.seed for run in runs)),
        texts=tuple(DomainText(t.label, t.origin, len(t.windows), len(t.windows[0])) for t in texts),
        runs=measured,
        spreads=spreads,
        differences=differences,
        versions=tuple(library_versions().items()),
    )
    folder = recipe.output / COMPARE_FOLDER
    record = json.dumps(comparison_record(comparison), indent=2, ensure_ascii=False, allow_nan=False)
    write_text_atomically(folder / COMPARISON_NAME, record + "\n")
    write_text_atomically(folder / REPORT_NAME, render_markdown(comparison))
    return comparison


class Meter:
    """Measures candidates against the base model, which is opened when first needed and then kept."""

    def __init__(self, recipe: Recipe, base: BaseModel, texts: Sequence[HeldOutText], reporter: Reporter) -> None:
        self._recipe = recipe
        self._base = base
        self._texts = texts
        self._reporter = reporter
        self._baseline: Engine | None = None

    def mean_kl(self, artifact: Artifact) -> dict[str, float]:
        """Mean KL on every domain, from ``fidelity.json`` beside the artifact where it was measured before."""
        path, key = artifact.folder.parent / FIDELITY_NAME, self._key(artifact)
        known = _read_fidelity(path, key)
        if known is not None:
            return known
        self._reporter.stage(f"measure {artifact.folder}")
        found = dict(self._measure(artifact))
        write_text_atomically(path, json.dumps({"key": key, "mean_kl": found}, indent=2, ensure_ascii=False) + "\n")
        return found

    def _measure(self, artifact: Artifact) -> Iterator[tuple[str, float]]:
        config = engine_config(self._recipe)
        if self._baseline is None:
            self._baseline = Engine.open(self._base.folder, config)
        candidate = Engine.open(artifact.folder, config)
        for text in self._texts:
            result = measure_divergence(self._baseline, candidate, text.windows)
            (kl,) = (each.value for each in result.measurements if each.name == "mean_kl")
            self._reporter.note(f"{text.label}: mean KL {kl:.4g}")
            yield text.label, kl

    def _key(self, artifact: Artifact) -> str:
        """SHA-256 over everything the figures depend on."""
        texts = [[text.label, [list(map(int, window)) for window in text.windows]] for text in self._texts]
        engine = asdict(engine_config(self._recipe))
        made_from = [artifact.digest, self._base.digest, texts, engine, library_versions()]
        return hashlib.sha256(json.dumps(made_from, sort_keys=True).encode()).hexdigest()


def _evaluated_texts(recipe: Recipe, base: BaseModel) -> tuple[EvalText, ...]:
    """What the recipe evaluates on. Rows that its own set holds out are no part of this comparison."""
    section = recipe.evaluate
    if section is not None and section.divergence is not None and section.divergence.holdout:
        section = section.model_copy(update={"divergence": None})
    return read_texts(recipe.model_copy(update={"evaluate": section}), base.folder)


def _read_fidelity(path: Path, key: str) -> dict[str, float] | None:
    """The figures kept under ``key``; None where there are none: they are measured anew."""
    try:
        record: Any = json.loads(path.read_text(encoding="utf-8"))
        if record["key"] != key:
            return None
        return {str(domain): float(kl) for domain, kl in record["mean_kl"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _measured(run: ComparedRun, artifact: Artifact, mean_kl: Mapping[str, float]) -> MeasuredRun:
    calibration = (artifact.manifest or {}).get("calibration") or {}
    return MeasuredRun(run.set_name, run.seed, calibration.get("digest", ""), artifact.digest, tuple(mean_kl.items()))

"""A run, stage by stage: source, questions, calibration, quantization, artifact, parity, evaluation, bench, gate."""

import fcntl
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from quantpipe.calibrate.coverage.run_coverage import coverage_fact
from quantpipe.calibrate.self_text.own_texts import OwnTexts, own_texts
from quantpipe.candidate import Candidate, make_candidate
from quantpipe.disk import GO_ON, removing_empty, writing
from quantpipe.engine.config import EngineConfig
from quantpipe.engine.preflight import backend_of, check_machine, check_settings
from quantpipe.errors import ArtifactError, DataError, RecipeError, UnservedError
from quantpipe.formats.artifact import Artifact
from quantpipe.gate.judge import GateResult
from quantpipe.judgement import (
    Questions,
    engine_config,
    judge_candidate,
    read_compared,
    read_questions,
    windows_of_text,
)
from quantpipe.models import describe
from quantpipe.models.description import DecoderDescription
from quantpipe.models.weights import check_tensors
from quantpipe.quantize.model.architecture import check_architectures
from quantpipe.quantize.model.loading import check_supported
from quantpipe.recipe.lengths import check_length
from quantpipe.recipe.lines import naming_lines
from quantpipe.recipe.schema import Recipe
from quantpipe.releases.archive import require_writable
from quantpipe.report import Reporter
from quantpipe.sources.base_model import BaseModel, resolve_model


def run_recipe(recipe: Recipe, recipe_path: Path, cache_folder: Path, reporter: Reporter) -> GateResult:
    """Make the candidate and judge it. The artifact, ``gate.json`` and the report land under ``recipe.output``.

    Raises RecipeError at once for a recipe without limits to judge by.
    """
    recipe.require_gate()
    _require_archive(recipe)
    with naming_lines(recipe), only_run(recipe.output):
        return _run(recipe, recipe_path, cache_folder, reporter)


def _run(recipe: Recipe, recipe_path: Path, cache_folder: Path, reporter: Reporter) -> GateResult:
    base = resolve_served(recipe, cache_folder, reporter)
    questions = questions_of(recipe, base, reporter)
    started_s = time.monotonic()
    candidate = make_candidate(recipe, base, engine_config(recipe), reporter, questions.texts, questions.by_domain())
    facts = quantization_facts(recipe, candidate, time.monotonic() - started_s)
    folder = candidate.artifact.folder
    commands = (f"quantpipe run {recipe_path}{_sets(recipe.overrides)}", f"quantpipe verify {folder}")
    return judge_candidate(
        recipe, base, folder, questions, candidate.parity, facts, commands, recipe.output, reporter, cache_folder
    )


def quantize_recipe(recipe: Recipe, cache_folder: Path, reporter: Reporter) -> Candidate:
    """Make the candidate and judge nothing: for another runtime or machine, or a model that the runtime does not serve.

    Where nothing can be served here, parity is checked in transformers only, and a note says why. An earlier verdict
    under ``recipe.output`` is withdrawn when a new artifact is written.
    """
    with naming_lines(recipe), only_run(recipe.output):
        base = _resolve(recipe, cache_folder, reporter)
        config = _served_here(recipe, base, reporter)
        with _writer(recipe, base, reporter) as write:
            compared = read_compared(recipe, base.folder, write)
        _tell(compared, reporter)
        held_out = _with_windows(recipe, compared, base.folder, reporter).by_domain()
        return make_candidate(recipe, base, config, reporter, compared.texts, held_out)


def gate_artifact(
    recipe: Recipe, recipe_path: Path, artifact: Path, cache_folder: Path, reporter: Reporter
) -> GateResult:
    """Judge a model folder that stands on disk already, by the recipe's questions and limits; make nothing.

    The verdict goes to ``gate_folder``, not to ``recipe.output``, whose own verdict is about another artifact. Raises
    RecipeError at once for a recipe without limits to judge by.
    """
    recipe.require_gate()
    _require_archive(recipe)
    with naming_lines(recipe):
        base = resolve_served(recipe, cache_folder, reporter)
        check_settings(engine_config(recipe), describe(Artifact.open(artifact)))
        questions = questions_of(recipe, base, reporter)
        commands = (f"quantpipe gate {recipe_path}{_sets(recipe.overrides)} --artifact {artifact}",)
        facts = (("artifact", f"{artifact}, judged as it stood on disk"),)
        output = gate_folder(recipe, artifact)
        return judge_candidate(recipe, base, artifact, questions, (), facts, commands, output, reporter, cache_folder)


def questions_of(recipe: Recipe, base: BaseModel, reporter: Reporter) -> Questions:
    """What both models will be asked, with its notes told."""
    with _writer(recipe, base, reporter) as write:
        questions = read_questions(recipe, base.folder, write)
    _tell(questions, reporter)
    return questions


def gate_folder(recipe: Recipe, artifact: Path) -> Path:
    """Where ``gate_artifact`` writes: a folder under the recipe's output, named after the one it judges."""
    return recipe.output / f"gate-{artifact.resolve().name}"


@contextmanager
def only_run(output: Path) -> Iterator[None]:
    """Keep a second run out of ``output`` while this one lasts; one that makes nothing leaves no folder behind.

    Raises DataError where another run is there, or nothing can be written.
    """
    with removing_empty(output), _locked(output), writing(output, GO_ON):
        yield


@contextmanager
def _locked(output: Path) -> Iterator[None]:
    lock = output.with_name(f".{output.name}.lock")
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        file = lock.open("w")
    except OSError as error:
        is_below = isinstance(error, FileExistsError | NotADirectoryError)
        reason = "it lies below a file" if is_below else error.strerror
        raise DataError(f"output: {output} cannot be written: {reason}; choose another") from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise DataError(f"{output}: another run is writing here; wait for it or choose another `output`") from error
        try:
            yield
        finally:
            lock.unlink(missing_ok=True)


def _tell(questions: Questions, reporter: Reporter) -> None:
    for note in questions.notes:
        reporter.note(note)


def _with_windows(recipe: Recipe, compared: Questions, tokenizer_folder: Path, reporter: Reporter) -> Questions:
    """``compared`` with windows of the held-out text, for the set's coverage alone: it may lack them, and says so."""
    divergence = recipe.evaluate.divergence if recipe.evaluate is not None else None
    if divergence is None or recipe.calibration is None or recipe.calibration.coverage == "none":
        return compared
    try:
        return windows_of_text(compared, divergence, tokenizer_folder)
    except (ArtifactError, DataError) as error:
        reporter.note(f"coverage looks at no held-out text: {error}")
        return compared


@contextmanager
def _writer(recipe: Recipe, base: BaseModel, reporter: Reporter) -> Iterator[OwnTexts]:
    """What writes text for a set of ``kind: self`` that holds rows out; it has no engine until it is asked to write."""
    write = own_texts(base, engine_config(recipe), recipe.output, reporter)
    try:
        yield write
    finally:
        write.close()


def quantization_facts(recipe: Recipe, candidate: Candidate, seconds: float) -> tuple[tuple[str, str], ...]:
    """What the report says about how the candidate was made."""
    if recipe.quantize is None:
        return ()
    manifest = candidate.artifact.manifest or {}
    layers = manifest.get("layers", [])
    settings = recipe.quantize.solver.model_dump(exclude={"name"})
    schemes = [layer["scheme"] for layer in layers]
    worst = max(layers, key=lambda layer: layer["error_after"], default=None)
    facts = [
        ("solver", " ".join((recipe.quantize.solver.name, *(f"{key}={value}" for key, value in settings.items())))),
        ("transforms", ", ".join(each.name for each in recipe.quantize.transforms) or "none"),
        ("scheme", ", ".join(f"{label}: {count}" for label, count in Counter(schemes).items())),
        ("KV cache", recipe.quantize.kv_cache),
        ("quantized linears", str(len(layers))),
        ("made in this run", "no, reused" if candidate.was_reused else f"yes, in {seconds:.0f} s"),
    ]
    if worst is not None:
        facts.append(("largest relative error", f"{worst['error_after']:.2g} at {worst['name']}"))
    for mode, errors in (manifest.get("kv_errors") or {}).items():
        facts.append(
            (f"attention error, {mode}", f"mean {errors['mean_error']:.2g}, worst {errors['worst_error']:.2g}")
        )
    if (calibration := manifest.get("calibration")) is not None:
        tokens = calibration["num_sequences"] * calibration["sequence_length"]
        facts.append(("calibration", f"{calibration['name']}, {tokens:,} tokens, digest {calibration['digest'][:12]}"))
        facts += coverage_fact(recipe.output)
    return tuple(facts)


def _require_archive(recipe: Recipe) -> None:
    if (archive := recipe.archive_folder) is not None:
        require_writable(archive)


def _resolve(recipe: Recipe, cache_folder: Path, reporter: Reporter) -> BaseModel:
    reporter.stage(f"base model: {recipe.model.source}")
    base = resolve_model(recipe.model, recipe.folder, cache_folder)
    reporter.note(f"{base.folder}")
    return base


def _served_here(recipe: Recipe, base: BaseModel, reporter: Reporter) -> EngineConfig | None:
    """What an artifact of ``base`` is served with for parity; None where it is not served here, and a note says why."""
    config = engine_config(recipe)
    try:
        backend_of(config).check(_check_served(base))
    except RecipeError as error:
        reporter.note(f"parity is checked in transformers only: {error}")
    except ArtifactError as error:
        check_supported(base.folder, recipe.model.trust_remote_code)  # what is refused needs no note
        reporter.note(f"parity is checked in transformers only: {error}")
    else:
        return config
    return None


def resolve_served(recipe: Recipe, cache_folder: Path, reporter: Reporter) -> BaseModel:
    """The base model; one that the runtime cannot serve, or not here, is refused before any work."""
    check_machine(engine_config(recipe))
    base = _resolve(recipe, cache_folder, reporter)
    try:
        check_settings(engine_config(recipe), _check_served(base))
    except UnservedError as error:
        check_supported(base.folder, recipe.model.trust_remote_code)  # what cannot be quantized either says so
        raise UnservedError(f"{error}; `quantpipe quantize` works on it, for another runtime") from error
    except ArtifactError:
        check_architectures(Artifact.open(base.folder))  # tensors of another kind of model are no damage
        raise
    if recipe.evaluate is not None and recipe.evaluate.divergence is not None:
        check_windows(recipe, base, "evaluate.divergence.window_tokens", recipe.evaluate.divergence.window_tokens)
    return base


def check_windows(recipe: Recipe, base: BaseModel, key: str, window_tokens: int) -> None:
    """Raise RecipeError where ``key`` asks for windows of text that the engine does not take whole."""
    check_length(key, window_tokens, describe(Artifact.open(base.folder)).max_position_embeddings)
    check_length(key, window_tokens, recipe.engine.max_model_len, "engine.max_model_len")


def _check_served(base: BaseModel) -> DecoderDescription:
    """Its decoder. ArtifactError where the runtime does not serve the model: its family, a setting, or its tensors."""
    artifact = Artifact.open(base.folder)
    description = describe(artifact)
    check_tensors(description, artifact)
    return description


def _sets(overrides: Sequence[str]) -> str:
    return "".join(f" --set {override}" for override in overrides)

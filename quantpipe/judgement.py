"""Judging a candidate: evaluate and bench what is served, then the gate. Opens model folders from disk only.

The quantizer's model in memory is not reachable from here: what is judged is what will serve.
"""

import hashlib
import json
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from quantpipe.bench.latency import BenchResult, num_text_tokens, paired_figures, run_bench
from quantpipe.bench.workload import vocabulary_text
from quantpipe.calibrate.coverage.run_coverage import read_coverage
from quantpipe.calibration.calibration_set import BuildContext
from quantpipe.calibration.checks.leakage import EvalText
from quantpipe.calibration.definition.set_definition import set_of_recipe
from quantpipe.calibration.held_out.held_out_rows import HeldOut, read_held_out
from quantpipe.calibration.samples.self_text import WriteText
from quantpipe.engine.config import EngineConfig
from quantpipe.engine.engine import Engine
from quantpipe.engine.tokenizer import Tokenizer
from quantpipe.errors import DataError, RecipeError, suggest
from quantpipe.evaluate.comparison import Comparison, OtherPromptsError, compare
from quantpipe.evaluate.divergence import DivergenceResult, named_windows, text_files
from quantpipe.evaluate.eval_texts import eval_texts
from quantpipe.evaluate.fidelity.against import measure_fidelity
from quantpipe.evaluate.fidelity.facts import divergence_facts
from quantpipe.evaluate.fidelity.record import write_divergence_json
from quantpipe.evaluate.fidelity.text_fields import check_patterns, fields_of
from quantpipe.evaluate.fidelity.windows import DOMAIN
from quantpipe.evaluate.items import SuiteResult
from quantpipe.evaluate.outputs import rescore, write_outputs
from quantpipe.evaluate.result_cache import Asked, code_digest, run_suite_once, tokenizer_digest
from quantpipe.evaluate.same_prompts import asked_texts, prompt_mismatches
from quantpipe.evaluate.suite import Suite, check_suite, load_suite, run_suite
from quantpipe.evidence.model_memory import memory_row
from quantpipe.formats.artifact import Artifact, verify
from quantpipe.formats.digests import MANIFEST_NAME, file_digest
from quantpipe.gate.judge import GateResult, Measurement
from quantpipe.gate.metrics import EXACT_CONFIDENCE
from quantpipe.gate.record import (
    DIVERGENCE_NAME,
    OUTPUTS_NAMES,
    RunContext,
    engine_digest,
    library_versions,
    machine_facts,
    utc_now,
    withdraw_verdict,
)
from quantpipe.gate.report import BenchRow, ParityRow
from quantpipe.recipe.schema import BenchSection, DivergenceSection, Recipe
from quantpipe.report import Reporter
from quantpipe.reporting.report import ReportParts, ReportSection
from quantpipe.reporting.sections.bench import bench_section
from quantpipe.reporting.sections.coverage import coverage_section
from quantpipe.reporting.sections.divergence import WindowKL, divergence_section
from quantpipe.reporting.sections.facts import parity_section, quantization_section
from quantpipe.reporting.sections.layers import layers_section
from quantpipe.reporting.sections.memory import memory_section
from quantpipe.sources.base_model import BaseModel
from quantpipe.verdict.rejudge import read_previous, source_of, with_previous, write_verdict
from quantpipe.verdict.results import Results, check_scopes, check_window_slices, judge_results
from quantpipe.verdict.stored import StoredRun, write_results

MAX_FAULTS_SHOWN = 5


@dataclass(frozen=True)
class Questions:
    """What both models will be asked, read and checked before anything long begins.

    ``texts`` are all of it as text, which no calibration row may overlap; none where nothing is calibrated. ``domains``
    says of each window what it is from; ``notes`` are sentences about what is not asked.
    """

    suite: Suite | None
    windows: Sequence[Sequence[int]]
    texts: tuple[EvalText, ...] = ()
    domains: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def by_domain(self) -> dict[str, list[Sequence[int]]]:
        """The windows of each domain."""
        found: dict[str, list[Sequence[int]]] = {name: [] for name in sorted(set(self.domains))}
        for name, window in zip(self.domains, self.windows, strict=True):
            found[name].append(window)
        return found

    def slices(self, patterns: Mapping[str, Mapping[str, str]]) -> tuple[dict[str, str], ...]:
        """The fields of each window, by a recipe's patterns of names."""
        return fields_of(self.domains, patterns)


@dataclass(frozen=True)
class Findings:
    """What was measured, for the gate, and besides for the report."""

    results: Results
    divergence: DivergenceResult | None = None
    bench: tuple[BenchRow, ...] = ()
    notes: tuple[str, ...] = ()


def read_questions(recipe: Recipe, tokenizer_folder: Path, write: WriteText | None = None) -> Questions:
    """Load the suite, and cut the held-out text or the rows that the calibration set holds out.

    ``write``: who writes the text of a set of ``kind: self``. DataError where anything is incomplete, an earlier
    release that limits are against included; RecipeError for a limit on a task that the suite has not, or a slice that
    no window has.
    """
    read_previous(recipe)
    section = recipe.evaluate
    if section is None:
        return Questions(None, ())
    suite, divergence = load_suite(section.suite), section.divergence
    check_suite(suite, tokenizer_folder)
    _check_tasks(recipe, suite)
    if divergence is None:
        return Questions(suite, (), _texts(recipe, suite, None))
    if divergence.text is None:
        questions = _of_held_out(recipe, suite, _held_out(recipe, divergence, tokenizer_folder, write))
        check_patterns(divergence.slices, questions.domains)
    else:
        empty = Questions(suite, (), _texts(recipe, suite, divergence.text))
        questions = windows_of_text(empty, divergence, tokenizer_folder)
    check_window_slices(recipe, questions.slices(divergence.slices))
    return questions


def _check_tasks(recipe: Recipe, suite: Suite) -> None:
    names = [task.name for task in suite.tasks]
    for number, entry in enumerate(recipe.limits):
        if entry.task is not None and entry.task not in names:
            raise RecipeError(f"gate[{number}].task: the suite has no task '{entry.task}'{suggest(entry.task, names)}")


def read_texts(recipe: Recipe, tokenizer_folder: Path, write: WriteText | None = None) -> tuple[EvalText, ...]:
    """The ``texts`` of ``read_questions``, for who asks no questions: whatever else is incomplete is left alone."""
    return read_compared(recipe, tokenizer_folder, write).texts


def read_compared(recipe: Recipe, tokenizer_folder: Path, write: WriteText | None = None) -> Questions:
    """What a calibration set is compared with: ``read_questions`` without windows of a text, which may be too short."""
    section = recipe.evaluate
    if section is None or recipe.calibration is None:
        return Questions(None, ())
    suite, divergence = load_suite(section.suite), section.divergence
    if divergence is None or divergence.text is not None:
        return Questions(suite, (), _texts(recipe, suite, None if divergence is None else divergence.text))
    return _of_held_out(recipe, suite, _held_out(recipe, divergence, tokenizer_folder, write))


def windows_of_text(questions: Questions, section: DivergenceSection, tokenizer_folder: Path) -> Questions:
    """``questions`` with windows of the section's text, if it names one. DataError where that is too short."""
    if section.text is None:
        return questions
    check_patterns(section.slices, [file.stem for file in text_files(section.text)])
    tokenizer = Tokenizer.open(tokenizer_folder)
    cut = named_windows(section.text, tokenizer, section.num_windows, section.window_tokens)
    return replace(questions, windows=[window for _, window in cut], domains=tuple(name for name, _ in cut))


def _of_held_out(recipe: Recipe, suite: Suite, held_out: HeldOut) -> Questions:
    windows = [window.token_ids for window in held_out.windows]
    domains = tuple(window.domain for window in held_out.windows)
    return Questions(suite, windows, (*_texts(recipe, suite, None), *held_out.texts), domains, held_out.notes)


def _texts(recipe: Recipe, suite: Suite, held_out_text: Path | None) -> tuple[EvalText, ...]:
    return () if recipe.calibration is None else tuple(eval_texts(suite, held_out_text))


def engine_config(recipe: Recipe, kv_dtype: str | None = None) -> EngineConfig:
    """The engine settings of a recipe; ``kv_dtype`` None follows the model folder's manifest."""
    return EngineConfig.of({**recipe.engine.model_dump(), "kv_dtype": kv_dtype})


def judge_candidate(
    recipe: Recipe,
    base: BaseModel,
    folder: Path,
    questions: Questions,
    parity: Sequence[ParityRow],
    quantization: Sequence[tuple[str, str]],
    commands: Sequence[str],
    output: Path,
    reporter: Reporter,
    cache: Path,
) -> GateResult:
    """Measure base and candidate side by side, judge, and write ``gate.json`` and the report under ``output``.

    The answers of both models go there too, and into ``cache``, where those of earlier runs are looked for. A candidate
    that differs from its manifest fails, whatever it scores. An earlier verdict is withdrawn first.
    """
    withdraw_verdict(output)
    artifact = Artifact.open(folder)
    baseline = Engine.open(base.folder, engine_config(recipe))
    candidate = Engine.open(folder, engine_config(recipe))
    for note in dict.fromkeys((*baseline.backend_notes, *candidate.backend_notes)):
        reporter.note(note)
    findings = _measure(recipe, base, baseline, candidate, folder, questions, output, reporter, cache)
    faults = manifest_faults(artifact)
    mismatches = None if faults is None else _counted_faults(artifact, faults)
    results = replace(findings.results, mismatches=mismatches)
    parts = ReportParts(
        _context(recipe, base, artifact, candidate, questions),
        notes=(
            *(faults or ())[:MAX_FAULTS_SHOWN],
            *_notes(base, baseline, candidate),
            *questions.notes,
            *findings.notes,
        ),
        sections=_sections(findings, artifact, base, (baseline, candidate), parity, quantization, output),
        data=data_digests(recipe, questions),
        commands=tuple(commands),
    )
    if findings.divergence is not None:
        write_divergence_json(output / DIVERGENCE_NAME, findings.divergence, artifact.digest)
    run = StoredRun(results, source_of(recipe, folder), parts)
    write_results(output, run)  # before they are judged: what was measured is not lost by a limit on nothing
    result = judge_results(recipe, with_previous(recipe, results))
    release = write_verdict(recipe, output, result, run)
    if release is not None:
        reporter.note(f"archived as {release.id} in {recipe.archive_folder}")
    return result


def _sections(
    findings: Findings,
    artifact: Artifact,
    base: BaseModel,
    engines: tuple[Engine, Engine],
    parity: Sequence[ParityRow],
    quantization: Sequence[tuple[str, str]],
    output: Path,
) -> tuple[ReportSection, ...]:
    """What the report shows besides the checks; ``engines`` are those of the baseline and of the candidate."""
    baseline, candidate = engines
    return (
        _divergence_section(findings.divergence),
        layers_section(artifact.manifest or {}),
        coverage_section(read_coverage(output)),
        bench_section(findings.bench),
        memory_section(
            (memory_row("candidate", artifact.folder, candidate), memory_row("baseline", base.folder, baseline))
        ),
        parity_section(parity),
        quantization_section(quantization),
    )


def _divergence_section(divergence: DivergenceResult | None) -> ReportSection:
    if divergence is None:
        return divergence_section(())
    positions = [(row.last, row.mean_kl, row.low, row.high) for row in divergence.positions]
    return divergence_section(divergence_facts(divergence), window_kls(divergence), positions)


def data_digests(recipe: Recipe, questions: Questions) -> dict[str, str]:
    """SHA-256 of what both models were asked: where two runs agree on one, the figures that rest on it compare."""
    found = {} if questions.suite is None else {"suite": questions.suite.digest}
    if questions.windows:
        windows = json.dumps([[int(token_id) for token_id in window] for window in questions.windows])
        found["held-out text"] = hashlib.sha256(windows.encode()).hexdigest()
    if recipe.bench is not None:
        found["bench"] = hashlib.sha256(recipe.bench.model_dump_json().encode()).hexdigest()
    return found


def _measure(
    recipe: Recipe,
    base: BaseModel,
    baseline: Engine,
    candidate: Engine,
    folder: Path,
    questions: Questions,
    output: Path,
    reporter: Reporter,
    cache: Path,
) -> Findings:
    bench: tuple[BenchRow, ...] = ()
    notes: tuple[str, ...] = ()
    divergence: DivergenceResult | None = None
    tokenizer = Tokenizer.open(base.folder)
    asked = asked_texts(questions.suite, questions.windows, tokenizer)
    prompts = prompt_mismatches(base.folder, folder, asked)
    results = Results(prompts=prompts, num_windows=len(questions.windows))
    if questions.windows:
        divergence = _divergence(recipe, base, baseline, candidate, questions, reporter, cache)
        results = replace(results, windows=divergence.windows, top_k=divergence.top_k)
    if questions.suite is not None:
        results = replace(results, num_items=questions.suite.num_items)
        try:
            found = _compared(recipe, base, baseline, candidate, folder, questions.suite, output, reporter, cache)
            results = replace(results, comparison=found)
        except OtherPromptsError as error:
            if prompts.value == 0:
                raise
            notes = (f"The suite's items are not compared. {error}",)  # a verdict, which is FAIL, says more
    if recipe.bench is not None:
        timed = _bench(recipe.bench, baseline, candidate, tokenizer, questions, reporter)
        results = replace(results, bench=paired_figures(timed.runs))
        bench = timed.summary()
    return Findings(results, divergence, bench, notes)


def _divergence(
    recipe: Recipe,
    base: BaseModel,
    baseline: Engine,
    candidate: Engine,
    questions: Questions,
    reporter: Reporter,
    cache: Path,
) -> DivergenceResult:
    section = recipe.evaluate.divergence if recipe.evaluate is not None else None
    slices = questions.slices({} if section is None else section.slices)
    is_stored = section is not None and section.reference == "stored"
    made_from = [base.digest, asdict(baseline.config), baseline.kv_dtype, library_versions()] if is_stored else None
    return measure_fidelity(baseline, candidate, questions.windows, slices, made_from, cache, reporter)


def _compared(
    recipe: Recipe,
    base: BaseModel,
    baseline: Engine,
    candidate: Engine,
    folder: Path,
    suite: Suite,
    output: Path,
    reporter: Reporter,
    cache: Path,
) -> Comparison:
    """Both models' answers to the suite, each asked by its own tokenizer and template."""
    reporter.stage(f"suite {suite.name}: {suite.num_items} items, base then candidate")
    base_result = _answers("baseline", baseline, base.folder, suite, output, reporter, cache)
    check_scopes(recipe, base_result.items)
    is_itself = Artifact.open(folder).digest == Artifact.open(base.folder).digest  # asked twice: do its answers stay?
    candidate_result = _answers("candidate", candidate, folder, suite, output, reporter, cache, is_itself)
    return compare(base_result, candidate_result)


def _bench(
    section: BenchSection,
    baseline: Engine,
    candidate: Engine,
    tokenizer: Tokenizer,
    questions: Questions,
    reporter: Reporter,
) -> BenchResult:
    reporter.stage(f"bench at concurrency {', '.join(map(str, section.concurrency))}, base and candidate in turns")
    text = [token_id for window in questions.windows for token_id in window]
    if len(text) < num_text_tokens(section):
        reporter.note("prompts are drawn from the vocabulary: the held-out text is too short to cut them from")
        special = [i for i in (tokenizer.bos_token_id, tokenizer.eos_token_id) if i is not None]
        text = list(vocabulary_text(tokenizer.vocab_size, special, 8 * num_text_tokens(section), section.seed))
    return run_bench({"baseline": baseline, "candidate": candidate}, section, text, reporter.progress)


def _answers(
    role: str,
    engine: Engine,
    folder: Path,
    suite: Suite,
    output: Path,
    reporter: Reporter,
    cache: Path,
    is_asked_anew: bool = False,
) -> SuiteResult:
    """One model's answers, asked for or found in the cache, and written beside the verdict."""
    settings = asdict(engine.config) | {
        "kv_dtype": engine.kv_dtype,
        "max_model_len": engine.max_model_len,
        "backend_notes": engine.backend_notes,
        "simd": machine_facts()["simd"],
    }
    model = Artifact.open(folder).digest
    asked = Asked(model, tokenizer_digest(folder), suite.digest, code_digest(), settings)
    tokenizer = Tokenizer.open(folder)
    if is_asked_anew:
        result, was_found = run_suite(engine, tokenizer, suite, reporter.progress), False
    else:
        result, was_found = run_suite_once(engine, tokenizer, suite, asked, cache / "evals", reporter.progress)
    if was_found:
        reporter.note(f"{role}: answers of an earlier run of the same model, engine and suite are used again")
    write_outputs(output / OUTPUTS_NAMES[role], suite, model, result)
    return result


def rescored(recipe: Recipe, outputs: Path, reporter: Reporter) -> list[str]:
    """Lines of a table: the answers saved in ``outputs`` scored as the recipe's suite says now, and the loss.

    DataError where there is no suite, no answers, or the suite has come to ask something else.
    """
    if recipe.evaluate is None:
        raise DataError(f"{recipe.name}: the recipe has no evaluate section; nothing was asked")
    suite = load_suite(recipe.evaluate.suite)
    base, cand = (rescore(outputs / OUTPUTS_NAMES[role], suite, reporter.progress) for role in OUTPUTS_NAMES)
    loss, num_items = compare(base, cand).loss(), Counter(item.task for item in base.items)
    cand_scores = cand.task_scores
    lines = [
        f"{task}: {num_items[task]} items, baseline {100 * score:.1f} %, candidate {100 * cand_scores[task]:.1f} %"
        for task, score in base.task_scores.items()
    ]
    return [*lines, f"{loss.name}: {loss.value:.2f} [{loss.low:.2f}, {loss.high:.2f}]; {loss.detail}"]


def window_kls(divergence: DivergenceResult) -> tuple[WindowKL, ...]:
    """The KL of each window beside the domain that it is from."""
    return tuple(WindowKL(w.fields.get(DOMAIN, ""), w.row.mean_kl, w.row.max_kl) for w in divergence.windows)


def manifest_faults(artifact: Artifact) -> list[str] | None:
    """Where the folder differs from its manifest; None for a folder that has none, such as a base model's."""
    return None if artifact.manifest is None else verify(artifact.folder)


def _counted_faults(artifact: Artifact, faults: Sequence[str]) -> Measurement:
    num_faults, manifest = len(faults), artifact.manifest or {}
    num_entries = len(manifest.get("tensors", {})) + len(manifest.get("files", {}))
    detail = faults[0] if faults else "every tensor and file is as it was written"
    return Measurement(
        "manifest_mismatches", num_faults, num_faults, num_faults, EXACT_CONFIDENCE, num_entries, "count", detail
    )


def _held_out(recipe: Recipe, section: DivergenceSection, tokenizer_folder: Path, write: WriteText | None) -> HeldOut:
    """Windows of the rows that the recipe's set holds out: the same for every seed of the calibration."""
    definition = set_of_recipe(recipe)
    if isinstance(definition, Path):
        raise DataError(
            f"{definition}: blocks that were built before have no held-out rows; name the set.yaml they were built from"
        )
    with tempfile.TemporaryDirectory(prefix="quantpipe-") as scratch:
        context = BuildContext(work_folder=Path(scratch), generate=write)
        return read_held_out(definition, tokenizer_folder, section.num_windows, section.window_tokens, context=context)


def _context(
    recipe: Recipe, base: BaseModel, artifact: Artifact, candidate: Engine, questions: Questions
) -> RunContext:
    settings = asdict(candidate.config) | {"kv_dtype": candidate.kv_dtype, "max_model_len": candidate.max_model_len}
    manifest, versions, now = artifact.folder / MANIFEST_NAME, library_versions(), utc_now()
    windows = json.dumps([list(map(int, window)) for window in questions.windows])
    return RunContext(
        recipe_name=recipe.name,
        recipe_digest=recipe.digest,
        artifact_digest=artifact.digest,
        base_digest=base.digest,
        base_origin=base.origin,
        engine=settings,
        versions=versions,
        machine=machine_facts(),
        date=now,
        suite_digest="" if questions.suite is None else questions.suite.digest,
        text_digest=hashlib.sha256(windows.encode()).hexdigest() if questions.windows else "",
        engine_digest=engine_digest(settings, versions),
        manifest_digest="" if artifact.manifest is None else file_digest(manifest),
        measured=now,
    )


def _notes(base: BaseModel, baseline: Engine, candidate: Engine) -> tuple[str, ...]:
    notes = list(dict.fromkeys((*baseline.backend_notes, *candidate.backend_notes)))
    if base.is_dequantized:
        notes.insert(
            0,
            f"The full-precision baseline is itself a dequantized GGUF ({base.origin}): every figure here is relative "
            "to that model, not to the original weights.",
        )
    return tuple(notes)

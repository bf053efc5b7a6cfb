"""Judging a candidate: evaluate and bench what is served, then the gate. Opens model folders from disk only.

The quantizer's model in memory is not reachable from here: what is judged is what will serve.
"""

import fnmatch
import hashlib
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from quantpipe.bench.latency import num_text_tokens, run_bench
from quantpipe.bench.workload import vocabulary_text
from quantpipe.cache import cache_folder
from quantpipe.calibration.calibration_set import BuildContext
from quantpipe.calibration.checks.leakage import EvalText
from quantpipe.calibration.definition.set_definition import set_of_recipe
from quantpipe.calibration.held_out.held_out_rows import HeldOut, read_held_out
from quantpipe.calibration.held_out.held_out_windows import SEVERAL
from quantpipe.calibration.samples.self_text import WriteText
from quantpipe.engine.config import EngineConfig
from quantpipe.engine.engine import Engine
from quantpipe.engine.tokenizer import Tokenizer
from quantpipe.errors import DataError, suggest
from quantpipe.evaluate.divergence import (
    DivergenceResult,
    measure_against,
    measure_divergence,
    named_windows,
    text_files,
)
from quantpipe.evaluate.eval_texts import eval_texts
from quantpipe.evaluate.fidelity.facts import divergence_facts
from quantpipe.evaluate.fidelity.figures import DOMAIN
from quantpipe.evaluate.fidelity.record import DIVERGENCE_NAME, write_divergence_json
from quantpipe.evaluate.fidelity.stored import stored_reference
from quantpipe.evaluate.items import SuiteResult
from quantpipe.evaluate.same_prompts import prompt_mismatches
from quantpipe.evaluate.suite import Suite, compare, load_suite, run_suite
from quantpipe.formats.artifact import Artifact, verify
from quantpipe.gate.judge import EXACT_CONFIDENCE, GateResult, Limit, Measurement, judge
from quantpipe.gate.record import (
    GATE_NAME,
    REPORT_NAME,
    RunContext,
    library_versions,
    machine_facts,
    utc_now,
    withdraw_verdict,
    write_gate_json,
    write_text_atomically,
)
from quantpipe.gate.report import BenchRow, ParityRow, ReportSections, ScoreRow, render_markdown
from quantpipe.recipe.schema import DivergenceSection, Recipe
from quantpipe.report import Reporter
from quantpipe.sources.base_model import BaseModel

MAX_FAULTS_SHOWN = 5
OF_ALL_WINDOWS = ("mean_kl", "p99_kl", "mean_kl_topk", "p99_kl_topk", "perplexity_ratio", "top1_agreement")


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
        """The fields of each window: its domain, and what ``patterns`` say of that; none of several domains'."""
        fields = {name: {DOMAIN: name} for name in self.domains if name != SEVERAL}
        for pattern, given in patterns.items():
            for name in fnmatch.filter(fields, pattern):
                fields[name] |= given
        return tuple(fields.get(name, {}) for name in self.domains)


@dataclass(frozen=True)
class Findings:
    """What was measured, for the gate and for the report."""

    measurements: tuple[Measurement, ...] = ()
    divergence: tuple[tuple[str, str], ...] = ()
    scores: tuple[ScoreRow, ...] = ()
    bench: tuple[BenchRow, ...] = ()
    divergence_result: DivergenceResult | None = None


def read_questions(recipe: Recipe, tokenizer_folder: Path, write: WriteText | None = None) -> Questions:
    """Load the suite, and cut the held-out text or the rows that the calibration set holds out.

    ``write``: who writes the text of a set of ``kind: self``. DataError where anything is incomplete.
    """
    section = recipe.evaluate
    if section is None:
        return Questions(None, ())
    suite, divergence = load_suite(section.suite), section.divergence
    if divergence is None:
        return Questions(suite, (), _texts(recipe, suite, None))
    if divergence.text is None:
        questions = _of_held_out(recipe, suite, _held_out(recipe, divergence, tokenizer_folder, write))
        _check_slices(divergence, questions.domains)
        return questions
    return windows_of_text(Questions(suite, (), _texts(recipe, suite, divergence.text)), divergence, tokenizer_folder)


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
    _check_slices(section, [file.stem for file in text_files(section.text)])
    tokenizer = Tokenizer.open(tokenizer_folder)
    cut = named_windows(section.text, tokenizer, section.num_windows, section.window_tokens)
    return replace(questions, windows=[window for _, window in cut], domains=tuple(name for name, _ in cut))


def _check_slices(section: DivergenceSection, names: Sequence[str]) -> None:
    """DataError for a pattern that no text's name fits."""
    for pattern in section.slices:
        if not fnmatch.filter(names, pattern):
            raise DataError(f"evaluate.divergence.slices: no text is called '{pattern}'{suggest(pattern, set(names))}")


def _of_held_out(recipe: Recipe, suite: Suite, held_out: HeldOut) -> Questions:
    windows = [window.token_ids for window in held_out.windows]
    domains = tuple(window.domain for window in held_out.windows)
    return Questions(suite, windows, (*_texts(recipe, suite, None), *held_out.texts), domains, held_out.notes)


def _texts(recipe: Recipe, suite: Suite, held_out_text: Path | None) -> tuple[EvalText, ...]:
    return () if recipe.calibration is None else tuple(eval_texts(suite, held_out_text))


def engine_config(recipe: Recipe, kv_dtype: str | None = None) -> EngineConfig:
    """The engine settings of a recipe; ``kv_dtype`` None follows the model folder's manifest."""
    section = recipe.engine
    return EngineConfig(
        backend=section.backend,
        kv_dtype=kv_dtype,
        max_model_len=section.max_model_len,
        max_num_seqs=section.max_num_seqs,
        max_num_batched_tokens=section.max_num_batched_tokens,
        kv_cache_memory=section.kv_cache_memory,
        memory_utilization=section.memory_utilization,
        prefix_cache=section.prefix_cache,
        policy=section.policy,
        admission=section.admission,
        batching=section.batching,
        static_wait_s=section.static_wait_s,
        max_prefill_chunk=section.max_prefill_chunk,
        max_long_prefills=section.max_long_prefills,
        long_prompt_tokens=section.long_prompt_tokens,
        target_step_s=section.target_step_s,
        speculative=section.speculative,
        num_draft_tokens=section.num_draft_tokens,
        window_tokens=section.window_tokens,
        sink_tokens=section.sink_tokens,
        num_threads=section.num_threads,
        activations=section.activations,
    )


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
) -> GateResult:
    """Measure base and candidate side by side, judge, and write ``gate.json`` and ``report.md`` under ``output``.

    A candidate that differs from its manifest fails, whatever it scores. An earlier verdict is withdrawn first.
    """
    withdraw_verdict(output)
    artifact = Artifact.open(folder)
    baseline = Engine.open(base.folder, engine_config(recipe))
    candidate = Engine.open(folder, engine_config(recipe))
    for note in dict.fromkeys((*baseline.backend_notes, *candidate.backend_notes)):
        reporter.note(note)
    findings = _measure(recipe, base, baseline, candidate, folder, questions, reporter)
    expected = dict.fromkeys(OF_ALL_WINDOWS, len(questions.windows))
    if questions.suite is not None:
        expected["accuracy_loss_points"] = questions.suite.num_items
    limits, measurements, faults = dict(recipe.gate), list(findings.measurements), manifest_faults(artifact)
    if faults is not None:
        limits.setdefault("manifest_mismatches", Limit(max=0.0))
        measurements.append(_counted_faults(artifact, faults))
    limits.setdefault("prompt_mismatches", Limit(max=0.0))
    measurements.append(prompt_mismatches(base.folder, folder, _asked_texts(questions, base.folder)))
    result = judge(limits, measurements, expected)
    context = _context(recipe, base, artifact, candidate)
    sections = ReportSections(
        context,
        notes=(*(faults or ())[:MAX_FAULTS_SHOWN], *_notes(base, baseline, candidate), *questions.notes),
        divergence=findings.divergence,
        scores=findings.scores,
        bench=findings.bench,
        parity=parity,
        quantization=quantization,
        commands=commands,
    )
    if findings.divergence_result is not None:
        write_divergence_json(output / DIVERGENCE_NAME, findings.divergence_result, context.artifact_digest)
    write_gate_json(output / GATE_NAME, result, context)
    write_text_atomically(output / REPORT_NAME, render_markdown(result, sections))
    return result


def _measure(
    recipe: Recipe,
    base: BaseModel,
    baseline: Engine,
    candidate: Engine,
    folder: Path,
    questions: Questions,
    reporter: Reporter,
) -> Findings:
    measurements: list[Measurement] = []
    facts: tuple[tuple[str, str], ...] = ()
    divergence: DivergenceResult | None = None
    scores: tuple[ScoreRow, ...] = ()
    bench: tuple[BenchRow, ...] = ()
    tokenizer = Tokenizer.open(folder)
    if questions.windows:
        reporter.stage(f"divergence on {len(questions.windows)} windows of {len(questions.windows[0])} tokens")
        divergence = _divergence(recipe, base, baseline, candidate, questions, reporter)
        measurements += divergence.measurements
        facts = divergence_facts(divergence)
    if questions.suite is not None:
        reporter.stage(f"suite {questions.suite.name}: {questions.suite.num_items} items, base then candidate")
        base_result = run_suite(baseline, tokenizer, questions.suite, reporter.progress)
        candidate_result = run_suite(candidate, tokenizer, questions.suite, reporter.progress)
        measurements.append(compare(base_result, candidate_result))
        scores = score_rows(base_result, candidate_result)
    if recipe.bench is not None:
        levels = ", ".join(str(c) for c in recipe.bench.concurrency)
        reporter.stage(f"bench at concurrency {levels}, base and candidate in turns")
        text = [token_id for window in questions.windows for token_id in window]
        if len(text) < num_text_tokens(recipe.bench):
            reporter.note("prompts are drawn from the vocabulary: the held-out text is too short to cut them from")
            special = [i for i in (tokenizer.bos_token_id, tokenizer.eos_token_id) if i is not None]
            length = 8 * num_text_tokens(recipe.bench)
            text = list(vocabulary_text(tokenizer.vocab_size, special, length, recipe.bench.seed))
        timed = run_bench({"baseline": baseline, "candidate": candidate}, recipe.bench, text, reporter.progress)
        measurements += timed.measurements
        bench = timed.summary()
    return Findings(tuple(measurements), facts, scores, bench, divergence)


def _divergence(
    recipe: Recipe,
    base: BaseModel,
    baseline: Engine,
    candidate: Engine,
    questions: Questions,
    reporter: Reporter,
) -> DivergenceResult:
    """Against the base model as it runs, or as it is stored: the recipe says which, so that like meets like."""
    section = recipe.evaluate.divergence if recipe.evaluate is not None else None
    slices = questions.slices({} if section is None else section.slices)
    if section is None or section.reference == "run":
        return measure_divergence(baseline, candidate, questions.windows, progress=reporter.progress, slices=slices)
    made_from = [base.digest, asdict(baseline.config), baseline.kv_dtype, library_versions()]
    reference = stored_reference(baseline, made_from, questions.windows, cache_folder(), reporter)
    return measure_against(reference, candidate, questions.windows, progress=reporter.progress, slices=slices)


def _asked_texts(questions: Questions, tokenizer_folder: Path) -> list[str]:
    """What the models are asked, as text: the strings of the suite's items, and the windows."""
    tokenizer = Tokenizer.open(tokenizer_folder)
    docs = [] if questions.suite is None else [doc for task in questions.suite.tasks for doc in task.docs]
    fields = [value for doc in docs for value in doc.values() if isinstance(value, str)]
    return list(dict.fromkeys([*fields, *(tokenizer.decode(window) for window in questions.windows)]))


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


def score_rows(base: SuiteResult, candidate: SuiteResult) -> tuple[ScoreRow, ...]:
    """Right items per domain, and how many flipped each way."""
    rows = []
    pairs = list(zip(base.items, candidate.items, strict=True))
    for domain in dict.fromkeys(item.domain for item in base.items):
        chosen = [(b.correct, c.correct) for b, c in pairs if b.domain == domain]
        rows.append(
            ScoreRow(
                domain,
                len(chosen),
                sum(b for b, _ in chosen),
                sum(c for _, c in chosen),
                sum(b and not c for b, c in chosen),
                sum(c and not b for b, c in chosen),
            )
        )
    return tuple(rows)


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


def _context(recipe: Recipe, base: BaseModel, artifact: Artifact, candidate: Engine) -> RunContext:
    settings = asdict(candidate.config) | {"kv_dtype": candidate.kv_dtype, "max_model_len": candidate.max_model_len}
    recipe_text = "\n".join((recipe.source_text, *recipe.overrides))
    return RunContext(
        recipe_name=recipe.name,
        recipe_digest=hashlib.sha256(recipe_text.encode()).hexdigest(),
        artifact_digest=artifact.digest,
        base_digest=base.digest,
        base_origin=base.origin,
        engine=settings,
        versions=library_versions(),
        machine=machine_facts(),
        date=utc_now(),
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

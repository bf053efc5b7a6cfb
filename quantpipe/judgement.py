"""Judging a candidate: evaluate and bench what is served, then the gate. Opens model folders from disk only.

The quantizer's model in memory is not reachable from here: what is judged is what will serve.
"""

import hashlib
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from quantpipe.bench.latency import num_text_tokens, run_bench
from quantpipe.bench.workload import vocabulary_text
from quantpipe.calibration.calibration_set import BuildContext
from quantpipe.calibration.checks.leakage import EvalText
from quantpipe.calibration.definition.set_definition import set_of_recipe
from quantpipe.calibration.held_out.held_out_rows import HeldOut, read_held_out
from quantpipe.calibration.samples.self_text import WriteText
from quantpipe.engine.config import EngineConfig
from quantpipe.engine.engine import Engine
from quantpipe.engine.tokenizer import Tokenizer
from quantpipe.errors import DataError
from quantpipe.evaluate.divergence import DivergenceResult, measure_divergence, named_windows
from quantpipe.evaluate.eval_texts import eval_texts
from quantpipe.evaluate.items import SuiteResult
from quantpipe.evaluate.outputs import OUTPUTS_NAMES, rescore, write_outputs
from quantpipe.evaluate.result_cache import Asked, code_digest, run_suite_once, tokenizer_digest
from quantpipe.evaluate.suite import Suite, check_suite, compare, load_suite
from quantpipe.formats.artifact import Artifact, verify
from quantpipe.gate.judge import GateResult, Limit, Measurement, judge
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
EXACT_CONFIDENCE = 0.99  # a count has no sampling error; the gate asks for some confidence below 1


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


@dataclass(frozen=True)
class Findings:
    """What was measured, for the gate and for the report."""

    measurements: tuple[Measurement, ...] = ()
    divergence: tuple[tuple[str, str], ...] = ()
    scores: tuple[ScoreRow, ...] = ()
    bench: tuple[BenchRow, ...] = ()


def read_questions(recipe: Recipe, tokenizer_folder: Path, write: WriteText | None = None) -> Questions:
    """Load the suite, and cut the held-out text or the rows that the calibration set holds out.

    ``write``: who writes the text of a set of ``kind: self``. DataError where anything is incomplete.
    """
    section = recipe.evaluate
    if section is None:
        return Questions(None, ())
    suite, divergence = load_suite(section.suite), section.divergence
    check_suite(suite, tokenizer_folder)
    if divergence is None:
        return Questions(suite, (), _texts(recipe, suite, None))
    if divergence.text is None:
        return _of_held_out(recipe, suite, _held_out(recipe, divergence, tokenizer_folder, write))
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
    cache: Path,
) -> GateResult:
    """Measure base and candidate side by side, judge, and write ``gate.json`` and ``report.md`` under ``output``.

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
    expected = dict.fromkeys(("mean_kl", "perplexity_ratio", "top1_agreement"), len(questions.windows))
    if questions.suite is not None:
        expected["accuracy_loss_points"] = questions.suite.num_items
    limits, measurements, faults = dict(recipe.gate), list(findings.measurements), manifest_faults(artifact)
    if faults is not None:
        limits.setdefault("manifest_mismatches", Limit(max=0.0))
        measurements.append(_counted_faults(artifact, faults))
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
    output: Path,
    reporter: Reporter,
    cache: Path,
) -> Findings:
    measurements: list[Measurement] = []
    facts: tuple[tuple[str, str], ...] = ()
    scores: tuple[ScoreRow, ...] = ()
    bench: tuple[BenchRow, ...] = ()
    tokenizer = Tokenizer.open(folder)
    if questions.windows:
        reporter.stage(f"divergence on {len(questions.windows)} windows of {len(questions.windows[0])} tokens")
        divergence = measure_divergence(baseline, candidate, questions.windows, progress=reporter.progress)
        measurements += divergence.measurements
        facts = divergence_facts(divergence)
    if questions.suite is not None:
        reporter.stage(f"suite {questions.suite.name}: {questions.suite.num_items} items, base then candidate")
        asked = {"baseline": (baseline, base.folder), "candidate": (candidate, folder)}
        base_result, candidate_result = (
            _answers(role, *asked[role], folder, questions.suite, output, reporter, cache) for role in asked
        )
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
    return Findings(tuple(measurements), facts, scores, bench)


def _answers(
    role: str,
    engine: Engine,
    folder: Path,
    tokenizer_folder: Path,
    suite: Suite,
    output: Path,
    reporter: Reporter,
    cache: Path,
) -> SuiteResult:
    """One model's answers, asked for or found in the cache, and written beside the verdict."""
    settings = asdict(engine.config) | {
        "kv_dtype": engine.kv_dtype,
        "max_model_len": engine.max_model_len,
        "backend_notes": engine.backend_notes,
        "simd": machine_facts()["simd"],
    }
    model = Artifact.open(folder).digest
    asked = Asked(model, tokenizer_digest(tokenizer_folder), suite.digest, code_digest(), settings)
    tokenizer = Tokenizer.open(tokenizer_folder)
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
    loss, num_items = compare(base, cand), Counter(item.task for item in base.items)
    cand_scores = cand.task_scores
    lines = [
        f"{task}: {num_items[task]} items, baseline {100 * score:.1f} %, candidate {100 * cand_scores[task]:.1f} %"
        for task, score in base.task_scores.items()
    ]
    return [*lines, f"{loss.name}: {loss.value:.2f} [{loss.low:.2f}, {loss.high:.2f}]; {loss.detail}"]


def divergence_facts(divergence: DivergenceResult) -> tuple[tuple[str, str], ...]:
    """What the report says beside the means that the gate looks at."""
    return (
        ("perplexity", f"baseline {divergence.base_perplexity:.3f}, candidate {divergence.cand_perplexity:.3f}"),
        ("KL per token, nats", f"median {divergence.median_kl:.2g}, 99th percentile {divergence.p99_kl:.2g}"),
    )


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

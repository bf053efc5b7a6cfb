"""What ``quantpipe calibrate`` answers, as text for standard output.

Nothing here quotes a row, but for the samples that ``--show`` asks for, which are redacted whatever the set says.
"""

import json
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from quantpipe.calibrate.plan import Asked, Plan, build_plan, plan_of
from quantpipe.calibration import CalibrationSet, account_table
from quantpipe.calibration.definition.set_definition import SetDefinition
from quantpipe.calibration.held_out.held_out_rows import read_held_out
from quantpipe.calibration.stored.built import require_own_folder, write_built
from quantpipe.calibration.views.coverage import HeldOutIds, measure_coverage, render_text
from quantpipe.calibration.views.overview import overview, overview_table
from quantpipe.calibration.views.preview import Shown, preview_text, show_document
from quantpipe.errors import DataError, RecipeError
from quantpipe.report import Reporter

if TYPE_CHECKING:
    from quantpipe.engine.tokenizer import Tokenizer
    from quantpipe.quantize.activation_coverage import ActivationCoverage

HELD_OUT_WINDOWS, HELD_OUT_TOKENS = 32, 128


def build_set(asked: Asked, out: Path | None, cache_folder: Path, reporter: Reporter) -> str:
    """Build a set, write it to ``out`` if that is given, and say what became of every source."""
    plan = plan_of(asked, cache_folder)
    if not isinstance(plan.definition, SetDefinition):
        raise RecipeError(f"{plan.definition}: its blocks are built already; give the folder with set.yaml")
    if out is not None:
        require_own_folder(out)
    calibration = build_plan(plan, reporter)
    lines = [account_table(calibration.account), "", _summary(calibration)]
    if out is None:
        return "\n".join([*lines, "nothing is written; --out FOLDER keeps the blocks"])
    write_built(out, calibration)
    return "\n".join([*lines, f"written to {out}; a recipe's calibration.set may name it"])


def inspect_set(
    asked: Asked, num_shown: int, with_activations: bool, as_json: bool, cache_folder: Path, reporter: Reporter
) -> str:
    """Say what is in a set and what it covers; without a model only rows and characters. Writes nothing."""
    plan = plan_of(asked, cache_folder)
    if plan.model is None:
        return _rows_only(plan, num_shown, with_activations, as_json, reporter)
    calibration = build_plan(plan, reporter)
    shown = _shown(plan, calibration, num_shown)
    held_out = _held_out(plan, reporter)
    coverage = measure_coverage(calibration, _tokenizer(plan).vocab_size, held_out)
    activations = _activations(plan, calibration, held_out, reporter) if with_activations else None
    if as_json:
        record = {
            "name": calibration.name,
            "digest": calibration.digest,
            "num_sequences": len(calibration.token_ids),
            "sequence_length": calibration.token_ids.shape[1],
            "account": [asdict(account) for account in calibration.account],
            "coverage": coverage.to_json(),
            "activations": None if activations is None else activations.to_json(),
            "notes": list(calibration.notes),
        }
        return _json(record, shown)
    parts = [account_table(calibration.account), _summary(calibration), render_text(coverage)]
    if activations is not None:
        from quantpipe.calibrate.coverage.coverage_report import activation_summary

        parts.append("\n".join(activation_summary(activations)))
    parts.append(preview_text(shown))
    return "\n\n".join(part for part in parts if part)


def _rows_only(plan: Plan, num_shown: int, with_activations: bool, as_json: bool, reporter: Reporter) -> str:
    if with_activations:
        raise RecipeError("calibrate inspect --activations: runs a model; give it with --model or --recipe")
    if not isinstance(plan.definition, SetDefinition):
        raise RecipeError(f"{plan.definition}: holds blocks of tokens; give the model they are for with --model")
    if plan.is_self_written:
        raise RecipeError(f"{plan.definition.name}: kind self is text that a model writes; give it with --model")
    reporter.stage(f"read {plan.definition.name}")
    with plan.context(reporter) as context:
        found = overview(plan.definition, plan.section.seed, num_shown, context, reporter.progress)
    if as_json:
        return _json({"name": found.name, "sources": [asdict(source) for source in found.sources]}, found.shown)
    parts = [overview_table(found.sources), preview_text(found.shown)]
    return "\n\n".join(part for part in parts if part)


def _tokenizer(plan: Plan) -> "Tokenizer":
    from quantpipe.engine.tokenizer import Tokenizer

    return Tokenizer.open(plan.tokenizer_folder())


def _activations(
    plan: Plan, calibration: CalibrationSet, held_out: HeldOutIds, reporter: Reporter
) -> "ActivationCoverage":
    """What the whole model's linears read of the blocks and of the held-out rows."""
    from quantpipe.calibrate.coverage.run_coverage import observe
    from quantpipe.quantize.by_recipe import open_model

    trust = plan.model is not None and plan.model.trust_remote_code
    model = open_model(plan.resolve_base().folder, trust)
    reporter.stage("coverage: activations of the full-precision model")
    with tempfile.TemporaryDirectory(prefix="quantpipe-") as scratch:
        return observe(model, calibration, held_out, Path(scratch) / "activations", reporter)


def _held_out(plan: Plan, reporter: Reporter) -> dict[str, list[tuple[int, ...]]]:
    definition = plan.definition
    if not isinstance(definition, SetDefinition) or definition.header.holdout is None:
        return {}
    try:
        with plan.context(reporter) as context:
            found = read_held_out(definition, plan.tokenizer_folder(), *_window_numbers(plan), context)
    except DataError as error:
        reporter.note(f"held-out rows are not looked at: {error}")
        return {}
    for note in found.notes:
        reporter.note(note)
    return found.by_domain()


def _window_numbers(plan: Plan) -> tuple[int, int]:
    """How many windows of how many tokens: those of the recipe, where it evaluates on what the set holds out."""
    evaluate = plan.recipe.evaluate if plan.recipe is not None else None
    divergence = evaluate.divergence if evaluate is not None else None
    if divergence is None or not divergence.holdout:
        return HELD_OUT_WINDOWS, HELD_OUT_TOKENS
    return divergence.num_windows, divergence.window_tokens


def _shown(plan: Plan, calibration: CalibrationSet, num_shown: int) -> tuple[Shown, ...]:
    """The first samples of the blocks, as text."""
    if not num_shown:
        return ()
    tokenizer = _tokenizer(plan)
    definition = plan.definition if isinstance(plan.definition, SetDefinition) else None
    return tuple(
        show_document(document, tokenizer.decode(token_ids), definition, plan.section.seed)
        for document, token_ids in _documents(calibration, num_shown)
    )


def _documents(calibration: CalibrationSet, num_wanted: int) -> Iterator[tuple[Any, list[int]]]:
    flat, start = np.ravel(calibration.token_ids), 0
    for document in calibration.documents[:num_wanted]:
        yield document, flat[start : start + document.num_tokens_used].tolist()
        start += document.num_tokens_used


def _summary(calibration: CalibrationSet) -> str:
    num_sequences, sequence_length = calibration.token_ids.shape
    return (
        f"{calibration.name}: {num_sequences} x {sequence_length} = {calibration.token_ids.size:,} tokens, "
        f"digest {calibration.digest[:12]}"
    )


def _json(record: dict[str, Any], shown: Sequence[Shown]) -> str:
    samples = {"samples": [asdict(each) for each in shown]} if shown else {}
    return json.dumps(record | samples, indent=2, ensure_ascii=False, allow_nan=False)

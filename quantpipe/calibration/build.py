"""From a set to a CalibrationSet: read, choose, pack, and say what became of every source."""

from collections.abc import Iterator
from pathlib import Path

from quantpipe.calibration.calibration_set import Budget, BuildContext, CalibrationSet, Document, digest_blocks
from quantpipe.calibration.checks.leakage import LeakageIndex
from quantpipe.calibration.definition.set_definition import SetDefinition, load_set
from quantpipe.calibration.redaction import open_redactor
from quantpipe.calibration.redaction.placeholders import placeholder_key, read_secret
from quantpipe.calibration.rows import RowProblems
from quantpipe.calibration.sampling.accounting import dropped_rows, source_accounts
from quantpipe.calibration.sampling.candidates import Candidate, Candidates
from quantpipe.calibration.sampling.cells import Cell, PoolTooSmallError
from quantpipe.calibration.sampling.packing import Packed, Piece, pack, pack_separately, truncate
from quantpipe.calibration.sampling.selection import Selection, select
from quantpipe.calibration.sampling.set_renderer import open_renderer
from quantpipe.calibration.sampling.shortfall import check_size, counted, require_rows
from quantpipe.calibration.sampling.survey import Survey, pool_chars, survey
from quantpipe.calibration.stored.manifest import BuildRequest, calibration_manifest, row_hash, shown_path
from quantpipe.calibration.templates.renderer import Renderer
from quantpipe.errors import DataError
from quantpipe.report import Progress, no_progress
from quantpipe.wording import count_of

FEW_SAMPLES = 16
MANY_BAD_FRAC = 0.1
MIN_MEAN_TOKENS = 16
POOL_GROWTH = 4
MOST_POOL_CHARS = 1 << 29  # larger pools would not be flat memory any more


def build_calibration(
    set: SetDefinition | Path,
    tokenizer_folder: Path,
    budget: Budget,
    seed: int = 0,
    allow_shortfall: bool = False,
    progress: Progress = no_progress,
    context: BuildContext = BuildContext(),  # noqa: B008  # frozen and empty
) -> CalibrationSet:
    """Build exactly ``budget`` tokens of a set (or the set in this folder); the same arguments give the same bytes.

    Raises RecipeError for a wrong ``set.yaml``; DataError for unusable rows and for rows that overlap an evaluation
    text (unless the set or the context says to drop them), and for a set with too few tokens unless
    ``allow_shortfall``, which then gives as many whole blocks as there are.
    """
    definition = load_set(set) if isinstance(set, Path) else set
    request = BuildRequest(definition, tokenizer_folder, budget, seed, allow_shortfall, context)
    renderer = open_renderer(definition, tokenizer_folder)
    leakage = LeakageIndex(context.eval_texts)
    scale = 1
    while True:
        found = survey(definition, leakage, budget.num_tokens, seed, context, progress, scale)
        found.problems.raise_if_any()
        if context.on_leakage == "refuse":
            found.leaks.raise_if_any(definition.name)
        num_left = [sum(pool.num_rows for pool in pools.values()) for pools in found.pools]
        require_rows(definition, num_left, found.readings)
        try:
            return _finish(request, renderer, found)
        except PoolTooSmallError:
            scale *= POOL_GROWTH
            if scale * pool_chars(budget.num_tokens) > MOST_POOL_CHARS:
                raise DataError(_endless(definition, found)) from None


def _endless(definition: SetDefinition, found: Survey) -> str:
    num_held = sum(len(pool) for pools in found.pools for pool in pools.values())
    return (
        f"{definition.place}: {num_held:,} rows do not fill the budget, so nearly all are dropped (as duplicates, "
        "as too short for packing: truncate, by the cap on groups), and more do not fit in memory; lower "
        "calibration.num_sequences, or change near_duplicates, packing or max_group_frac"
    )


def _finish(request: BuildRequest, renderer: Renderer, found: Survey) -> CalibrationSet:
    """Choose, pack and account for. Raises PoolTooSmallError where rows are needed that the pools lack."""
    definition, budget = request.definition, request.budget
    header = definition.header
    unit = budget.sequence_length if header.packing == "truncate" else 1
    cells = [
        [Cell(index, stratum, pools[stratum], unit) for stratum in sorted(pools)]
        for index, pools in enumerate(found.pools)
    ]
    redactors = [
        open_redactor(header.redact, definition.folder, definition.name, request.seed) for _ in definition.sources
    ]
    problems = RowProblems(is_dropping=header.bad_rows == "drop")
    candidates = Candidates(definition, renderer, redactors, problems, least_tokens=unit)
    selection = select(definition, cells, candidates, budget.num_tokens, unit)
    candidates.raise_if_refused()
    candidates.raise_if_none_survived()
    drops = [dropped_rows(*each) for each in zip(found.readings, candidates.tallies, strict=True)]
    check_size(definition, selection, budget, request.allow_shortfall, drops)
    packed = _pack(header.packing, selection, budget.sequence_length, renderer.eos)
    used = [(selection.chosen[piece.index][0], piece) for piece in packed.pieces]
    accounts = source_accounts(definition.sources, found.readings, cells, candidates, selection, used)
    documents = tuple(_document(definition, candidate, piece) for candidate, piece in used)
    digest = digest_blocks(packed.token_ids, packed.position_ids)
    key = _key(definition, request.seed)
    row_hashes = [row_hash(candidate.text_digest, key) for candidate, _ in used]
    return CalibrationSet(
        name=definition.name,
        token_ids=packed.token_ids,
        num_sequences_asked=budget.num_sequences,
        account=accounts,
        digest=digest,
        notes=(
            *_bad_rows(definition, found, candidates),
            *selection.notes,
            *_notes(packed, budget, renderer),
        ),
        position_ids=packed.position_ids,
        documents=documents,
        manifest=calibration_manifest(
            request, found.readings, accounts, documents, row_hashes, digest, len(packed.token_ids)
        ),
    )


def _pack(packing: str, selection: Selection, sequence_length: int, eos: int) -> Packed:
    pieces = [Piece(i, candidate.token_ids, taken) for i, (candidate, taken) in enumerate(selection.chosen)]
    if packing == "truncate":
        return truncate(pieces, sequence_length)
    return (pack_separately if packing == "separate" else pack)(pieces, sequence_length, eos)


def _document(definition: SetDefinition, candidate: Candidate, piece: Piece) -> Document:
    return Document(
        shown_path(candidate.where, definition.folder),
        definition.sources[candidate.source].label,
        candidate.domain,
        candidate.language,
        len(candidate.token_ids),
        piece.num_taken,
    )


def _key(definition: SetDefinition, seed: int) -> bytes:
    """The key of the rows' hashes: that of the placeholders."""
    key_file = definition.header.redact.key_file
    return placeholder_key(definition.name, seed, read_secret(definition.folder / key_file) if key_file else b"")


def _bad_rows(definition: SetDefinition, found: Survey, candidates: Candidates) -> Iterator[str]:
    for source, reading, tally in zip(definition.sources, found.readings, candidates.tallies, strict=True):
        bad = dict(sorted((reading.bad + tally.bad).items()))
        if sum(bad.values()) > MANY_BAD_FRAC * reading.num_rows:
            text = f"{source.label}: {sum(bad.values()):,} of {reading.num_rows:,} rows are dropped as bad"
            yield f"calibration: {text} ({counted(bad)}); correct the file, or what the set says of it"


def _notes(packed: Packed, budget: Budget, renderer: Renderer) -> Iterator[str]:
    num_built, num_used = len(packed.token_ids), len(packed.pieces)
    if num_built < budget.num_sequences:
        yield f"calibration: {num_built} of {budget.num_sequences} sequences, as allow_shortfall permits"
    if num_used < FEW_SAMPLES:
        samples, texts = ("sample", "this one text") if num_used == 1 else ("different samples", "these few texts")
        yield f"calibration: only {num_used} {samples}; statistics will follow {texts}"
    mean_tokens = packed.token_ids.size / num_used
    if mean_tokens < MIN_MEAN_TOKENS:
        yield f"calibration: samples are very short ({mean_tokens:.1f} tokens on average); give longer ones"
    for num, end, token in ((renderer.num_double_bos, "began", "BOS"), (renderer.num_double_eos, "ended", "EOS")):
        if num:
            yield f"calibration: {count_of(num, 'samples')} {end} with more than one {token}; one was kept"

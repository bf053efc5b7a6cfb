"""The first pass over a set: every row is read once, and each source's strata keep their candidates.

Memory follows the budget, not the number of rows. What needs a row only by itself is decided here: whether it is held
out, whether it overlaps an evaluation text, which stratum it belongs to. Knows no tokens.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from quantpipe.calibration.calibration_set import BuildContext
from quantpipe.calibration.checks.holdout import holdout_key, is_held_out
from quantpipe.calibration.checks.leakage import LeakageIndex, LeakReport
from quantpipe.calibration.definition.set_definition import SetDefinition
from quantpipe.calibration.rows import UNKNOWN_LANGUAGE, RowProblems, Sample, SourceReading, sample_text
from quantpipe.calibration.samples.sample_stream import read_samples
from quantpipe.calibration.sampling.pool import Pool, ranking
from quantpipe.calibration.sampling.selection import group_frac_of
from quantpipe.calibration.text.language import detect
from quantpipe.errors import DataError
from quantpipe.report import Progress

HELD_OUT, LEAKED, LIKE_HELD_OUT = "held out", "leaked", "like a held-out row"
CHARS_PER_TOKEN = 16  # pools hold about four times the text that the budget takes
MIN_POOL_CHARS = 1 << 20
MOST_STRATA = 64
LENGTH_BINS = ((200, "under 200 chars"), (1000, "200-999 chars"), (4000, "1000-3999 chars"))
LONGEST_BIN = "4000 chars and more"
Stratum = tuple[str, ...]


@dataclass
class Survey:
    """What the first pass found: a pool for each stratum of each source, what reading came to, and overlaps."""

    pools: list[dict[Stratum, Pool[Sample]]] = field(default_factory=list)
    readings: list[SourceReading] = field(default_factory=list)
    problems: RowProblems = field(default_factory=RowProblems)
    leaks: LeakReport = field(default_factory=LeakReport)


def survey(
    definition: SetDefinition,
    leakage: LeakageIndex,
    num_tokens: int,
    seed: int,
    context: BuildContext,
    progress: Progress,
    scale: int = 1,
) -> Survey:
    """Read the whole set. ``scale`` multiplies the pools' sizes, for a set that needs more than is usual."""
    found = Survey(problems=RowProblems(is_dropping=definition.header.bad_rows == "drop"))
    rank = ranking(seed)
    total_weight = sum(source.weight or 0.0 for source in definition.sources)
    for index, source in enumerate(progress(definition.sources, len(definition.sources), "calibration sources")):
        share = source.weight / total_weight if source.weight is not None else 1.0
        max_chars = scale * pool_chars(num_tokens * share)
        frac = group_frac_of(source)
        strata = _Strata(source.label, max_chars, int(frac * max_chars) if frac < 1.0 else None)
        reading = SourceReading()
        samples = read_samples(
            source, index, definition.folder, found.problems, reading, context.work_folder, seed, context.generate
        )
        if definition.header.holdout is not None or leakage.num_texts:
            samples = _usable(samples, definition, leakage, reading, found.leaks)
        stratum_of = _stratum_of(definition, index)
        for sample in samples:  # what stands here runs for every row
            text = sample_text(sample)
            # Of equal texts of two customers either may come first; the second is a duplicate then.
            key = text if sample.group is None else f"{text}\0{sample.group}"
            stratum: Stratum = ()
            if stratum_of is not None:
                sample, stratum = stratum_of(sample, text)
            strata.pool(stratum).offer(rank(key), sample, len(text), sample.group)
        found.pools.append(strata.pools)
        found.readings.append(reading)
    return found


def pool_chars(num_tokens: float) -> int:
    """The usual size of the pools from which this many tokens are taken."""
    return max(MIN_POOL_CHARS, int(CHARS_PER_TOKEN * num_tokens))


def _usable(
    samples: Iterator[Sample],
    definition: SetDefinition,
    leakage: LeakageIndex,
    reading: SourceReading,
    leaks: LeakReport,
) -> Iterator[Sample]:
    """The samples that are neither held out nor evaluated on."""
    holdout, checks_leakage = definition.header.holdout, leakage.num_texts > 0
    for sample in samples:
        text = sample_text(sample)
        if holdout is not None and is_held_out(holdout_key(sample.group, text), holdout.salt, holdout.frac):
            reading.dropped[HELD_OUT] += 1
            continue
        leak = leakage.find(text, sample.group) if checks_leakage else None
        if leak is None:
            yield sample
        else:
            leaks.add(sample.where, leak)
            reading.dropped[LIKE_HELD_OUT if leak.is_held_out else LEAKED] += 1


@dataclass
class _Strata:
    """The pools of one source, made as strata are met. Raises DataError for more strata than can be meant."""

    label: str
    max_chars: int
    max_group_chars: int | None
    pools: dict[Stratum, Pool[Sample]] = field(default_factory=dict)

    def pool(self, stratum: Stratum) -> Pool[Sample]:
        found = self.pools.get(stratum)
        if found is None:
            if len(self.pools) == MOST_STRATA:
                raise DataError(
                    f"{self.label}: stratify makes more than {MOST_STRATA} strata of it; a field that it goes by has "
                    "too many different values, so choose another field or leave it out"
                )
            found = self.pools[stratum] = Pool(self.max_chars, self.max_group_chars)
        return found


def _stratum_of(definition: SetDefinition, index: int) -> Callable[[Sample, str], tuple[Sample, Stratum]] | None:
    """What says which stratum a sample is in, None where all are in one.

    Where that needs the sample's language, the sample comes back with it.
    """
    header = definition.header
    by, languages = header.stratify, header.languages
    detects = "language" in by and definition.sources[index].detects_language
    if not by:
        return None

    def stratum_of(sample: Sample, text: str) -> tuple[Sample, Stratum]:
        if detects and sample.language == UNKNOWN_LANGUAGE:
            sample = sample._replace(language=detect(text, languages))
        values = {"language": sample.language, "domain": sample.domain, "length": length_bin(len(text))}
        return sample, tuple(values[name] for name in by)

    return stratum_of


def length_bin(num_chars: int) -> str:
    """The length stratum of a text."""
    return next((name for below, name in LENGTH_BINS if num_chars < below), LONGEST_BIN)

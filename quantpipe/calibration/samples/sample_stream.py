"""The samples of one source: rows read, filtered and mapped, with a count of what was left out and why."""

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import assert_never

from quantpipe.calibration.definition.sources import DatasetSource, FileSource, PythonStdlibSource, SelfSource, Source
from quantpipe.calibration.readers import read_rows
from quantpipe.calibration.rows import EMPTY, FILTERED, RowError, RowProblems, Sample, SourceReading, leave_out
from quantpipe.calibration.samples.fields import to_sample
from quantpipe.calibration.samples.filters import keeps_row, keeps_sample
from quantpipe.calibration.samples.python_stdlib import read_python_stdlib
from quantpipe.calibration.samples.self_text import WriteText, read_self


def read_samples(
    source: Source,
    index: int,
    folder: Path,
    problems: RowProblems,
    seen: SourceReading,
    work_folder: Path | None = None,
    seed: int = 0,
    write: WriteText | None = None,
) -> Iterator[Sample]:
    """Yield the samples of the source with this index in its set; rows that are none are added to ``problems``.

    The arguments and errors are those of ``read_rows``; ``seed`` and ``write`` are for text that a model writes, and
    None refuses a source of it. A new kind is a case here and a line in ``sources.KINDS``.
    """
    match source:
        case FileSource() | DatasetSource():
            yield from _mapped(source, index, folder, problems, seen, work_folder)
        case PythonStdlibSource():
            seen.limit = source.limit
            for sample in islice(read_python_stdlib(source, index), source.limit):
                seen.num_rows += 1
                yield sample
        case SelfSource():
            yield from _written(source, index, seen, seed, write)
        case _:
            assert_never(source)


def _mapped(
    source: FileSource | DatasetSource,
    index: int,
    folder: Path,
    problems: RowProblems,
    seen: SourceReading,
    work_folder: Path | None,
) -> Iterator[Sample]:
    rules = source.filter
    has_rules = bool(rules.where or rules.exclude)
    for row in read_rows(source, folder, problems, seen, work_folder):
        if has_rules and not keeps_row(row, rules):
            seen.dropped[FILTERED] += 1
            continue
        try:
            sample = to_sample(row, source, index)
        except RowError as error:
            leave_out(row.where, error, problems, seen)
            continue
        if keeps_sample(sample, rules):
            yield sample
        else:
            seen.dropped[FILTERED] += 1


def _written(
    source: SelfSource, index: int, seen: SourceReading, seed: int, write: WriteText | None
) -> Iterator[Sample]:
    for where, text in read_self(source, seed, write):
        seen.num_rows += 1
        if text.content.strip() if isinstance(text.content, str) else text.content:
            yield Sample(where, text.content, index, language=text.language, domain=source.known_domain)
        else:
            seen.dropped[EMPTY] += 1

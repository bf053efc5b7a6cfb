"""Samples from the running Python: source code of its library, and the topics of its reference manual.

Nothing is imported or executed but the table of topics. The text follows the Python version; the set's digest tells.
"""

import importlib
import sys
import sysconfig
import tokenize
from collections.abc import Iterator
from pathlib import Path

from quantpipe.calibration.definition.sources import PythonStdlibSource
from quantpipe.calibration.rows import Sample
from quantpipe.errors import DataError


def read_python_stdlib(source: PythonStdlibSource, index: int = 0) -> Iterator[Sample]:
    """Yield samples sorted by module or topic, of the source with this index in its set.

    Raises DataError where this Python has no such text.
    """
    texts = _topics(source.exclude) if source.content == "topics" else _modules(source.exclude)
    for name, text in texts:
        chunks = list(split_at_blank_lines(text, source.chunk_chars))
        for place in evenly_spaced(len(chunks), source.chunks_per_name):
            where = f"{name}[{place}]"
            yield Sample(where, chunks[place], index, language=source.known_language, domain=source.known_domain)


def split_at_blank_lines(text: str, chunk_chars: int) -> Iterator[str]:
    """Cut into pieces of whole paragraphs, each as long as fits ``chunk_chars``; a longer paragraph stays whole."""
    piece = ""
    for paragraph in text.split("\n\n"):
        joined = f"{piece}\n\n{paragraph}" if piece else paragraph
        if len(joined) > chunk_chars and piece.strip():
            yield piece
            joined = paragraph
        piece = joined
    if piece.strip():
        yield piece


def evenly_spaced(num_all: int, num_wanted: int) -> list[int]:
    """At most ``num_wanted`` of the indices below ``num_all``, evenly spaced."""
    num_taken = min(num_all, num_wanted)
    return [(2 * i + 1) * num_all // (2 * num_taken) for i in range(num_taken)]


def _topics(exclude: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    try:
        topics: dict[str, str] = importlib.import_module("pydoc_data.topics").topics
    except ImportError as error:
        raise DataError("this Python has no pydoc_data.topics; use a full installation of Python") from error
    for name in sorted(topics):
        if name not in exclude:
            yield f"pydoc_data.topics:{name}", topics[name]


def _modules(exclude: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    library = Path(sysconfig.get_path("stdlib"))
    files = {name: file for root in sys.stdlib_module_names for name, file in _files(library, root)}
    if not files:
        raise DataError(f"{library}: holds no source of the standard library; use a full installation of Python")
    for name in sorted(files):
        if not any(name == left_out or name.startswith(f"{left_out}.") for left_out in exclude):
            with tokenize.open(files[name]) as opened:
                yield name, opened.read()


def _files(library: Path, root: str) -> Iterator[tuple[str, Path]]:
    """Every module of one top-level name, with its file."""
    if (library / f"{root}.py").is_file():
        yield root, library / f"{root}.py"
    for file in (library / root).rglob("*.py"):
        parts = file.relative_to(library).with_suffix("").parts
        yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), file

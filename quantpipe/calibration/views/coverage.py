"""What a built set covers, counted in tokens: domains, languages, lengths, vocabulary, and what was cut off.

Knows token ids and the labels of documents, no text. Held-out text is token ids by domain.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from quantpipe.calibration.calibration_set import CalibrationSet, Document
from quantpipe.wording import count_of

# Windows of held-out token ids by domain.
HeldOutIds = Mapping[str, Sequence[Sequence[int]]]

LENGTHS = (32, 64, 128, 256, 512, 1024, 2048, 4096)
MOST_SHOWN = 20
UNKNOWN_LANGUAGE = "und"


@dataclass(frozen=True)
class Share:
    """A part of the set: so many documents, and the tokens of them that were used."""

    name: str
    num_documents: int
    num_tokens: int


@dataclass(frozen=True)
class SeenShare:
    """Of a domain's held-out tokens, those whose id occurs among the calibrated ones; and of its different ids."""

    name: str
    num_tokens: int
    num_tokens_seen: int
    num_ids: int
    num_ids_seen: int


@dataclass(frozen=True)
class Coverage:
    """What is in the blocks. ``lengths`` are those of whole documents, before any was cut.

    A truncated document is one of which only the first tokens were used; ``num_tokens_cut`` are the others.
    """

    name: str
    num_tokens: int
    domains: tuple[Share, ...]
    languages: tuple[Share, ...]
    lengths: tuple[Share, ...]
    num_documents: int
    num_truncated: int
    num_tokens_cut: int
    vocabulary_size: int
    num_ids: int
    held_out: tuple[SeenShare, ...]

    def to_json(self) -> dict[str, Any]:
        """Plain data that JSON holds, with the shares that follow from the counts."""
        return asdict(self) | {"vocabulary_frac": _frac(self.num_ids, self.vocabulary_size)}


def measure_coverage(calibration: CalibrationSet, vocabulary_size: int, held_out: HeldOutIds) -> Coverage:
    """Count what the blocks of a set hold, and how much of the held-out tokens' vocabulary they saw."""
    documents, ids = calibration.documents, np.unique(calibration.token_ids)
    cut = [document.num_tokens - document.num_tokens_used for document in documents]
    return Coverage(
        name=calibration.name,
        num_tokens=int(calibration.token_ids.size),
        domains=_by_size(_shares(documents, lambda document: _line(document.domain or document.source))),
        languages=_by_size(_shares(documents, lambda document: _line(document.language))),
        lengths=_by_length(documents),
        num_documents=len(documents),
        num_truncated=sum(num > 0 for num in cut),
        num_tokens_cut=sum(cut),
        vocabulary_size=vocabulary_size,
        num_ids=len(ids),
        held_out=tuple(_seen(_line(name), windows, ids) for name, windows in held_out.items()),
    )


def render_text(coverage: Coverage) -> str:
    """The coverage as lines for a terminal."""
    return "\n".join(_lines(coverage))


def _lines(coverage: Coverage) -> Iterator[str]:
    yield f"{coverage.num_tokens:,} tokens of {count_of(coverage.num_documents, 'documents')}"
    for title, shares in (
        ("domain", coverage.domains),
        ("language", coverage.languages),
        ("tokens in a document", coverage.lengths),
    ):
        if [share.name for share in shares] == [UNKNOWN_LANGUAGE]:
            yield f"{title}: not known; give the sources a language, or language: auto"
            continue
        yield f"{title}:"
        yield from (f"  {line}" for line in share_lines(shares))
    yield vocabulary_sentence(coverage)
    yield truncation_sentence(coverage)
    for seen in coverage.held_out:
        yield f"held-out {seen.name}: {seen_sentence(seen)}"


def share_lines(shares: Sequence[Share]) -> list[str]:
    """One line for each of the largest shares, and one for the rest."""
    total = sum(share.num_tokens for share in shares)
    shown = [*shares]
    if len(shares) > MOST_SHOWN:
        rest = shares[MOST_SHOWN:]
        number, tokens = (sum(getattr(share, key) for share in rest) for key in ("num_documents", "num_tokens"))
        shown = [*shares[:MOST_SHOWN], Share(f"{len(rest)} more", number, tokens)]
    width = max((len(share.name) for share in shown), default=0)
    return [
        f"{share.name:<{width}}  {share.num_tokens:>11,} tokens  {_frac(share.num_tokens, total):>6.1%}  "
        f"{share.num_documents:>9,} document{'s' if share.num_documents != 1 else ''}"
        for share in shown
    ]


def vocabulary_sentence(coverage: Coverage) -> str:
    """How many of the tokenizer's ids occur."""
    return (
        f"vocabulary: {coverage.num_ids:,} of {coverage.vocabulary_size:,} ids occur "
        f"({_frac(coverage.num_ids, coverage.vocabulary_size):.1%})"
    )


def truncation_sentence(coverage: Coverage) -> str:
    """What was cut off."""
    return (
        f"truncated: {coverage.num_truncated:,} of {coverage.num_documents:,} documents, of which "
        f"{coverage.num_tokens_cut:,} tokens are not used"
    )


def seen_sentence(seen: SeenShare) -> str:
    """How much of a held-out domain's vocabulary was calibrated on."""
    return (
        f"{_frac(seen.num_tokens_seen, seen.num_tokens):.1%} of its {seen.num_tokens:,} tokens have an id that was "
        f"calibrated on ({seen.num_ids_seen:,} of {seen.num_ids:,} different ids)"
    )


def _shares(documents: Sequence[Document], name_of: Callable[[Document], str]) -> Iterator[Share]:
    num_documents, num_tokens = Counter[str](), Counter[str]()
    for document in documents:
        num_documents[name_of(document)] += 1
        num_tokens[name_of(document)] += document.num_tokens_used
    for name, number in num_documents.items():
        yield Share(name, number, num_tokens[name])


def _by_size(shares: Iterator[Share]) -> tuple[Share, ...]:
    return tuple(sorted(shares, key=lambda share: (-share.num_tokens, share.name)))


def _by_length(documents: Sequence[Document]) -> tuple[Share, ...]:
    order = [*map(_length_name, (*LENGTHS, LENGTHS[-1] + 1))]
    return tuple(
        sorted(_shares(documents, lambda each: _length_name(each.num_tokens)), key=lambda each: order.index(each.name))
    )


def _length_name(num_tokens: int) -> str:
    lowest = 1
    for most in LENGTHS:
        if num_tokens <= most:
            return f"{lowest} to {most}"
        lowest = most + 1
    return f"over {LENGTHS[-1]}"


def _seen(name: str, windows: Sequence[Sequence[int]], known: npt.NDArray[np.int64]) -> SeenShare:
    flat = np.concatenate([np.zeros(0, dtype=np.int64), *(np.asarray(window, dtype=np.int64) for window in windows)])
    ids = np.unique(flat)
    num_seen, num_ids_seen = (int(np.isin(each, known).sum()) for each in (flat, ids))
    return SeenShare(name, len(flat), num_seen, len(ids), num_ids_seen)


def _line(name: str) -> str:
    """A name that cannot break out of its line: it may come from a field of the user's rows."""
    return " ".join(name.split())


def _frac(part: int, whole: int) -> float:
    return part / whole if whole else 0.0

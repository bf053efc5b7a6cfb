"""What a build is asked for, what it may use, and what comes out of it. Builds nothing.

Shapes: S sequences, L sequence_length.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from quantpipe.calibration.account import SourceAccount
from quantpipe.calibration.samples.self_text import WriteText

if TYPE_CHECKING:
    from quantpipe.calibration.checks.leakage import EvalText

OnLeakage = Literal["refuse", "drop"]


@dataclass(frozen=True)
class Budget:
    """Exactly how many tokens are built: ``num_sequences`` blocks of ``sequence_length``."""

    num_sequences: int
    sequence_length: int

    @property
    def num_tokens(self) -> int:
        return self.num_sequences * self.sequence_length


@dataclass(frozen=True)
class BuildContext:
    """What surrounds a build: where libraries may cache, which evaluation texts it must not hold, who generates text.

    ``work_folder`` receives the caches of libraries and is emptied of them afterwards; None: a temporary folder.
    """

    work_folder: Path | None = None
    eval_texts: "Sequence[EvalText]" = ()
    on_leakage: OnLeakage = "refuse"
    generate: WriteText | None = None


@dataclass(frozen=True)
class Document:
    """One row in the blocks, in their order: laid end to end, the used tokens of all documents are the blocks.

    ``where`` is ``file:row``; ``source`` the label of its source; ``num_tokens`` its length before it was cut.
    """

    where: str
    source: str
    domain: str
    language: str
    num_tokens: int
    num_tokens_used: int


@dataclass(frozen=True, eq=False)
class CalibrationSet:
    """Token ids [S, L] to calibrate on, and where they came from.

    ``position_ids`` [S, L] restart at each document (packing: separate); None: they run through each sequence.
    ``digest`` identifies the blocks: it changes with any token or position, so it serves as the key of a cache.
    ``notes`` are sentences for the user about a set that is legal but weak; ``manifest`` is what the manifest
    file holds.
    """

    name: str
    token_ids: npt.NDArray[np.int64]
    num_sequences_asked: int
    account: tuple[SourceAccount, ...]
    digest: str
    notes: tuple[str, ...] = ()
    position_ids: npt.NDArray[np.int64] | None = None
    documents: tuple[Document, ...] = ()
    manifest: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_short(self) -> bool:
        """Whether fewer sequences came out than were asked for."""
        return len(self.token_ids) < self.num_sequences_asked


def digest_blocks(token_ids: npt.NDArray[np.int64], position_ids: npt.NDArray[np.int64] | None = None) -> str:
    """SHA-256 over the shape and the ids as little-endian 64-bit integers, token ids and then position ids."""
    shape = "x".join(str(size) for size in token_ids.shape)
    total = hashlib.sha256(f"{shape}\n".encode() + token_ids.astype("<i8").tobytes())
    if position_ids is not None:
        total.update(b"positions\n" + position_ids.astype("<i8").tobytes())
    return total.hexdigest()

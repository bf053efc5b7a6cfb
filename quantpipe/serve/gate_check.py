"""Whether a model folder may be served: an artifact of ours needs a passing verdict that is about its very files.

A folder without a manifest, such as a base model's, was made by somebody else: no gate of ours can have judged it, so
it is served, and that is said. Knows no torch.
"""

from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from quantpipe.errors import DataError, UngatedError
from quantpipe.formats.digests import MANIFEST_NAME, artifact_digest, file_digest
from quantpipe.gate.judge import GateResult, Verdict
from quantpipe.gate.record import GATE_NAME, RunContext, read_gate_json


@dataclass(frozen=True)
class FoundVerdict:
    """A verdict and the file it stands in."""

    path: Path
    result: GateResult
    context: RunContext

    def refusal(self) -> str | None:
        """Why it lets nothing be served; None where it does."""
        today = datetime.now(UTC).date()
        if self.result.verdict is not Verdict.PASS:
            return f"the verdict in {self.path} is {self.result.title}"
        for check in self.result.checks:
            waiver = check.entry.waiver
            if check.is_waived and waiver is not None and waiver.until < today:
                return f"the waiver of {check.entry.label} in {self.path} ended on {waiver.until}"
        return None


def find_verdict(folder: Path, is_verified: bool = False) -> FoundVerdict | None:
    """The verdict on what ``folder`` holds now, from ``gate.json`` beside it or in ``gate-<folder>`` beside it.

    The weights are hashed, unless ``is_verified``: whoever serves the folder checks its files against its manifest, so
    that it is enough if that is the one that was judged.
    """
    place = folder.resolve()
    for path in (place.parent / GATE_NAME, place.parent / f"gate-{place.name}" / GATE_NAME):
        try:
            if path.is_file():
                result, context = read_gate_json(path)
                if _is_about(context, folder, is_verified):
                    return FoundVerdict(path, result, context)
        except DataError:  # a damaged record, or folder: no verdict
            continue
    return None


def _is_about(context: RunContext, folder: Path, is_verified: bool) -> bool:
    manifest = folder / MANIFEST_NAME
    if is_verified and context.manifest_digest and manifest.is_file():
        return context.manifest_digest == file_digest(manifest)
    return context.artifact_digest == artifact_digest(folder)


def require_verdict(folder: Path, is_ungated_allowed: bool, is_verified: bool) -> str | None:
    """Let an artifact of ours be served only with a passing verdict. Returns a note for whoever starts the server.

    UngatedError where there is none, it did not pass, or a waiver it rests on has ended, unless
    ``is_ungated_allowed``: then the note says so. ``is_verified``: as of ``find_verdict``.
    """
    if not (folder / MANIFEST_NAME).is_file():
        return (
            f"{folder}: not made by quantpipe (no {MANIFEST_NAME}), so it needs no verdict" if folder.is_dir() else None
        )
    found = find_verdict(folder, is_verified)
    problem = f"no verdict on these files in {GATE_NAME} beside it" if found is None else found.refusal()
    if problem is None:
        return None
    if is_ungated_allowed:
        return f"{folder}: served ungated: {problem}"
    raise UngatedError(
        f"{folder}: {problem}; judge it (quantpipe run, or quantpipe gate RECIPE --artifact {folder}), or serve it "
        "with --allow-ungated"
    )

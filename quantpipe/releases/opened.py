"""A judged release by what it is called: a folder that a run wrote, a file in one, or a name in an archive."""

from dataclasses import dataclass
from pathlib import Path

from quantpipe.errors import DataError, suggest
from quantpipe.gate.record import GATE_NAME, read_gate_json
from quantpipe.releases.archive import INDEX_NAME, Release, read_index
from quantpipe.reporting.json_form import read_json
from quantpipe.reporting.report import Report, report_of

JSON_NAME = "report.json"


@dataclass(frozen=True)
class Judged:
    """A release and what it is called in a comparison."""

    name: str
    report: Report


def open_releases(names: tuple[str, ...], archive: Path) -> tuple[Judged, ...]:
    """All of them, in order; equal names get numbers. DataError where one is not found or damaged."""
    opened = [open_release(name, archive) for name in names]
    called: dict[str, int] = {}
    judged = []
    for each in opened:
        called[each.name] = called.get(each.name, 0) + 1
        number = called[each.name]
        judged.append(each if number == 1 else Judged(f"{each.name} ({number})", each.report))
    return tuple(judged)


def open_release(name: str, archive: Path) -> Judged:
    """One release. A path comes first; else ``name`` is an id of the archive, the beginning of one, or a recipe's
    name, which stands for its latest release."""
    path = Path(name)
    if path.is_dir():
        return Judged(path.resolve().name, _of_folder(path))
    if path.is_file():
        report = _of_gate(path) if path.name == GATE_NAME else read_json(path)
        return Judged(path.resolve().parent.name, report)
    release = _archived(name, archive)
    return Judged(release.id, read_json(archive / release.folder / JSON_NAME))


def _of_folder(folder: Path) -> Report:
    if (folder / JSON_NAME).is_file():
        return read_json(folder / JSON_NAME)
    if (folder / GATE_NAME).is_file():
        return _of_gate(folder / GATE_NAME)
    raise DataError(f"{folder}: holds neither {JSON_NAME} nor {GATE_NAME}; give the `output` of a run, or run it first")


def _of_gate(path: Path) -> Report:
    result, context = read_gate_json(path)
    return report_of(result, context)


def _archived(name: str, archive: Path) -> Release:
    if not (archive / INDEX_NAME).is_file():
        raise DataError(f"{name}: no such folder or file, and no archive in {archive}; give --archive to look by name")
    releases, _ = read_index(archive)
    of_recipe = [release for release in releases if release.recipe == name]
    if of_recipe:
        return of_recipe[-1]
    matching = {release.id: release for release in releases if release.id.startswith(name)}
    if len(matching) == 1:
        return next(iter(matching.values()))
    known = {name for release in releases for name in (release.recipe, release.id)}
    if matching:
        raise DataError(
            f"{name}: {len(matching)} releases in {archive} begin so, such as {next(iter(matching))}; say more"
        )
    raise DataError(f"{name}: no such folder or file, and no such release in {archive}{suggest(name, known)}")

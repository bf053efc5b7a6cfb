"""API keys: the file that lists them by their digests, who a request comes from, and each key's own prefix cache.

A line of the file is ``name: digest`` or ``name: digest, limit=number, ...``; both are YAML. A secret is 32 random
bytes, so that its plain SHA-256 cannot be turned back: the file holds no secrets.
"""

import hashlib
import hmac
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path

import yaml

from quantpipe.errors import DataError, suggest
from quantpipe.serve.admission.key_limits import KeyLimits, KeyUsage
from quantpipe.serve.admission.limits import RefusedError

PREFIX = "qp-"
NUM_SECRET_BYTES = 32
MAX_LIMIT = 10**12
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_COUNT = re.compile(r"[1-9][0-9]{0,12}")
_SALT_PURPOSE = b"quantpipe cache salt\0"


@dataclass(frozen=True)
class ApiKey:
    """One line of the file: whose key, the SHA-256 of its secret in hex, what it may use."""

    name: str
    digest: str
    limits: KeyLimits = field(default_factory=KeyLimits)


@dataclass(frozen=True)
class Tenant:
    """Whose request it is. ``secret`` is what they sent: it is kept as long as the request, and shown nowhere."""

    name: str
    usage: KeyUsage
    secret: str = field(repr=False)

    def cache_salt(self, own_salt: str) -> str:
        """The salt of their prefix cache, which nobody without the secret can name; of one part of it, ``own_salt``."""
        return hmac.new(self.secret.encode(), _SALT_PURPOSE + own_salt.encode(), hashlib.sha256).hexdigest()


class KeyRing:
    """All keys, and what each has used of its limits."""

    def __init__(self, keys: Sequence[ApiKey]) -> None:
        self._keys = tuple((key, KeyUsage(key.limits)) for key in keys)

    def tenant(self, authorization: str | None) -> Tenant:
        """Whose ``Authorization`` header this is. RefusedError (401) where it is nobody's.

        Every key is compared, in constant time each, so that the time says nothing about any of them.
        """
        scheme, _, secret = (authorization or "").strip().partition(" ")
        secret = secret.strip()
        if scheme.lower() != "bearer" or not secret:
            raise _unauthorized("an API key is needed here; send the header 'Authorization: Bearer KEY'")
        digest = digest_of(secret)
        found: Tenant | None = None
        for key, usage in self._keys:
            if hmac.compare_digest(key.digest, digest):
                found = Tenant(key.name, usage, secret)
        if found is None:
            raise _unauthorized("this API key is not known here; ask whoever runs the server for one")
        return found


def digest_of(secret: str) -> str:
    """What the file holds of a secret."""
    return hashlib.sha256(secret.encode("utf-8", "surrogatepass")).hexdigest()


def new_secret() -> str:
    """A secret that cannot be guessed."""
    return PREFIX + secrets.token_urlsafe(NUM_SECRET_BYTES)


def check_name(name: str, where: str) -> None:
    """Raise DataError for a name that could not stand in the file and in logs."""
    if not _NAME.fullmatch(name):
        raise DataError(f"{where}: {name[:80]!r} is no name; use up to 64 letters, digits and ._-, a letter first")


def read_keys(path: Path) -> tuple[ApiKey, ...]:
    """The keys of a file. DataError, with the line, for anything in it that is wrong; no digest is quoted."""
    try:
        root = yaml.compose(path.read_text(encoding="utf-8"), yaml.BaseLoader)
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}; give the file of API keys") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: is not text in UTF-8; write lines as 'name: digest'") from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = path if mark is None else f"{path}:{mark.line + 1}"
        raise DataError(f"{where}: cannot be read as YAML; write lines as 'name: digest'") from error
    if not isinstance(root, yaml.MappingNode) or not root.value:
        raise DataError(f"{path}: holds no keys; add one with 'quantpipe serve-key NAME --api-keys {path}'")
    keys: list[ApiKey] = []
    for name_node, value_node in root.value:
        where = f"{path}:{name_node.start_mark.line + 1}"
        key = _key(name_node, value_node, where)
        if any(key.name == other.name for other in keys):
            raise DataError(f"{where}: '{key.name}' is there twice; give each key a name of its own")
        if any(key.digest == other.digest for other in keys):
            raise DataError(f"{where}: '{key.name}' has the digest of another key; give each a secret of its own")
        keys.append(key)
    return tuple(keys)


def key_line(name: str, secret: str) -> str:
    """The line of the file for a new key."""
    return f"{name}: {digest_of(secret)}\n"


def add_key(path: Path, name: str) -> str:
    """Add a key to a file, which is made if it is not there, and return its secret, which is kept nowhere.

    DataError where the file is not sound, has that name already or cannot be written.
    """
    check_name(name, "serve-key")
    is_there = path.exists() and path.stat().st_size > 0
    if is_there and any(name == key.name for key in read_keys(path)):
        raise DataError(f"{path}: '{name}' is there already; choose another name, or remove its line first")
    secret = new_secret()
    try:
        is_open_line = is_there and not path.read_text(encoding="utf-8").endswith("\n")
        with path.open("a", encoding="utf-8") as file:
            file.write("\n" * is_open_line + key_line(name, secret))
    except OSError as error:
        raise DataError(f"{path}: cannot be written: {error.strerror or error}; choose another file") from error
    return secret


def _key(name_node: yaml.Node, value_node: yaml.Node, where: str) -> ApiKey:
    name = str(name_node.value)
    check_name(name, where)
    if isinstance(value_node, yaml.ScalarNode):
        digest, *settings = (part.strip() for part in str(value_node.value).split(","))
        pairs = [setting.partition("=") for setting in settings]
        asked = {key.strip(): value.strip() for key, _, value in pairs}
        is_repeated = len(asked) < len(pairs)
    elif isinstance(value_node, yaml.MappingNode):
        given = [(str(key.value), str(value.value)) for key, value in value_node.value]
        asked = dict(given)
        is_repeated = len(asked) < len(given)
        digest = asked.pop("sha256", "")
    else:
        raise DataError(f"{where}: '{name}' is a list; write 'name: digest'")
    if is_repeated:
        raise DataError(f"{where}: '{name}' has a limit twice; leave one out")
    if not _DIGEST.fullmatch(digest):
        raise DataError(
            f"{where}: '{name}' has no SHA-256 digest of 64 digits 0-9a-f; make one with 'quantpipe serve-key {name}'"
        )
    return ApiKey(name, digest, _limits(asked, f"{where}: '{name}'"))


def _limits(asked: Mapping[str, str], where: str) -> KeyLimits:
    known = [own.name for own in fields(KeyLimits)]
    for limit, value in asked.items():
        if limit not in known:
            raise DataError(f"{where}: unknown limit {limit[:40]!r}{suggest(limit, known)}")
        if not _COUNT.fullmatch(value) or int(value) > MAX_LIMIT:
            raise DataError(f"{where}: {limit} is {value[:40]!r}; give a whole number of at least 1")
    return KeyLimits(**{limit: int(value) for limit, value in asked.items()})


def _unauthorized(message: str) -> RefusedError:
    return RefusedError(401, message, "invalid_api_key")

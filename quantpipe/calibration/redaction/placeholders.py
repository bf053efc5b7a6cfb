"""What stands in for a value: ``<EMAIL_3f9a>``, its type and 16 bits of a keyed hash of the value.

The same value gets the same placeholder everywhere in a run, so a conversation stays coherent. Sixteen bits are few on
purpose: many values share each placeholder, and one alone does not name a value even to somebody who has the key.
"""

import hashlib
from pathlib import Path

from quantpipe.errors import DataError

MIN_SECRET_BYTES = 16
_HASH_BYTES = 2


def placeholder(rule: str, value: str, key: bytes) -> str:
    """The placeholder of a value; equal for equal rule, value and key."""
    digest = hashlib.blake2b(f"{rule}\n{value}".encode("utf-8", "surrogatepass"), key=key, digest_size=_HASH_BYTES)
    return f"<{rule.upper()}_{digest.hexdigest()}>"


def placeholder_key(set_name: str, seed: int, secret: bytes = b"") -> bytes:
    """The key of a run's placeholders, from the set's name, the seed (both no secrets) and ``secret``."""
    material = b"\n".join([b"quantpipe placeholders 1", set_name.encode(), str(seed).encode(), secret])
    return hashlib.blake2b(material, digest_size=32).digest()


def read_secret(file: Path) -> bytes:
    """The secret in ``redact.key_file``. Raises DataError where it cannot be read or is short; never shows it."""
    try:
        secret = file.read_bytes()
    except OSError as error:
        raise DataError(f"{file}: {(error.strerror or 'cannot be read').lower()}; redact.key_file names it") from None
    if len(secret) < MIN_SECRET_BYTES:
        raise DataError(
            f"{file}: holds {len(secret)} bytes; redact.key_file needs at least {MIN_SECRET_BYTES} random ones, "
            "for instance from: head -c 32 /dev/urandom"
        )
    return secret

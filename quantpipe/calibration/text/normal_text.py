"""When two texts count as the same: letters in either case and any white space between words make no difference."""

import hashlib
import unicodedata


def normal_text(text: str) -> str:
    """``text`` composed (NFC), case-folded, and with single spaces for white space."""
    if not text.isascii():
        text = unicodedata.normalize("NFC", text)
    return " ".join(text.casefold().split())


def normal_digest(text: str) -> bytes:
    """16 bytes that are equal for texts that count as the same; half a surrogate pair counts as itself."""
    return hashlib.blake2b(normal_text(text).encode("utf-8", "surrogatepass"), digest_size=16).digest()

"""When two texts count as the same: letters in either case and any white space between words make no difference."""

import unicodedata


def normal_text(text: str) -> str:
    """``text`` composed (NFC), case-folded, and with single spaces for white space."""
    if not text.isascii():
        text = unicodedata.normalize("NFC", text)
    return " ".join(text.casefold().split())

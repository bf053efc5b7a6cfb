"""The page at ``/``: what is served, how it does, and a chat. One document that loads nothing from anywhere."""

import base64
import hashlib
from dataclasses import dataclass
from importlib.resources import files

STYLE_PLACE, SCRIPT_PLACE = "/* style */", "/* script */"


@dataclass(frozen=True)
class Page:
    """The document, and the headers that let it do what it does and nothing else."""

    html: str
    headers: dict[str, str]


def read_page() -> Page:
    """The page, put together from its three files.

    The policy names style and script by their digests: nothing else that finds its way into the document is run, no
    other host is asked, and nobody can show the page within another.
    """
    html, style, script = (_text(name) for name in ("page.html", "page.css", "page.js"))
    policy = "; ".join(
        (
            "default-src 'none'",
            f"script-src '{_digest(script)}'",
            f"style-src '{_digest(style)}'",
            "img-src data:",
            "connect-src 'self'",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
        )
    )
    headers = {
        "Content-Security-Policy": policy,
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
    }
    return Page(html.replace(STYLE_PLACE, style).replace(SCRIPT_PLACE, script), headers)


def _text(name: str) -> str:
    return (files(__package__) / name).read_text(encoding="utf-8")


def _digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()

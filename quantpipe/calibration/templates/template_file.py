"""A template of the user's own for samples: a Jinja file, rendered in the sandbox. Knows no tokens.

A template sees only what ``VARIABLES`` names, never other columns of a row.
"""

from pathlib import Path

from quantpipe.calibration.rows import Message
from quantpipe.calibration.templates.sandbox import LIMITS, SandboxedTemplate
from quantpipe.errors import DataError

VARIABLES = ("messages", "system", "prompt", "response", "text", "bos_token", "eos_token")
MAX_FILE_BYTES = 1 << 20


class TemplateFile:
    """A template that was read and compiled."""

    def __init__(self, file: Path) -> None:
        """Raises DataError where the file cannot be read, is no template, or uses a variable that there is not."""
        self.file = file
        self.text = _read(file)
        self.limits = LIMITS
        self._template = SandboxedTemplate(self.text, str(file))
        unknown = sorted(self._template.variables - set(VARIABLES))
        if unknown:
            raise DataError(f"{file}: unknown variable {unknown[0]!r}; there are: {', '.join(VARIABLES)}")

    def render(self, content: str | tuple[Message, ...], bos_token: str | None, eos_token: str | None) -> str:
        """The sample as text. ``system``, ``prompt`` and ``response`` are the first of each role; the absent are none.

        Raises TemplateError where the template refuses the sample or goes beyond a limit, and what its expressions
        raise: TypeError, ValueError, LookupError, AttributeError.
        """
        messages = [] if isinstance(content, str) else list(content)
        said = {message["role"]: message["content"] for message in reversed(messages)}
        return self._template.render(
            {
                "messages": messages or None,
                "system": said.get("system"),
                "prompt": said.get("user"),
                "response": said.get("assistant"),
                "text": content if isinstance(content, str) else None,
                "bos_token": bos_token or "",
                "eos_token": eos_token or "",
            }
        )


def _read(file: Path) -> str:
    try:
        stored = file.read_bytes()
    except OSError as error:
        raise DataError(f"{file}: {(error.strerror or str(error)).lower()}; give the path of a Jinja file") from error
    if len(stored) > MAX_FILE_BYTES:
        text = f"{len(stored):,} bytes, a template has at most {MAX_FILE_BYTES:,}; give the path of a Jinja file"
        raise DataError(f"{file}: {text}")
    try:
        return stored.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"{file}: byte {error.start + 1} is not UTF-8; save the template as UTF-8") from None

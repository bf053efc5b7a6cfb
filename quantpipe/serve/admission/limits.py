"""How much a server takes upon itself at a time, and what it says to whom it turns away."""

from dataclasses import dataclass

from quantpipe.errors import QuantpipeError

MAX_HEADER_BYTES = 32 * 1024  # request line and headers together


@dataclass(frozen=True)
class Limits:
    """What may be open at a time, of all clients together, and how large one request may be.

    A prompt is open from its arrival to the end of its response, each sample counted, and with it the tokens that it
    has and may yet get (``max_tokens``). None: no limit but that of the model. A client that has not read for
    ``slow_client_s`` seconds, or not sent its body in that time, is given up.
    """

    max_open_prompts: int = 256
    max_open_tokens: int | None = None
    max_prompt_tokens: int | None = None
    max_body_bytes: int = 4 * 1024 * 1024
    slow_client_s: float = 60.0


class RefusedError(QuantpipeError):
    """A request is not taken: HTTP ``status``, ``code`` for programs, and when trying again may help."""

    def __init__(self, status: int, message: str, code: str, retry_after_s: int | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.retry_after_s = retry_after_s


class SlowClientError(QuantpipeError):
    """The client does not read what it asked for."""

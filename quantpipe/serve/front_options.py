"""What an operator sets of the server itself, as against the engine: limits, times, keys, logs, encryption."""

import ipaddress
import socket
import ssl
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from quantpipe.errors import DataError
from quantpipe.serve.admission.limits import Limits
from quantpipe.serve.arms.split import Split
from quantpipe.serve.engine_process.watch import WatchLimits
from quantpipe.serve.keys import ApiKey
from quantpipe.serve.shadow.options import ShadowOptions

LogFormat = Literal["json", "text"]


@dataclass(frozen=True)
class FrontOptions:
    """How the server behaves.

    ``drain_s`` is how long open requests may go on when it is told to stop, ``watch`` how long the engine may stand
    still. ``tool_parser`` is one of TOOL_FORMATS; None: as the chat template shows. ``keys`` None: nobody needs one.
    ``log_format`` None: no line for each request, warnings as they come. Of two arms, ``split`` says how requests
    divide; with ``shadow``, the second answers none.
    """

    limits: Limits = field(default_factory=Limits)
    drain_s: float = 30.0
    watch: WatchLimits = field(default_factory=WatchLimits)
    tool_parser: str | None = None
    keys: Sequence[ApiKey] | None = None
    are_metrics_open: bool = False
    log_format: LogFormat | None = None
    ssl_certfile: Path | None = None
    ssl_keyfile: Path | None = None
    split: Split | None = None
    shadow: ShadowOptions | None = None

    @property
    def shadows(self) -> frozenset[int]:
        """Which arms answer nothing, by number."""
        return frozenset() if self.shadow is None else frozenset({1})

    @property
    def url_scheme(self) -> str:
        """``http``, or ``https`` where connections are encrypted."""
        return "http" if self.ssl_certfile is None else "https"

    def check_ssl(self) -> None:
        """Raise DataError for a certificate or key that cannot be used, before anything is loaded."""
        if self.ssl_certfile is None:
            if self.ssl_keyfile is not None:
                raise DataError("--ssl-keyfile: there is no --ssl-certfile; give both, or neither")
            return
        for option, path in (("--ssl-certfile", self.ssl_certfile), ("--ssl-keyfile", self.ssl_keyfile)):
            if path is not None and not path.is_file():
                raise DataError(f"{option}: {path}: no such file; give a file in PEM format")
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(
                self.ssl_certfile, self.ssl_keyfile, password=lambda: b""
            )
        except (OSError, ValueError) as error:
            raise DataError(
                f"--ssl-certfile: {self.ssl_certfile}: cannot be used ({' '.join(str(error).split())}); give a "
                "certificate and its key in PEM format, without a password"
            ) from error

    def exposure_warning(self, listener: socket.socket) -> str | None:
        """What to say where other machines can reach ``listener`` and nobody needs a key."""
        host, port = listener.getsockname()[:2]
        if self.keys is not None or ipaddress.ip_address(host.partition("%")[0]).is_loopback:
            return None
        return (
            f"serve: warning: other machines can reach {host}:{port} and anyone may use it; set --api-keys, or "
            "--host 127.0.0.1 with a proxy in front"
        )

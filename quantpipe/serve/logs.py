"""Log lines for machines: one JSON object or one row of ``key=value`` each, to standard error.

Whatever a client sends stands in a line as JSON text in ASCII: it can neither end the line, nor begin another, nor
reach a terminal's controls. What is asked and what is answered stands in none.
"""

import json
import logging
import re
import sys
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import TextIO

from quantpipe.serve.exchange import Exchange
from quantpipe.serve.front_options import LogFormat

MAX_LOGGED_CHARS = 200  # of what a client may choose
PROBES = frozenset({"/health", "/ready", "/metrics", "/stats"})  # asked every few seconds: logged when they fail

logger = logging.getLogger("quantpipe.access")
_PLAIN = re.compile(r"[A-Za-z0-9._:/@+-]+")


class LineFormatter(logging.Formatter):
    """A record as one line: time, level, logger, message, and the fields that it carries."""

    def __init__(self, log_format: LogFormat) -> None:
        super().__init__()
        self._is_json = log_format == "json"

    def format(self, record: logging.LogRecord) -> str:
        """One line, in ASCII."""
        entry: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        entry |= getattr(record, "fields", {})
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        if self._is_json:
            return json.dumps(entry, default=str)
        return " ".join(f"{name}={_shown(value)}" for name, value in entry.items() if value is not None)


def start_logging(log_format: LogFormat, stream: TextIO | None = None) -> None:
    """Have all records of the process from warnings on, and a line for each request, written to ``stream``."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(LineFormatter(log_format))
    root = logging.getLogger()
    for other in root.handlers[:]:
        root.removeHandler(other)
    root.addHandler(handler)
    root.setLevel(logging.WARNING)
    logger.setLevel(logging.INFO)


def log_exchange(exchange: Exchange) -> None:
    """The line of a request that was answered, or whose client has gone."""
    is_ok = exchange.status is not None and exchange.status < 400
    if logger.isEnabledFor(logging.INFO) and not (is_ok and exchange.path in PROBES):
        logger.info("request", extra={"fields": _fields(exchange)})


def _fields(exchange: Exchange) -> Mapping[str, object]:
    """Durations in seconds, to the tenth of a millisecond."""
    total_s = time.monotonic() - exchange.started_s
    first_s = None if exchange.first_s is None else exchange.first_s - exchange.started_s
    return {
        "request_id": exchange.request_id,
        "client": exchange.client,
        "key": None if exchange.tenant is None else exchange.tenant.name,
        "method": exchange.method,
        "path": exchange.path[:MAX_LOGGED_CHARS],
        "status": exchange.status,
        "error": exchange.error,
        "model": None if exchange.model is None else exchange.model[:MAX_LOGGED_CHARS],
        "arm": exchange.arm,
        "prompt_tokens": exchange.num_prompt_tokens,
        "cached_tokens": exchange.num_cached_tokens,
        "completion_tokens": exchange.num_generated_tokens,
        "finish_reasons": ",".join(exchange.finish_reasons) or None,
        "queue_s": None if exchange.queued_s is None else round(exchange.queued_s, 4),
        "ttft_s": None if first_s is None else round(first_s, 4),
        "total_s": round(total_s, 4),
    }


def _shown(value: object) -> str:
    text = str(value)
    return text if _PLAIN.fullmatch(text) else json.dumps(text)

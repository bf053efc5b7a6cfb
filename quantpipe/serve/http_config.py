"""How uvicorn is set up: what it bounds, how it logs, whether it encrypts."""

from functools import partial
from typing import Any, cast

import uvicorn
from fastapi import FastAPI
from uvicorn.config import LOGGING_CONFIG

from quantpipe.serve.admission.headers import HeaderTimedProtocol
from quantpipe.serve.admission.limits import MAX_HEADER_BYTES
from quantpipe.serve.front_options import FrontOptions
from quantpipe.serve.server import BACKLOG


def uvicorn_config(app: FastAPI, options: FrontOptions, grace_s: float) -> uvicorn.Config:
    """Settings of a server that gives what is in flight ``grace_s`` seconds when it is told to stop."""
    protocol: Any = partial(HeaderTimedProtocol, options.limits.slow_client_s)  # called as the class would be
    return uvicorn.Config(
        app,
        http=cast(type, protocol),
        h11_max_incomplete_event_size=MAX_HEADER_BYTES,
        log_level="warning",
        log_config=LOGGING_CONFIG if options.log_format is None else None,  # None: ours (``logs``)
        access_log=False,
        backlog=BACKLOG,
        timeout_graceful_shutdown=int(grace_s),
        ssl_certfile=options.ssl_certfile,
        ssl_keyfile=options.ssl_keyfile,
    )

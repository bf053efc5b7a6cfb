"""What the HTTP process (the front) and the engine's process say to each other. Knows no sockets."""

from typing import Any, TypeAlias

import msgspec

from quantpipe.engine.request import StepOutput
from quantpipe.engine.stats import EngineStats
from quantpipe.serve.submission import EngineSample, PromptJob


class EngineFacts(msgspec.Struct, frozen=True):
    """What the front has to know of an engine that has loaded its model."""

    max_model_len: int
    backend: str = ""
    kv_dtype: str = ""
    notes: tuple[str, ...] = ()


class Opening(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """To the engine, first of all: load ``folder`` (as the system writes it) with settings of ``EngineConfig``.

    Where it ``is_verified``, its digests are checked before. ``niceness`` is how far it stands back where others want
    the same cores: 0 not at all, 19 as far as there is.
    """

    folder: bytes
    settings: dict[str, Any] = {}
    is_verified: bool = False
    niceness: int = 0


class Add(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """To the engine: queue these prompts under these names, all of them or none. Answered by ``Accepted``."""

    request_ids: tuple[str, ...]
    jobs: tuple[PromptJob, ...]


class Abort(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """To the engine: nobody reads these samples any more."""

    samples: tuple[EngineSample, ...]


class Ping(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """To the engine: are you there? Answered by ``Pong`` while a step is computed, too."""


class Opened(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """From the engine: the model is loaded."""

    facts: EngineFacts


class Ready(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """From the engine: it is warm and takes requests."""


class StartFailure(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """From the engine, last of all: it cannot start. ``start_errors`` makes it of an exception, and back."""

    kind: str
    message: str
    exit_code: int | None
    traceback: str
    errno: int | None = None
    filename: str | None = None


class Accepted(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """From the engine: the prompts of the ``Add`` whose first name this is are queued; or not, for a ``refusal``.

    ``param`` is the request parameter that the refusal is about.
    """

    request_id: str
    refusal: str | None = None
    param: str | None = None


class Stepped(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """From the engine: what a step produced, and the engine's state after it."""

    outputs: tuple[StepOutput, ...]
    stats: EngineStats


class Pong(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """From the engine: it is there, and computes the step of this ``round``; None: it is idle."""

    round: int | None


class Failed(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """From the engine, last of all: a step raised an error of this kind."""

    kind: str


ToEngine: TypeAlias = Opening | Add | Abort | Ping
FromEngine: TypeAlias = Opened | Ready | StartFailure | Accepted | Stepped | Pong | Failed

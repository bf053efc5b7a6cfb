"""What is known of one HTTP request while it is answered, and afterwards for its line in the log.

The front door makes it and closes it; the service tells it what becomes of the request. It never holds any text.
"""

import re
import secrets
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import cast

from starlette.requests import HTTPConnection
from starlette.types import Scope

from quantpipe.errors import QuantpipeError, RequestError
from quantpipe.serve.admission.limits import SlowClientError
from quantpipe.serve.admission.queue import Ticket
from quantpipe.serve.api_errors import problem_of
from quantpipe.serve.generation import TextDelta
from quantpipe.serve.keys import Tenant
from quantpipe.serve.submission import PromptJob, Submission

STATE_KEY = "exchange"
_REQUEST_ID = re.compile(rb"[A-Za-z0-9._-]{1,128}")


@dataclass(eq=False)
class Exchange:
    """One request and what came of it. Times are seconds of ``time.monotonic``.

    ``tenant`` is None where no keys are asked for, ``ticket`` where nothing is generated, ``error`` the code of the
    error that the client was told about. ``queued_s`` is the wait of the first prompt in the engine. ``arm`` is which
    of several arms answers.
    """

    request_id: str
    method: str
    path: str
    client: str
    max_prompt_tokens: int | None = None
    started_s: float = field(default_factory=time.monotonic)
    tenant: Tenant | None = None
    ticket: Ticket | None = None
    status: int | None = None
    is_answered: bool = False
    error: str | None = None
    model: str | None = None
    arm: str | None = None
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    finish_reasons: list[str] = field(default_factory=list)
    queued_s: float | None = None
    first_s: float | None = None
    _num_generated: dict[int, int] = field(default_factory=dict)
    _end: Callable[[QuantpipeError], None] | None = None
    _at_end: list[Callable[[], None]] = field(default_factory=list)

    @property
    def num_generated_tokens(self) -> int:
        """Of all choices together."""
        return sum(self._num_generated.values())

    def admit(self, jobs: Sequence[PromptJob]) -> list[PromptJob]:
        """Take the room that the prompts of this request need; returns them within the tenant's own prefix cache.

        Raises RequestError where one can never get in, UnavailableError where it cannot now.
        """
        for job in jobs:
            if self.max_prompt_tokens is not None and len(job.prompt_ids) > self.max_prompt_tokens:
                raise RequestError(
                    f"prompt: {len(job.prompt_ids):,} tokens; at most {self.max_prompt_tokens:,} are taken here; "
                    "shorten it",
                    "prompt",
                )
        self.num_prompt_tokens = sum(len(job.prompt_ids) for job in jobs)
        if self.ticket is not None:
            num_new_tokens = sum(job.params.n * job.params.max_tokens for job in jobs)
            self.ticket.ask(sum(job.params.n for job in jobs), self.num_prompt_tokens + num_new_tokens)
        if self.tenant is None:
            return list(jobs)
        return [replace(job, cache_salt=self.tenant.cache_salt(job.cache_salt)) for job in jobs]

    def begin(self, submission: Submission) -> None:
        """The engine has taken the request."""
        self._end = submission.end
        self._use(self.num_prompt_tokens)

    @property
    def is_begun(self) -> bool:
        """Whether there is any text of an answer."""
        return self.first_s is not None

    def start_over(self) -> None:
        """What had taken the request is lost, and nothing came of it: another one will be asked."""
        if self._end is not None:
            self._use(-self.num_prompt_tokens)  # who takes it next will count them
        self.error, self._end = None, None

    async def watch(self, deltas: AsyncIterator[tuple[int, TextDelta]]) -> AsyncIterator[tuple[int, TextDelta]]:
        """Pass the deltas on and note what they tell."""
        try:
            async for index, delta in deltas:
                self._note(index, delta)
                yield index, delta
        except QuantpipeError as error:
            self.error = self.error or problem_of(error).counted_as
            raise

    def give_up_slow_client(self) -> None:
        """Nobody reads: end what the engine does for it, and let others have its place."""
        slow = SlowClientError("the client did not read its stream; read faster")
        self.error = problem_of(slow).counted_as
        if self._end is not None:
            self._end(slow)
        self.release()

    def at_end(self, callback: Callable[[], None]) -> None:
        """Have ``callback`` called once the request is over, however it ends; perhaps more than once."""
        self._at_end.append(callback)

    def release(self) -> None:
        """Give back the place that the request takes, and tell who waits for its end."""
        for callback in self._at_end:
            callback()
        if self.ticket is not None:
            self.ticket.release()

    def _note(self, index: int, delta: TextDelta) -> None:
        if self.first_s is None:
            self.first_s, self.queued_s = time.monotonic(), delta.queued_s
        self._use(delta.num_tokens - self._num_generated.get(index, 0))
        self._num_generated[index] = delta.num_tokens
        if delta.finish_reason is not None:
            self.finish_reasons.append(delta.finish_reason)
            self.num_cached_tokens += delta.num_cached_tokens

    def _use(self, num_tokens: int) -> None:
        if self.tenant is not None:
            self.tenant.usage.use(num_tokens)


def exchange_of(http_request: HTTPConnection) -> Exchange:
    """The exchange that the front door made for a request."""
    return cast(Exchange, http_request.scope["state"][STATE_KEY])


def new_exchange(scope: Scope, max_prompt_tokens: int | None) -> Exchange:
    """An exchange for an ASGI scope, put into its state. A client's own ``X-Request-Id`` is kept if it is plain."""
    asked = next((value for name, value in scope["headers"] if name == b"x-request-id"), b"")
    request_id = asked.decode() if _REQUEST_ID.fullmatch(asked) else secrets.token_hex(16)
    client = scope.get("client") or ("unknown",)
    exchange = Exchange(request_id, scope["method"], scope["path"], str(client[0]), max_prompt_tokens)
    scope.setdefault("state", {})[STATE_KEY] = exchange
    return exchange

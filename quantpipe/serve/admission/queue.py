"""What is open of all clients together, in prompts and in tokens, and who is turned away. Knows no HTTP."""

import time
from collections.abc import Callable

from quantpipe.errors import RequestError
from quantpipe.serve.admission.limits import Limits
from quantpipe.serve.admission.pace import Pace
from quantpipe.serve.submission import UnavailableError


class Ticket:
    """One request's share of what is open: a prompt from the start, what it really asks for once that is known."""

    def __init__(self, queue: "AdmissionQueue") -> None:
        self.num_prompts = 1
        self.num_tokens = 0
        self._queue: AdmissionQueue | None = queue

    def ask(self, num_prompts: int, num_tokens: int) -> None:
        """Take as much as the request needs in all. UnavailableError where that is too much now, RequestError ever."""
        if self._queue is not None:
            self._queue.widen(self, num_prompts, num_tokens)

    def release(self) -> None:
        """Give everything back; once."""
        queue, self._queue = self._queue, None
        if queue is not None:
            queue.leave(self)


class AdmissionQueue:
    """Counts what is open. Everything here runs in the event loop."""

    def __init__(self, limits: Limits, clock: Callable[[], float] = time.monotonic) -> None:
        self.num_prompts = 0
        self.num_tokens = 0
        self._limits = limits
        self._prompt_pace, self._token_pace = Pace(clock), Pace(clock)

    def check_room(self) -> None:
        """Raise UnavailableError where not even a single prompt gets in: before anything is read or parsed."""
        self._check_prompts(1)

    def enter(self) -> Ticket:
        """Let one prompt in."""
        self._check_prompts(1)
        self.num_prompts += 1
        return Ticket(self)

    def widen(self, ticket: Ticket, num_prompts: int, num_tokens: int) -> None:
        """See ``Ticket.ask``."""
        most, most_tokens = self._limits.max_open_prompts, self._limits.max_open_tokens
        if num_prompts > most:
            raise RequestError(f"{num_prompts} choices in one request; at most {most} fit", "prompt")
        if most_tokens is not None and num_tokens > most_tokens:
            raise RequestError(
                f"{num_tokens:,} tokens with max_tokens of each choice; at most {most_tokens:,} fit; ask for less",
                "max_tokens",
            )
        self._check_prompts(num_prompts - ticket.num_prompts)
        self._check_tokens(num_tokens - ticket.num_tokens)
        self.num_prompts += num_prompts - ticket.num_prompts
        self.num_tokens += num_tokens - ticket.num_tokens
        ticket.num_prompts, ticket.num_tokens = num_prompts, num_tokens

    def leave(self, ticket: Ticket) -> None:
        """See ``Ticket.release``."""
        self.num_prompts -= ticket.num_prompts
        self.num_tokens -= ticket.num_tokens
        if ticket.num_tokens:  # one that was turned away gives nothing back that others wait for
            self._prompt_pace.released(ticket.num_prompts)
            self._token_pace.released(ticket.num_tokens)

    def _check_prompts(self, num_more: int) -> None:
        excess = self.num_prompts + num_more - self._limits.max_open_prompts
        if num_more > 0 and excess > 0:
            retry_s = self._prompt_pace.retry_after_s(excess)
            text = f"the queue is full ({self.num_prompts} open prompts); try again in {retry_s} s"
            raise UnavailableError(text, "queue_full", retry_s)

    def _check_tokens(self, num_more: int) -> None:
        most = self._limits.max_open_tokens
        if most is None or self.num_tokens + num_more <= most:
            return
        retry_s = self._token_pace.retry_after_s(self.num_tokens + num_more - most)
        text = f"the queue is full ({self.num_tokens:,} open tokens); try again in {retry_s} s"
        raise UnavailableError(text, "queue_full", retry_s)

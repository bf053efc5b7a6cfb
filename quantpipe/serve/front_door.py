"""What every HTTP request passes before it is parsed, and on its way out: who it is from, whether there is room.

In this order, the cheap before the costly: the key (401), room in the queue (503), the key's limits (429), the body's
size and time (413, 408), a place in the queue (503). Prompts and tokens are counted once they are known (``Exchange``).
"""

import logging

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quantpipe.serve.admission.body import BodyReader, replayed
from quantpipe.serve.admission.limits import Limits
from quantpipe.serve.admission.queue import AdmissionQueue
from quantpipe.serve.admission.slow_client import watched_send
from quantpipe.serve.api_errors import PROBLEM_KEY, Problem, problem_of
from quantpipe.serve.arms.router import ARM_HEADER
from quantpipe.serve.exchange import Exchange, new_exchange
from quantpipe.serve.keys import KeyRing
from quantpipe.serve.logs import log_exchange
from quantpipe.serve.metrics import ServerMetrics

logger = logging.getLogger(__name__)

GENERATION_PATHS = frozenset({"/v1/completions", "/v1/chat/completions"})
OPEN_PATHS = frozenset({"/health", "/ready", "/"})  # probes have no key, and the page asks for one itself
BODILESS = frozenset({"GET", "HEAD", "OPTIONS"})


class FrontDoor:
    """ASGI middleware. ``keys`` None: nobody needs one."""

    def __init__(
        self,
        app: ASGIApp,
        limits: Limits,
        queue: AdmissionQueue,
        keys: KeyRing | None,
        are_metrics_open: bool,
        metrics: ServerMetrics,
    ) -> None:
        self.app = app
        self._limits = limits
        self._queue = queue
        self._keys = keys
        self._open_paths = OPEN_PATHS | ({"/metrics"} if are_metrics_open else set())
        self._metrics = metrics
        self._bodies = BodyReader(limits)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request in, or answer it here."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        exchange = new_exchange(scope, self._limits.max_prompt_tokens)
        send = _named(exchange, watched_send(send, self._limits.slow_client_s, exchange.give_up_slow_client))
        is_counted = False
        try:
            self._identify(exchange, scope)
            if scope["method"] == "POST" and scope["path"] in GENERATION_PATHS:
                self._queue.check_room()
                if exchange.tenant is not None:
                    exchange.tenant.usage.begin()
                    is_counted = True
            if scope["method"] not in BODILESS:
                receive = replayed(await self._bodies.read(receive, scope["headers"]), receive)
            if scope["method"] == "POST" and scope["path"] in GENERATION_PATHS:
                exchange.ticket = self._queue.enter()
                receive = _watched(exchange, receive)
            await self.app(scope, receive, send)
            problem = scope["state"].get(PROBLEM_KEY)
            if isinstance(problem, Problem):
                exchange.error = problem.counted_as
        except Exception as error:
            await self._answer(exchange, error, scope, receive, send)
        finally:
            exchange.release()
            if is_counted and exchange.tenant is not None:
                exchange.tenant.usage.end()
            self._metrics.count_exchange(exchange)
            log_exchange(exchange)

    def _identify(self, exchange: Exchange, scope: Scope) -> None:
        if self._keys is not None and scope["path"] not in self._open_paths:
            exchange.tenant = self._keys.tenant(Headers(scope=scope).get("authorization"))

    async def _answer(self, exchange: Exchange, error: Exception, scope: Scope, receive: Receive, send: Send) -> None:
        """Tell the client, if it has been told nothing yet."""
        problem = problem_of(error)
        if problem.code == "internal_error":
            logger.exception("a request failed", extra={"fields": {"request_id": exchange.request_id}})
        exchange.error = problem.counted_as
        if exchange.status is not None:
            raise error
        await problem.response()(scope, receive, send)


def _watched(exchange: Exchange, receive: Receive) -> Receive:
    """A ``receive`` that notes whether the client left before it had its answer."""

    async def receive_watched() -> Message:
        message = await receive()
        if message["type"] == "http.disconnect" and not exchange.is_answered:
            exchange.error = exchange.error or "client_closed"
        return message

    return receive_watched


def _named(exchange: Exchange, send: Send) -> Send:
    """A ``send`` that notes how far the answer is, and tells the client the request's id and arm."""

    async def send_named(message: Message) -> None:
        if message["type"] == "http.response.start":
            exchange.status = message["status"]
            headers = MutableHeaders(scope=message)
            headers["X-Request-Id"] = exchange.request_id
            if exchange.arm is not None:
                headers[ARM_HEADER] = exchange.arm
        elif message["type"] == "http.response.body":
            exchange.is_answered = not message.get("more_body", False)
        await send(message)

    return send_named

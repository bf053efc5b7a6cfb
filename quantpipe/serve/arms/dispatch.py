"""Takes each request to the arm that answers it, and to another one where that has lost its engine."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from fastapi import Request, Response

from quantpipe.serve.api import ChatCompletionRequest, CompletionRequest, GenerationRequest
from quantpipe.serve.arms.arm import Arm
from quantpipe.serve.arms.metrics import RoutingMetrics
from quantpipe.serve.arms.router import ARM_HEADER, Router
from quantpipe.serve.exchange import Exchange, exchange_of
from quantpipe.serve.metrics import ServerMetrics
from quantpipe.serve.service import Handling, Service
from quantpipe.serve.shadow.shadow import Encode, Shadow
from quantpipe.serve.submission import EngineFailedError, UnavailableError

Answer = Callable[[Service, Handling], Awaitable[Response]]


@dataclass(frozen=True)
class Dispatcher:
    """``services`` are those of ``arms``, in order. ``routing`` is None where one arm answers, ``shadow`` where none
    follows.
    """

    arms: Sequence[Arm]
    services: Sequence[Service]
    router: Router
    metrics: ServerMetrics
    routing: RoutingMetrics | None = None
    shadow: Shadow | None = None

    async def complete(self, body: CompletionRequest, http_request: Request) -> Response:
        """Answer ``/v1/completions``."""
        return await self._dispatch(
            body,
            http_request,
            lambda service, handling: service.complete(body, http_request, handling),
            lambda service: service.encoder.prompts(body),
        )

    async def chat(self, body: ChatCompletionRequest, http_request: Request) -> Response:
        """Answer ``/v1/chat/completions``."""
        return await self._dispatch(
            body,
            http_request,
            lambda service, handling: service.chat(body, http_request, handling),
            lambda service: [service.encoder.messages(body.messages, tools=service.tools_of(body))],
        )

    def service_for(self, model: str | None, http_request: Request) -> Service:
        """Whose tokenizer a request means that generates nothing: the arm it asks for, else the first."""
        route = self.router.fixed(model, http_request.headers.get(ARM_HEADER))
        arm = 0 if route is None else route.arms[0]
        self._note_arm(exchange_of(http_request), arm)
        return self.services[arm]

    async def _dispatch(
        self, body: GenerationRequest, http_request: Request, answer: Answer, encode: Encode
    ) -> Response:
        exchange = exchange_of(http_request)
        exchange.model = body.model
        route = self.router.route(body.model, http_request.headers.get(ARM_HEADER), body.user)
        arms = sorted(route.arms, key=lambda arm: not self._takes_requests(arm))
        while True:
            arm, *others = arms
            self._note_arm(exchange, arm)
            follower = None
            if self.shadow is not None:
                follower = self.shadow.follower(body, exchange, encode)
            try:
                response = await answer(self.services[arm], Handling(bool(others), follower))
            except (EngineFailedError, UnavailableError):
                is_lost = self.arms[arm].engine.failure is not None
                if not others or not is_lost or exchange.is_begun:
                    raise
                exchange.start_over()
                arms = others
                continue
            self.metrics.count_ignored(len(body.ignored))
            if self.routing is not None:
                self.routing.count(self.arms[arm].label, route.by if arm == route.arms[0] else "failover")
            return response

    def _note_arm(self, exchange: Exchange, arm: int) -> None:
        exchange.arm = self.arms[arm].label if len(self.arms) > 1 else None

    def _takes_requests(self, arm: int) -> bool:
        return self.arms[arm].engine.state.word == "ready"

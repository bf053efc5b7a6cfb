"""All that a server's requests share, put together: its arms, who routes, admits and counts."""

from collections.abc import Sequence
from dataclasses import dataclass

from quantpipe.guided.compiler import GrammarCompiler
from quantpipe.serve.admission.queue import AdmissionQueue
from quantpipe.serve.arms.arm import Arm
from quantpipe.serve.arms.dispatch import Dispatcher
from quantpipe.serve.arms.metrics import RoutingMetrics
from quantpipe.serve.arms.router import Router
from quantpipe.serve.arms.split import whole
from quantpipe.serve.chat import ChatTemplate
from quantpipe.serve.engine_metrics import EngineReader
from quantpipe.serve.front_options import FrontOptions
from quantpipe.serve.metrics import ServerMetrics
from quantpipe.serve.request_metrics import RequestMetrics
from quantpipe.serve.service import Service
from quantpipe.serve.shadow.metrics import ShadowMetrics
from quantpipe.serve.shadow.options import ShadowOptions
from quantpipe.serve.shadow.shadow import Shadow
from quantpipe.serve.tools.formats import format_of
from quantpipe.serve.tools.request_tools import ToolSupport


@dataclass(frozen=True)
class Serving:
    """``answering`` are the arms but for a shadow, ``shares`` of the requests that ask for no arm go to each.

    ``routing`` is None unless several arms answer, ``shadow_metrics`` where there is no shadow.
    """

    arms: tuple[Arm, ...]
    answering: tuple[Arm, ...]
    shares: tuple[float, ...]
    queue: AdmissionQueue
    metrics: ServerMetrics
    router: Router
    dispatcher: Dispatcher
    routing: RoutingMetrics | None
    shadow_metrics: ShadowMetrics | None

    @classmethod
    def of(cls, arms: Sequence[Arm], model_name: str, options: FrontOptions) -> "Serving":
        """Raises ArtifactError for a chat template that is not valid."""
        queue = AdmissionQueue(options.limits)
        metrics = ServerMetrics(_readers(arms), lambda: (queue.num_prompts, queue.num_tokens))
        services = [
            service_of(arm, model_name if len(arms) == 1 else arm.name, own, options.tool_parser)
            for arm, own in zip(arms, metrics.requests, strict=True)
        ]
        answering = tuple(arms[:1] if options.shadow is not None else arms)
        split = options.split or whole(len(arms))
        labels, names = [arm.label for arm in arms], [arm.name for arm in arms]
        router = Router(labels, names, model_name, split, len(answering))
        routing = RoutingMetrics(metrics.registry) if len(answering) > 1 else None
        shadow = None
        if options.shadow is not None:
            shadow = _shadow_of(arms, services[1], ShadowMetrics(metrics.registry, ("a", "b")), options.shadow)
        dispatcher = Dispatcher(tuple(arms), tuple(services), router, metrics, routing, shadow)
        shadow_metrics = None if shadow is None else shadow.metrics
        return cls(tuple(arms), answering, split.shares, queue, metrics, router, dispatcher, routing, shadow_metrics)


def service_of(arm: Arm, model_name: str, metrics: RequestMetrics, tool_parser: str | None) -> Service:
    """What answers requests to one arm. ``tool_parser`` None: as its chat template shows."""
    tokenizer, template = arm.tokenizer, None
    if tokenizer.chat_template is not None:
        template = ChatTemplate.compile(tokenizer.chat_template, tokenizer.special_tokens)
    support = ToolSupport(
        tool_parser or format_of(tokenizer.chat_template or ""), template is not None and template.knows_tools
    )
    return Service(arm.engine, tokenizer, model_name, template, metrics, GrammarCompiler(tokenizer), support)


def _readers(arms: Sequence[Arm]) -> list[EngineReader]:
    def reader(arm: Arm) -> EngineReader:
        label = arm.label if len(arms) > 1 else None
        return EngineReader(label, lambda: arm.engine.stats, lambda: arm.engine.state.num_restarts)

    return [reader(arm) for arm in arms]


def _shadow_of(arms: Sequence[Arm], service: Service, metrics: ShadowMetrics, options: ShadowOptions) -> Shadow:
    first, second = (arm.tokenizer for arm in arms)
    return Shadow(service, metrics, options, first.has_same_tokens_as(second))

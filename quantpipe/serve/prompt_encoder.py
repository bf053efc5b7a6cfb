"""From what a request says to token ids, as one model reads it. Knows no engine and no HTTP."""

from collections.abc import Sequence
from dataclasses import dataclass

from quantpipe.engine.tokenizer import Tokenizer
from quantpipe.errors import RequestError
from quantpipe.serve.api import CompletionRequest
from quantpipe.serve.chat import ChatTemplate
from quantpipe.serve.echo import EchoedPrompt
from quantpipe.serve.messages import ChatMessage
from quantpipe.serve.tokenize_api import TokenizeRequest
from quantpipe.serve.tools.request_tools import RequestTools


@dataclass(frozen=True)
class PromptEncoder:
    """A model's tokenizer, and its chat template if it has one. To be used in threads: texts may be long."""

    tokenizer: Tokenizer
    template: ChatTemplate | None
    model_name: str

    def prompts(self, body: CompletionRequest) -> list[list[int]]:
        """Those of ``/v1/completions``; token ids stay what they are."""
        encode = self.tokenizer.encode
        return [encode(p, add_special_tokens=True) if isinstance(p, str) else p for p in body.prompts]

    def messages(
        self,
        messages: Sequence[ChatMessage],
        add_generation_prompt: bool = True,
        tools: RequestTools | None = None,
    ) -> list[int]:
        """A conversation. The template writes the special tokens itself, so that encoding must add none."""
        if self.template is None:
            raise RequestError(f"model '{self.model_name}' has no chat template; use /v1/completions", "messages")
        turns = [message.for_template() for message in messages]
        return self.tokenizer.encode(
            self.template.render(turns, add_generation_prompt, tools.for_template if tools else None)
        )

    def tokenize(self, body: TokenizeRequest) -> list[int]:
        """What ``/tokenize`` asks about."""
        if body.messages is not None:
            return self.messages(body.messages, body.add_generation_prompt is not False)
        return self.tokenizer.encode(body.prompt or "", add_special_tokens=body.add_special_tokens is not False)

    def echoes(self, body: CompletionRequest, prompts: Sequence[Sequence[int]]) -> list[EchoedPrompt]:
        """The prompt of each choice, to be sent back."""
        own = [EchoedPrompt.of(self.tokenizer, *pair) for pair in zip(body.prompts, prompts, strict=True)]
        return [echo for echo in own for _ in range(body.n or 1)]

"""The bodies of ``/tokenize`` and ``/detokenize``, which are vLLM's."""

from typing import Annotated, Self

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from quantpipe.serve.fields import Text
from quantpipe.serve.messages import ChatMessage
from quantpipe.serve.request_body import RequestBody


class TokenizeRequest(RequestBody):
    """A text, or a conversation that the chat template turns into one; exactly one of the two."""

    NEUTRAL = {  # noqa: RUF012 - a class variable of the parent
        "continue_final_message": (False,),
        "chat_template_kwargs": ({},),
        "mm_processor_kwargs": ({},),
        "chat_template": (),
    }

    model: Text | None = None
    prompt: Text | None = None
    messages: Annotated[list[ChatMessage], Field(min_length=1)] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    return_token_strs: bool | None = None

    @model_validator(mode="after")
    def _one_of_two(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise PydanticCustomError("prompt", "{param}: give either prompt or messages", {"param": "prompt"})
        return self


class DetokenizeRequest(RequestBody):
    """Token ids of the model's."""

    model: Text | None = None
    tokens: list[Annotated[int, Field(ge=0)]]

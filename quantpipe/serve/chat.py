"""The model folder's chat template, rendered in a sandbox. Knows messages and text, not tokens."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, TemplateSyntaxError, meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser

from quantpipe.errors import ArtifactError, RequestError
from quantpipe.serve.template_limits import BoundedEnvironment, LimitError


class GenerationTag(Extension):
    """``{% generation %} ... {% endgeneration %}`` marks trainable text in some templates; here it changes nothing."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it as an instance attribute

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        """Replace the tag by what it encloses."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@dataclass(frozen=True)
class ChatTemplate:
    """A compiled chat template and the special tokens it may name (``bos_token``, ``eos_token`` ...)."""

    environment: BoundedEnvironment
    template: Template
    special_tokens: dict[str, Any]
    knows_tools: bool = False

    @classmethod
    def compile(cls, source: str, special_tokens: Mapping[str, str]) -> "ChatTemplate":
        """Raises ArtifactError if the template is not valid Jinja."""
        environment = BoundedEnvironment(
            {"tojson": _to_json}, trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, loopcontrols]
        )
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            names = meta.find_undeclared_variables(environment.parse(source))
            return cls(environment, environment.from_string(source), dict(special_tokens), "tools" in names)
        except TemplateSyntaxError as error:
            raise ArtifactError(f"chat template: line {error.lineno}: {error.message}; correct the template") from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """The prompt text of a conversation, ready for the assistant's turn; special tokens are part of the text.

        Raises RequestError when the template refuses the conversation.
        """
        try:
            variables = {"messages": messages, "add_generation_prompt": add_generation_prompt, "tools": tools}
            return self.environment.rendered(self.template, self.special_tokens | variables)
        except LimitError as error:
            raise RequestError(f"the chat template takes more than it may: {error}", "messages") from error
        except (
            TemplateError,
            TypeError,
            ValueError,
            ArithmeticError,
            LookupError,
            AttributeError,
            RecursionError,
        ) as error:
            reason = " ".join(str(error).split()) or type(error).__name__
            raise RequestError(f"the chat template refuses these messages: {reason}", "messages") from error


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    """Like ``json.dumps``; Jinja's own filter escapes for HTML, which templates do not expect."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)

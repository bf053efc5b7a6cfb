"""Kinds of values in request bodies, and what is wrong with those of another kind. Knows no request."""

import json
import re
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field
from pydantic_core import PydanticCustomError

from quantpipe.engine.sampling_params import MAX_BIAS, MAX_PENALTY

MAX_CHOICES = 128
MAX_STOPS = 4
MAX_STOP_CHARS = 1024
MAX_BIASED_TOKENS = 1024
MAX_SALT_CHARS = 256
MAX_LATENCY_BUDGET_MS = 86_400_000  # a day
MAX_SHOWN_CHARS = 60  # of a name that an error quotes
TOKEN_ID = re.compile(r"0|[1-9][0-9]{0,9}")


def only_neutral(values: Mapping[str, Any], neutral: Mapping[str, tuple[Any, ...]]) -> dict[str, Any]:
    """``values`` without the fields that ask for nothing; an error for one that asks for something not served."""
    for name in neutral.keys() & values.keys():
        value, accepted = values[name], neutral[name]
        is_neutral = value is None or any(
            value == known and isinstance(value, bool) == isinstance(known, bool) for known in accepted
        )
        if not is_neutral:
            hint = f" or set it to {accepted[0]!r}" if accepted else ""
            raise PydanticCustomError(
                "not_supported", "{param} is not served; leave it out{hint}", {"param": name, "hint": hint}
            )
    return {name: value for name, value in values.items() if name not in neutral}


def _check_unicode(text: str) -> str:
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError:
            raise PydanticCustomError("unicode", "must be valid Unicode; it holds half of a surrogate pair") from None
    return text


def shown_name(name: object) -> str:
    """A client's name for something, fit to be quoted in a line: cut, and escaped where it cannot be printed."""
    characters = str(name)[:MAX_SHOWN_CHARS]
    return "".join(own if own.isprintable() else own.encode("unicode_escape").decode() for own in characters)


def _check_prompt(prompt: Any) -> Any:
    if not isinstance(prompt, str | list):
        raise PydanticCustomError(
            "prompt_type", "must be a string, a list of strings, a list of token ids or a list of lists of token ids"
        )
    if not prompt or (isinstance(prompt, list) and any(part in ("", []) for part in prompt)):
        raise PydanticCustomError("prompt_empty", "must not be empty, nor contain an empty prompt")
    parts = prompt if isinstance(prompt, list) else []
    kinds = set(map(type, parts))
    if not (kinds <= {str} or kinds == {int} or kinds == {list}):
        raise PydanticCustomError("prompt_type", "must hold texts, token ids or lists of token ids, one kind only")
    for token_ids in parts if kinds == {list} else [parts] if kinds == {int} else []:
        if set(map(type, token_ids)) != {int} or min(token_ids) < 0:
            wrong = next(own for own in token_ids if type(own) is not int or own < 0)
            raise PydanticCustomError(
                "token_id",
                "must hold whole numbers from 0 as token ids, not {id}",
                {"id": shown_name(json.dumps(wrong))},
            )
    return prompt


def _check_stops(stop: str | list[str] | None) -> str | list[str] | None:
    stops = [stop] if isinstance(stop, str) else stop or []
    if len(stops) > MAX_STOPS or any(not 0 < len(text) <= MAX_STOP_CHARS for text in stops):
        raise PydanticCustomError(
            "stop", f"must be at most {MAX_STOPS} non-empty strings of at most {MAX_STOP_CHARS} characters"
        )
    return stop


def _token_ids_from_keys(bias: Any) -> Any:
    """JSON knows no integer keys: token ids come as texts. One spelling each, so that none can come twice."""
    if not isinstance(bias, dict):
        return bias
    if len(bias) > MAX_BIASED_TOKENS:
        raise PydanticCustomError("logit_bias", f"must name at most {MAX_BIASED_TOKENS:,} tokens")
    for key, value in bias.items():
        if not TOKEN_ID.fullmatch(key):
            raise PydanticCustomError(
                "logit_bias", "must have token ids as keys, not '{key}'", {"key": shown_name(key)}
            )
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not (is_number and -MAX_BIAS <= value <= MAX_BIAS):
            raise PydanticCustomError(
                "logit_bias", f"must be from {-MAX_BIAS:g} to {MAX_BIAS:g} for token {{key}}", {"key": key}
            )
    return {int(key): float(value) for key, value in bias.items()}


Text = Annotated[str, AfterValidator(_check_unicode)]
TokenIdList = Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)]
Prompt = Annotated[Text | list[Text] | TokenIdList | list[TokenIdList], BeforeValidator(_check_prompt)]
Stop = Annotated[Text | list[Text] | None, AfterValidator(_check_stops)]
FiniteFloat = Annotated[float, Field(allow_inf_nan=False)]
Penalty = Annotated[FiniteFloat, Field(ge=-MAX_PENALTY, le=MAX_PENALTY)]
LogitBias = Annotated[dict[int, float], BeforeValidator(_token_ids_from_keys, json_schema_input_type=dict[str, float])]

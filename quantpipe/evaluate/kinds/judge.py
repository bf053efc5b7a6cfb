"""``judge``: another model, behind any OpenAI-compatible URL, gives each answer a number. Its replies are kept.

A judge that cannot be asked, or gives no number, ends the run: no item is left out.
"""

import hashlib
import json
import os
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from jinja2 import TemplateError
from pydantic import AfterValidator, Field, WithJsonSchema, model_validator

from quantpipe.cache import cache_folder
from quantpipe.calibration.definition.mapping import Text
from quantpipe.calibration.templates.sandbox import OPERATOR_ERRORS, SandboxedTemplate
from quantpipe.disk import writing
from quantpipe.errors import DataError
from quantpipe.evaluate.kinds.kind import Item, Kind, Response, Scored, TextKeys, quoted, written
from quantpipe.recipe.section import Count, Seed
from quantpipe.report import random_state_kept

with random_state_kept():  # it draws a number as it is imported
    import httpx


FIRST_PAUSE_S = 0.5  # before the second try; doubled each time
NUMBER = r"-?\d+(?:\.\d+)?"
ANSWER_NAME = "answer"
_AGAIN = (408, 409, 425, 429)  # of the refusals below 500, those that may pass


def _url(url: str) -> str:
    parsed = httpx.URL(url)
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise ValueError(f"found {url!r}; allowed: a URL such as https://host/v1")
    if parsed.userinfo:
        raise ValueError("a URL must hold no password; name the variable of an API key in api_key_env")
    return url.rstrip("/")


def _pattern(pattern: str) -> str:
    try:
        num_groups = re.compile(pattern).groups
    except re.error as error:
        raise ValueError(f"found {pattern!r}, not a regular expression: {error}; correct it") from None
    if num_groups != 1:
        raise ValueError(f"found {pattern!r}; allowed: a pattern with one group, the number")
    return pattern


_TWO_NUMBERS = WithJsonSchema({"type": "array", "items": {"type": "number"}})


class JudgeKeys(TextKeys):
    """A task of the kind `judge`."""

    kind: Literal["judge"]
    """`judge`."""
    url: Annotated[str, AfterValidator(_url)]
    """Where the judge listens, up to `/v1`: `/chat/completions` is added."""
    model: Text
    """What the judge is called there."""
    judge_prompt: Text
    """What it is asked: Jinja over the row's fields and `answer`."""
    judge_system: Text | None = None
    """Its system message."""
    scale: Annotated[tuple[float, float], Field(strict=False), _TWO_NUMBERS] = (1.0, 10.0)
    """The lowest and the highest number, which become the scores 0 and 1."""
    pass_from: float | None = None
    """Number from which an answer is right. Absent: the score itself counts."""
    score_pattern: Annotated[str, AfterValidator(_pattern)] = rf"({NUMBER})"
    """Regular expression whose group is the number; where it is found several times, the last counts."""
    api_key_env: Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")] | None = None
    """Environment variable with the API key. Absent: none is sent."""
    judge_seed: Seed = 0
    """Sent along; the temperature is 0."""
    judge_max_tokens: Count = 256
    """Most tokens of its reply."""
    retries: Annotated[int, Field(ge=0, le=10)] = 3
    """How often it is asked again after a failure."""
    timeout_s: Annotated[float, Field(gt=0)] = 60.0
    """Most seconds of one try."""

    @model_validator(mode="after")
    def _scale(self) -> "JudgeKeys":
        low, high = self.scale
        if low >= high:
            raise ValueError(f"scale: found {low:g} to {high:g}; allowed: the lower number first")
        if self.pass_from is not None and not low <= self.pass_from <= high:
            raise ValueError(f"pass_from {self.pass_from:g} is outside of the scale, {low:g} to {high:g}")
        return self

    def item_fields(self) -> tuple[str, ...]:
        names = SandboxedTemplate(self.judge_prompt, "judge_prompt").variables - {ANSWER_NAME}
        return tuple(sorted(names))

    def shot_answer(self, target: Any) -> str:
        raise ValueError("a judge knows no answer; map a column to answer")


@dataclass(frozen=True)
class JudgeScorer:
    """Asks the judge about each answer, once: its replies are kept by all that they depend on."""

    keys: JudgeKeys
    template: SandboxedTemplate
    folder: Path
    pause: Callable[[float], None] = field(default=time.sleep)

    def check(self, item: Item) -> None:
        self._asked(item, "an answer")

    def score(self, item: Item, response: Response) -> Scored:
        answer = written(response)
        text = self._reply(item, self._asked(item, answer))
        found = re.findall(self.keys.score_pattern, text)
        low, high = self.keys.scale
        try:
            number = float(found[-1])
        except (IndexError, ValueError):
            raise DataError(f"{self._where(item)}: replied {quoted(text)}, in which there is no score") from None
        if not low <= number <= high:
            raise DataError(f"{self._where(item)}: gave {number:g}, outside of the scale {low:g} to {high:g}")
        value = (number - low) / (high - low) if self.keys.pass_from is None else float(number >= self.keys.pass_from)
        return Scored(value, answer)

    def _asked(self, item: Item, answer: str) -> list[dict[str, str]]:
        try:
            text = self.template.render({**item.fields, ANSWER_NAME: answer})
        except (TemplateError, *OPERATOR_ERRORS) as error:
            raise ValueError(f"judge_prompt cannot be rendered: {' '.join(str(error).split())}") from None
        if not text.strip():
            raise ValueError("judge_prompt renders to nothing")
        system = [{"role": "system", "content": self.keys.judge_system}] if self.keys.judge_system else []
        return [*system, {"role": "user", "content": text}]

    def _reply(self, item: Item, messages: list[dict[str, str]]) -> str:
        """The judge's text, kept or new."""
        body = {
            "model": self.keys.model,
            "messages": messages,
            "temperature": 0,
            "seed": self.keys.judge_seed,
            "max_tokens": self.keys.judge_max_tokens,
        }
        content = json.dumps([self.keys.url, body], sort_keys=True)
        kept = self.folder / f"{hashlib.sha256(content.encode()).hexdigest()}.json"
        if kept.is_file():
            return str(json.loads(kept.read_text(encoding="utf-8"))["reply"])
        reply = self._ask(item, body)
        if re.search(self.keys.score_pattern, reply):  # what has no score is asked again next time
            with writing(kept):
                self.folder.mkdir(parents=True, exist_ok=True)
                partial = kept.with_suffix(f".{os.getpid()}.{id(item)}.partial")
                partial.write_text(json.dumps({"reply": reply}), encoding="utf-8")
                partial.replace(kept)
        return reply

    def _ask(self, item: Item, body: dict[str, Any]) -> str:
        key = None if self.keys.api_key_env is None else os.environ.get(self.keys.api_key_env)
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        failure = ""
        for attempt in range(self.keys.retries + 1):
            if attempt:
                self.pause(FIRST_PAUSE_S * 2 ** (attempt - 1))
            try:
                reply = httpx.post(
                    f"{self.keys.url}/chat/completions", json=body, headers=headers, timeout=self.keys.timeout_s
                )
            except httpx.HTTPError as error:
                failure = "no reply in time" if isinstance(error, httpx.TimeoutException) else str(error)
                continue
            if reply.status_code == 200:
                return self._content(item, reply)
            failure = f"status {reply.status_code}"
            if reply.status_code < 500 and reply.status_code not in _AGAIN:
                break
        tries = f"{attempt + 1} tries" if attempt else "one try"
        raise DataError(f"{self._where(item)}: {' '.join(failure.split())} after {tries}; nothing is judged without it")

    def _content(self, item: Item, reply: httpx.Response) -> str:
        try:
            return str(reply.json()["choices"][0]["message"]["content"] or "")
        except (ValueError, LookupError, TypeError):
            raise DataError(f"{self._where(item)}: its reply is none of the OpenAI API") from None

    def _where(self, item: Item) -> str:
        return f"judge {self.keys.url}: item {item.id!r}"


def _open(keys: JudgeKeys, folder: Path, place: Callable[[str], str]) -> JudgeScorer:
    return JudgeScorer(keys, SandboxedTemplate(keys.judge_prompt, place("judge_prompt")), cache_folder() / "judge")


def _prepare(keys: JudgeKeys, place: Callable[[str], str]) -> None:
    """The key must be there, and something must listen at the URL: it is asked only after hours otherwise."""
    if keys.api_key_env is not None and not os.environ.get(keys.api_key_env):
        raise DataError(f"{place('api_key_env')}: the variable {keys.api_key_env} is not set; set it to the API key")
    try:
        httpx.get(f"{keys.url}/models", timeout=min(keys.timeout_s, 10.0))
    except httpx.HTTPError as error:
        reason = "no reply in time" if isinstance(error, httpx.TimeoutException) else " ".join(str(error).split())
        raise DataError(f"{place('url')}: {keys.url} cannot be reached: {reason}; start the judge") from None


KIND = Kind(JudgeKeys, "text", "another model behind a URL gives the answer a number", _open, _prepare, num_threads=8)

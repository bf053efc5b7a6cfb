"""Tasks of the short form asked of an engine: all choices in one go, all answers in another; then scored.

Choices share their context, and items their examples, as far as the engine keeps prefixes.
"""

import hashlib
import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from quantpipe.errors import ArtifactError, DataError, RequestError
from quantpipe.evaluate.asking import Asker, GreedyAsk, TokenPair
from quantpipe.evaluate.items import ItemResult
from quantpipe.evaluate.kinds.kind import Item, Response, TextKeys
from quantpipe.evaluate.served import ChatCodec, TextCodec
from quantpipe.evaluate.short_task import ShortTask
from quantpipe.report import Progress, no_progress
from quantpipe.serve.chat import ChatTemplate


@dataclass(frozen=True)
class Question:
    """One item as token ids: a pair for each choice, or one prompt to continue."""

    pairs: tuple[TokenPair, ...] = ()
    ask: GreedyAsk | None = None

    @property
    def digest(self) -> str:
        """Over all token ids, and how they are to be continued."""
        ask = self.ask
        content = self.pairs if ask is None else [list(ask.prompt_ids), ask.max_tokens, ask.stops]
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def run_short_tasks(
    tasks: Sequence[ShortTask], asker: Asker, tokenizer: TextCodec, progress: Progress = no_progress
) -> dict[str, list[ItemResult]]:
    """Every item's result, by task. DataError where one cannot be asked or scored."""
    questions = [question for task in tasks for question in _questions(task, asker, tokenizer)]
    responses = iter(_responses(questions, asker))
    digests = iter([question.digest for question in questions])
    results = {}
    for task in tasks:
        own, own_digests = [next(responses) for _ in task.items], [next(digests) for _ in task.items]
        results[task.name] = score_task(task, own, own_digests, progress)
    return results


def score_task(
    task: ShortTask, responses: Sequence[Response], digests: Sequence[str], progress: Progress = no_progress
) -> list[ItemResult]:
    """What the responses are worth, in the order of the items."""
    if not isinstance(task.keys, TextKeys):
        return [_scored(task, *each) for each in zip(task.items, responses, digests, strict=True)]
    with ThreadPoolExecutor(task.kind.num_threads) as threads:
        found = threads.map(lambda each: _scored(task, *each), zip(task.items, responses, digests, strict=True))
        return list(progress(found, total=len(task.items), label=f"{task.name} scored"))


def chat_template(task: ShortTask, tokenizer: TextCodec) -> ChatTemplate | None:
    """The compiled template of a task that uses it. DataError where the model has none, or a broken one."""
    if not task.keys.chat:
        return None
    source = tokenizer.chat_template if isinstance(tokenizer, ChatCodec) else None
    if source is None or not isinstance(tokenizer, ChatCodec):
        raise DataError(f"{task.place('chat')}: the model's tokenizer has no chat template; set chat: false")
    try:
        return ChatTemplate.compile(source, tokenizer.special_tokens)
    except ArtifactError as error:
        raise DataError(f"{task.place('chat')}: {error}") from error


def prompt_text(task: ShortTask, item: Item, template: ChatTemplate | None) -> str:
    """All that the model reads before its answer, examples included."""
    keys = task.keys
    if template is None:
        separator = keys.few_shot.separator if keys.few_shot is not None else ""
        shots = (f"{shot.prompt}{keys.prefix}{shot.answer}{separator}" for shot in task.shots)
        return "".join((*shots, item.prompt))
    messages = [] if keys.system is None else [{"role": "system", "content": keys.system}]
    for shot in task.shots:
        messages += [{"role": "user", "content": shot.prompt}, {"role": "assistant", "content": shot.answer}]
    try:
        return template.render([*messages, {"role": "user", "content": item.prompt}])
    except RequestError as error:
        raise DataError(f"{item.where}: item {item.id!r}: {error}") from error


def _questions(task: ShortTask, asker: Asker, tokenizer: TextCodec) -> list[Question]:
    template = chat_template(task, tokenizer)
    return [_question(task, item, prompt_text(task, item, template), asker) for item in task.items]


def _question(task: ShortTask, item: Item, prompt: str, asker: Asker) -> Question:
    keys, adds_special = task.keys, not task.keys.chat  # a chat template writes its own special tokens
    if isinstance(keys, TextKeys):
        return Question(ask=GreedyAsk(asker.encode(prompt, adds_special), keys.max_tokens, keys.stops))
    texts = [f"{keys.prefix}{choice}" for choice in item.choices]
    return Question(pairs=tuple(asker.encode_pair(prompt, text, adds_special) for text in texts))


def _responses(questions: Sequence[Question], asker: Asker) -> list[Response]:
    pairs = [pair for question in questions for pair in question.pairs]
    asked = [question.ask for question in questions if question.ask is not None]
    scores = iter(asker.score(pairs, "choices scored") if pairs else [])
    answers = iter(asker.answer(asked, "answers generated") if asked else [])
    return [
        tuple(next(scores)[0] for _ in question.pairs) if question.ask is None else next(answers)
        for question in questions
    ]


def _scored(task: ShortTask, item: Item, response: Response, digest: str) -> ItemResult:
    try:
        scored = task.scorer.score(item, response)
    except ValueError as error:
        raise DataError(f"{item.where}: item {item.id!r}: {error}") from error
    return ItemResult(
        task=task.name,
        doc_id=item.id,
        domain=item.domain,
        cluster=item.cluster,
        score=scored.score,
        prompt_digest=digest,
        response=response,
        prediction=scored.prediction,
        margin=scored.margin,
        slices=item.slices,
    )

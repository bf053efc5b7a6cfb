"""Offline generation from Python: a model folder, prompts in, texts out. Ties engine, tokenizer and stop strings."""

import dataclasses
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from quantpipe.completion import Completion, CompletionOutput
from quantpipe.engine.config import EngineConfig
from quantpipe.engine.engine import Engine
from quantpipe.engine.request import FinishReason, RequestOutput, SampleOutput
from quantpipe.engine.sampling_params import SamplingParams
from quantpipe.engine.setting_names import calling_settings
from quantpipe.engine.stats import EngineStats
from quantpipe.engine.tokenizer import Tokenizer
from quantpipe.errors import RequestError
from quantpipe.formats.artifact import require_intact
from quantpipe.guided.compiler import GrammarCompiler
from quantpipe.serve.chat import ChatTemplate
from quantpipe.serve.generation import ChoiceText

Prompt = str | Sequence[int]
Conversation = Sequence[Mapping[str, str]]


class LLM:
    """A loaded model folder, quantized or ordinary. Use from one thread at a time.

    ``settings`` are those of ``EngineConfig``. The digests of a folder that has a manifest are checked first, unless
    ``verify`` is off. Raises ArtifactError for a damaged folder, RecipeError for settings that cannot be.
    """

    def __init__(self, artifact: str | Path, *, verify: bool = True, **settings: Any) -> None:
        folder = Path(artifact)
        with calling_settings(str):
            config = EngineConfig.of(settings)
        if verify:
            require_intact(folder)
        self.tokenizer = Tokenizer.open(folder)
        self._template: ChatTemplate | None = None
        if self.tokenizer.chat_template is not None:
            self._template = ChatTemplate.compile(self.tokenizer.chat_template, self.tokenizer.special_tokens)
        with calling_settings(str):
            self._engine = Engine.open(folder, config)
        description = self._engine.description
        self._engine.compiler = GrammarCompiler(self.tokenizer, description.vocab_size, description.eos_token_ids)

    @property
    def max_model_len(self) -> int:
        """The most tokens of a prompt and what follows it."""
        return self._engine.max_model_len

    def stats(self) -> EngineStats:
        """What the engine has done so far."""
        return self._engine.stats()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = True,
    ) -> list[Completion]:
        """Continue each prompt (text or token ids), with parameters for all of them or one each; greedy without any.

        Texts get the special tokens that the tokenizer adds to text, mostly a BOS; token ids are taken as they are. All
        prompts are checked before any is run: RequestError for the first that can never be served.
        """
        listed = _listed(prompts)
        token_ids = [
            self._encode(number, own, add_special_tokens=True) if isinstance(own, str) else own
            for number, own in enumerate(listed)
        ]
        texts = [own if isinstance(own, str) else None for own in listed]
        return self._run(texts, token_ids, sampling_params, progress)

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = True,
    ) -> list[Completion]:
        """Answer each conversation, a list of ``{"role": ..., "content": ...}``, through the model's chat template.

        The template writes the special tokens itself. RequestError where the folder has none, or where it refuses a
        conversation.
        """
        if self._template is None:
            raise RequestError("messages: the model folder has no chat template; use generate", "messages")
        is_one = bool(messages) and isinstance(messages[0], Mapping)
        conversations: Sequence[Any] = [messages] if is_one else messages
        texts = [self._template.render(conversation) for conversation in conversations]
        token_ids = [self._encode(number, text) for number, text in enumerate(texts)]
        return self._run(texts, token_ids, sampling_params, progress)

    def _run(
        self,
        texts: Sequence[str | None],
        token_ids: Sequence[Sequence[int]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        progress: bool,
    ) -> list[Completion]:
        all_params = _params_of_each(sampling_params, len(token_ids))
        self._check_params(sampling_params)
        jobs: dict[str, _Job] = {}
        try:
            for number, (prompt_ids, params) in enumerate(zip(token_ids, all_params, strict=True)):
                request_id = self._add(number, prompt_ids, params)
                jobs[request_id] = _Job(params, self.tokenizer)
            with _Bar(len(jobs), progress) as bar:
                while self._engine.has_unfinished:
                    bar.advance(*self._step(jobs))
            outputs = [self._engine.take_output(request_id) for request_id in jobs]
        finally:
            for request_id in jobs:
                self._engine.abort(request_id)  # only after an error or an interrupt is there anything left to drop
        return [job.completion(text, output) for job, text, output in zip(jobs.values(), texts, outputs, strict=True)]

    def _encode(self, number: int, text: str, add_special_tokens: bool = False) -> list[int]:
        try:
            return self.tokenizer.encode(text, add_special_tokens)
        except RequestError as error:
            raise RequestError(f"prompts[{number}]: {error}", error.param) from None

    def _add(self, number: int, prompt_ids: Sequence[int], params: SamplingParams) -> str:
        try:
            with calling_settings(str):
                return self._engine.add(prompt_ids, dataclasses.replace(params, stop=()))
        except RequestError as error:
            raise RequestError(f"prompts[{number}]: {error}", error.param) from None

    def _check_params(self, sampling_params: SamplingParams | Sequence[SamplingParams] | None) -> None:
        """RequestError for parameters that suit no prompt, named as the caller gave them: one for all, or a list."""
        is_one = sampling_params is None or isinstance(sampling_params, SamplingParams)
        for number, params in enumerate(() if sampling_params is None else _listed_params(sampling_params)):
            try:
                _stop_strings(params)
                with calling_settings(str):
                    self._engine.check_params(dataclasses.replace(params, stop=()))
            except RequestError as error:
                where = "sampling_params" if is_one else f"sampling_params[{number}]"
                raise RequestError(f"{where}: {error}", error.param) from None

    def _step(self, jobs: "Mapping[str, _Job]") -> tuple[int, int]:
        """One step of the engine: how many requests it finished, and how many tokens it brought."""
        num_finished = num_tokens = 0
        for output in self._engine.step():
            choice = jobs[output.request_id].choices[output.index]
            delta = choice.text.push(output)
            choice.parts.append(delta.text)
            choice.num_tokens = delta.num_tokens
            num_tokens += len(output.token_ids)
            if delta.finish_reason is not None and output.finish_reason is None:
                self._engine.abort_sample(output.request_id, output.index)  # a stop string: the engine knows no text
            choice.is_finished = output.finish_reason is not None or delta.finish_reason is not None
            num_finished += choice.is_finished and all(own.is_finished for own in jobs[output.request_id].choices)
        return num_finished, num_tokens


class _Choice:
    """The growing text of one sample."""

    def __init__(self, params: SamplingParams, tokenizer: Tokenizer) -> None:
        self.text = ChoiceText(tokenizer.stream(), _stop_strings(params), params.min_tokens)
        self.parts: list[str] = []
        self.num_tokens = 0
        self.is_finished = False


class _Job:
    """One prompt in the engine."""

    def __init__(self, params: SamplingParams, tokenizer: Tokenizer) -> None:
        self.params = params
        self.choices = [_Choice(params, tokenizer) for _ in range(params.n)]

    def completion(self, prompt: str | None, output: RequestOutput) -> Completion:
        outputs = tuple(self._output(sample) for sample in output.samples)
        return Completion(prompt, output.prompt_ids, outputs, output.prompt_logprobs)

    def _output(self, sample: SampleOutput) -> CompletionOutput:
        choice = self.choices[sample.index]
        stop_string = choice.text.stop_string
        token_ids, logprobs = sample.token_ids[: choice.num_tokens], sample.logprobs[: choice.num_tokens]
        reason, stop_reason = sample.finish_reason, None
        if reason is FinishReason.STOP and token_ids[-1] in self.params.stop_token_ids:
            stop_reason = token_ids[-1]
        return CompletionOutput(
            sample.index,
            "".join(choice.parts),
            token_ids,
            reason if stop_string is None else FinishReason.STOP,
            stop_reason if stop_string is None else stop_string,
            logprobs,
            sample.error,
        )


class _Bar(AbstractContextManager["_Bar"]):
    """Prompts finished and tokens per second, on standard error and only where someone watches."""

    def __init__(self, num_prompts: int, is_wanted: bool) -> None:
        console = Console(stderr=True)
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[rate]}"),
            console=console,
            disable=not (is_wanted and console.is_terminal),
        )
        self._task = self._progress.add_task("prompts", total=num_prompts, rate="")
        self._num_tokens = 0

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def advance(self, num_finished: int, num_tokens: int) -> None:
        self._num_tokens += num_tokens
        elapsed_s = self._progress.tasks[self._task].elapsed or 0.0
        rate = f"{self._num_tokens / elapsed_s:.1f} tok/s" if elapsed_s else ""
        self._progress.update(self._task, advance=num_finished, rate=rate)


def _listed(prompts: Prompt | Sequence[Prompt]) -> Sequence[Prompt]:
    """A list of prompts; one prompt alone may come as it is."""
    if isinstance(prompts, str):
        return [prompts]
    if not isinstance(prompts, Sequence):
        raise RequestError(f"prompts: {prompts!r} is neither a text nor a list of token ids or prompts", "prompts")
    token_ids = [part for part in prompts if isinstance(part, int)]
    if token_ids and len(token_ids) == len(prompts):
        return [token_ids]
    if token_ids:
        raise RequestError("prompts: token ids and whole prompts in one list; give one kind", "prompts")
    return [part for part in prompts if not isinstance(part, int)]


def _params_of_each(
    sampling_params: SamplingParams | Sequence[SamplingParams] | None, num_prompts: int
) -> Sequence[SamplingParams]:
    if sampling_params is None:
        sampling_params = SamplingParams()
    if isinstance(sampling_params, SamplingParams):
        return [sampling_params] * num_prompts
    for each in sampling_params if isinstance(sampling_params, list | tuple) else [sampling_params]:
        if not isinstance(each, SamplingParams):
            raise RequestError(
                f"sampling_params: found {each!r}; give a quantpipe.SamplingParams, or a list with one for each prompt",
                "sampling_params",
            )
    if len(sampling_params) != num_prompts:
        raise RequestError(
            f"sampling_params: {len(sampling_params)} for {num_prompts} prompts; give one for all or one for each",
            "sampling_params",
        )
    return sampling_params


def _listed_params(sampling_params: SamplingParams | Sequence[SamplingParams]) -> Sequence[SamplingParams]:
    return [sampling_params] if isinstance(sampling_params, SamplingParams) else sampling_params


def _stop_strings(params: SamplingParams) -> tuple[str, ...]:
    stops = (params.stop,) if isinstance(params.stop, str) else tuple(params.stop)
    for stop in stops:
        if not isinstance(stop, str) or not stop:
            raise RequestError(f"stop: {stop!r} is not a text of at least one character", "stop")
    return stops

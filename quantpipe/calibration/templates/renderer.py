"""A sample as token ids: its template, then encoding, one BOS at most and exactly one EOS at the end.

The template writes its own special tokens, so its text is encoded without adding any; where it writes no BOS but the
tokenizer adds one to plain text, one is put in front. White space at the end is dropped, before, between and after EOS.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quantpipe.calibration.rows import BY_TEMPLATE, NO_WORDS, NOTHING_WRITTEN, RowError, Sample
from quantpipe.errors import DataError

if TYPE_CHECKING:
    from quantpipe.calibration.templates.template_file import TemplateFile


FRAME_TOKENS = 8  # more than BOS, EOS and what a tokenizer puts before the first word


class Renderer:
    """Turns samples into token ids with the tokenizer of one model folder.

    ``template_files``: for the sources (by index) whose text a template of the user's own makes.
    """

    def __init__(self, folder: Path, template_files: Mapping[int, Path] | None = None) -> None:
        """Open the folder's tokenizer, offline. Raises DataError where there is none or it has no EOS token."""
        if not folder.is_dir():
            raise DataError(f"{folder}: no such folder; the tokenizer is read from the base model's folder")
        from transformers import AutoTokenizer  # heavy: only a build needs it

        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
        except Exception as error:  # the tokenizers library raises plain Exception for a file it cannot parse
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise DataError(f"{folder}: holds no tokenizer that transformers can open: {reason}") from error
        self.folder = folder
        if self._tokenizer.eos_token_id is None:
            raise DataError(f"{folder}: the tokenizer names no eos_token, which separates packed samples; add it")
        self.eos: int = self._tokenizer.eos_token_id
        self._bos: int | None = self._tokenizer.bos_token_id
        self._adds_bos = self._bos is not None and self._tokenizer("a")["input_ids"][:1] == [self._bos]
        self._templates = _open_templates(template_files or {})
        self._eos_text = str(self._tokenizer.eos_token)
        self.num_double_bos = 0
        self.num_double_eos = 0

    @property
    def vocabulary_size(self) -> int:
        """Number of distinct ids, added tokens included; the model's own may be padded beyond it."""
        return len(self._tokenizer)

    def require_template(self) -> None:
        """Raise DataError where the tokenizer has no chat template."""
        if not self._tokenizer.chat_template:
            raise DataError(
                f"{self.folder}: the tokenizer has no chat template, which template: tokenizer needs; "
                "use a chat model, or a set of plain text"
            )

    def encode(self, sample: Sample) -> list[int]:
        """Its token ids. Raises RowError for a sample that its template refuses or writes nothing for."""
        return self._encoded(sample, is_counted=True)

    def num_tokens(self, sample: Sample) -> int:
        """How many token ids ``encode`` gives, without counting what they begin and end with."""
        return len(self._encoded(sample, is_counted=False))

    def most_tokens(self, sample: Sample) -> int | None:
        """More token ids than a sample of this text can have; None where a template decides that."""
        return None if self._uses_template(sample) else len(str(sample.content).encode()) + FRAME_TOKENS

    def _encoded(self, sample: Sample, is_counted: bool) -> list[int]:
        text, num_eos = self._without_eos(self._text(sample))
        encoded = self._tokenizer(text, add_special_tokens=False, return_attention_mask=False, verbose=False)
        token_ids: list[int] = encoded["input_ids"]
        while token_ids[-1:] == [self.eos] or (num_eos and self._tokenizer.decode(token_ids[-1:]).isspace()):
            num_eos += token_ids.pop() == self.eos  # an EOS that is written in another way
        if all(token in (self._bos, self.eos) for token in token_ids):
            raise self._nothing(sample)
        if is_counted:
            self.num_double_eos += num_eos > 1
        return self._framed(token_ids, is_counted)

    def _without_eos(self, text: str) -> tuple[str, int]:
        """``text`` without white space and EOS at its end, and how many EOS these were.

        It is done before encoding, because white space may be one token with what is before it.
        """
        text, num_eos = text.rstrip(), 0
        while text.endswith(self._eos_text):
            text, num_eos = text.removesuffix(self._eos_text).rstrip(), num_eos + 1
        return text, num_eos

    def _uses_template(self, sample: Sample) -> bool:
        return sample.source in self._templates or not isinstance(sample.content, str)

    def _text(self, sample: Sample) -> str:
        if not self._uses_template(sample):
            return str(sample.content)
        from jinja2 import TemplateError

        from quantpipe.calibration.templates.sandbox import OPERATOR_ERRORS

        try:
            return self._by_file(sample) if sample.source in self._templates else self._by_tokenizer(sample)
        except (TemplateError, *OPERATOR_ERRORS) as error:
            text = f"the {self._writer(sample)} refuses this sample: {self._fault(error, sample)}"
            raise RowError(text, BY_TEMPLATE) from None  # what it says may quote the row

    def _by_tokenizer(self, sample: Sample) -> str:
        return str(self._tokenizer.apply_chat_template(list(sample.content), tokenize=False))

    def _by_file(self, sample: Sample) -> str:
        template = self._templates[sample.source]
        return template.render(sample.content, self._tokenizer.bos_token, self._tokenizer.eos_token)

    def _writer(self, sample: Sample) -> str:
        return "template" if sample.source in self._templates else "chat template"

    def _nothing(self, sample: Sample) -> RowError:
        if self._uses_template(sample):
            text = f"the {self._writer(sample)} writes nothing for this sample; correct the template"
            return RowError(text, NOTHING_WRITTEN)
        text = "the text holds nothing but special tokens; fill it, or leave such rows out with bad_rows: drop"
        return RowError(text, NO_WORDS)

    def _fault(self, error: Exception, sample: Sample) -> str:
        """File and line of a template, and the kind of mistake, without anything that the row says."""
        from quantpipe.calibration.templates.template_fault import line_of, mistake_in

        line, template = line_of(error), self._templates.get(sample.source)
        if template is not None:
            file, mistake = template.file, mistake_in(template.text, error, template.limits)
        else:
            file, mistake = self._chat_template_file, mistake_in(str(self._tokenizer.chat_template), error)
        return f"{file}:{line}: {mistake}" if line is not None else f"{file}: {mistake}"

    @property
    def _chat_template_file(self) -> Path:
        own = self.folder / "chat_template.jinja"
        return own if own.is_file() else self.folder / "tokenizer_config.json"

    def _framed(self, token_ids: list[int], is_counted: bool) -> list[int]:
        """``token_ids`` with one BOS in front where the model uses one, never two, and one EOS at the end."""
        num_bos = next((i for i, token in enumerate(token_ids) if token != self._bos), len(token_ids))
        if num_bos > 1:
            self.num_double_bos += is_counted
            token_ids = token_ids[num_bos - 1 :]
        elif num_bos == 0 and self._bos is not None and self._adds_bos:
            token_ids = [self._bos, *token_ids]
        return [*token_ids, self.eos]


def _open_templates(files: Mapping[int, Path]) -> "dict[int, TemplateFile]":
    if not files:
        return {}
    from quantpipe.calibration.templates.template_file import TemplateFile  # loads Jinja

    return {index: TemplateFile(file) for index, file in files.items()}

"""A sample as token ids: its template, then encoding, one BOS at most and exactly one EOS at the end.

The template writes its own special tokens, so its text is encoded without adding any; where it writes no BOS but the
tokenizer adds one to plain text, one is put in front. Trailing white space is dropped before the EOS.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quantpipe.calibration.rows import RowProblems, Sample
from quantpipe.errors import DataError

if TYPE_CHECKING:
    from quantpipe.calibration.template_file import TemplateFile


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
        self.num_double_bos = 0

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

    def encode(self, samples: Sequence[Sample], problems: RowProblems) -> list[list[int] | None]:
        """Token ids of each sample; None, and a problem, for one that its template refuses or writes nothing for."""
        texts = [self._text(sample, problems) for sample in samples]
        rendered = [text for text in texts if text is not None]
        if not rendered:
            return [None] * len(texts)
        encoded = self._tokenizer(rendered, add_special_tokens=False, return_attention_mask=False, verbose=False)
        token_ids = iter(encoded["input_ids"])
        return [None if text is None else self._framed(next(token_ids)) for text in texts]

    def _text(self, sample: Sample, problems: RowProblems) -> str | None:
        if sample.source in self._templates:
            name, render = "template", self._by_file
        elif isinstance(sample.content, str):
            return sample.content.rstrip()
        else:
            name, render = "chat template", self._by_tokenizer
        from jinja2 import TemplateError

        try:
            text = render(sample).rstrip()
        except (TemplateError, TypeError, ValueError, LookupError, AttributeError) as error:
            problems.add(sample.where, f"the {name} refuses this sample: {self._reason(error, sample)}")
            return None
        if not text:
            problems.add(sample.where, f"the {name} writes nothing for this sample; correct the template")
            return None
        return text

    def _by_tokenizer(self, sample: Sample) -> str:
        return str(self._tokenizer.apply_chat_template(list(sample.content), tokenize=False))

    def _by_file(self, sample: Sample) -> str:
        template = self._templates[sample.source]
        return template.render(sample.content, self._tokenizer.bos_token, self._tokenizer.eos_token)

    def _reason(self, error: Exception, sample: Sample) -> str:
        """What a template says, where those are its own words; otherwise only the kind of error: it may quote a row."""
        said, template = str(error), self._templates.get(sample.source)
        written = f"{template.text}\n{template.limits}" if template is not None else str(self._tokenizer.chat_template)
        return said[:100] if said and said in written else type(error).__name__

    def _framed(self, token_ids: list[int]) -> list[int]:
        """``token_ids`` with one BOS in front where the model uses one, never two, and one EOS at the end."""
        num_bos = next((i for i, token in enumerate(token_ids) if token != self._bos), len(token_ids))
        if num_bos > 1:
            self.num_double_bos += 1
            token_ids = token_ids[num_bos - 1 :]
        elif num_bos == 0 and self._bos is not None and self._adds_bos:
            token_ids = [self._bos, *token_ids]
        return token_ids if token_ids[-1:] == [self.eos] else [*token_ids, self.eos]


def _open_templates(files: Mapping[int, Path]) -> "dict[int, TemplateFile]":
    if not files:
        return {}
    from quantpipe.calibration.template_file import TemplateFile  # loads Jinja

    return {index: TemplateFile(file) for index, file in files.items()}

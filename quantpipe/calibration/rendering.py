"""A sample as token ids: chat template, then encoding, one BOS at most and exactly one EOS at the end.

The template writes its own special tokens, so its text is encoded without adding any; where it writes no BOS but the
tokenizer adds one to plain text, one is put in front. Trailing white space is dropped before the EOS.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from quantpipe.calibration.samples import RowProblems, Sample
from quantpipe.errors import DataError


class Renderer:
    """Turns samples into token ids with the tokenizer of one model folder."""

    def __init__(self, folder: Path) -> None:
        """Open the folder's tokenizer, offline. Raises DataError where there is none or it has no EOS token."""
        if not folder.is_dir():
            raise DataError(f"{folder}: no such folder; the tokenizer is read from the base model's folder")
        from transformers import AutoTokenizer  # heavy: only a build needs it

        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
        except Exception as error:  # the tokenizers library raises plain Exception for a file it cannot parse
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise DataError(f"{folder}: holds no tokenizer that transformers can open: {reason}") from error
        self._folder = folder
        if self._tokenizer.eos_token_id is None:
            raise DataError(f"{folder}: the tokenizer names no eos_token, which separates packed samples; add it")
        self._eos: int = self._tokenizer.eos_token_id
        self._bos: int | None = self._tokenizer.bos_token_id
        self._adds_bos = self._bos is not None and self._tokenizer("a")["input_ids"][:1] == [self._bos]
        self.num_double_bos = 0

    def require_template(self) -> None:
        """Raise DataError where the tokenizer has no chat template."""
        if not self._tokenizer.chat_template:
            raise DataError(
                f"{self._folder}: the tokenizer has no chat template, which template: tokenizer needs; "
                "use a chat model, or a set of plain text"
            )

    def encode(self, samples: Sequence[Sample], problems: RowProblems) -> list[list[int]]:
        """Token ids of each sample, in order; samples that the template refuses are left out and noted."""
        texts = [text for sample in samples if (text := self._text(sample, problems)) is not None]
        if not texts:
            return []
        encoded = self._tokenizer(texts, add_special_tokens=False, return_attention_mask=False, verbose=False)
        return [self._framed(token_ids) for token_ids in encoded["input_ids"]]

    def _text(self, sample: Sample, problems: RowProblems) -> str | None:
        if isinstance(sample.content, str):
            return sample.content.rstrip()
        from jinja2 import TemplateError

        try:
            rendered: str = self._tokenizer.apply_chat_template(list(sample.content), tokenize=False)
        except TemplateError as error:
            problems.add(sample.where, f"the chat template refuses this conversation: {str(error)[:100]}")
            return None
        return rendered.rstrip()

    def _framed(self, token_ids: list[int]) -> list[int]:
        """``token_ids`` with one BOS in front where the model uses one, never two, and one EOS at the end."""
        num_bos = next((i for i, token in enumerate(token_ids) if token != self._bos), len(token_ids))
        if num_bos > 1:
            self.num_double_bos += 1
            token_ids = token_ids[num_bos - 1 :]
        elif num_bos == 0 and self._bos is not None and self._adds_bos:
            token_ids = [self._bos, *token_ids]
        return token_ids if token_ids[-1:] == [self._eos] else [*token_ids, self._eos]

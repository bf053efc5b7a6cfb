"""Every kind of task of the short form, by the name that suites give it."""

from quantpipe.evaluate.kinds import (
    choice,
    code,
    contains,
    exact,
    json_schema,
    judge,
    numeric,
    regex_match,
    similarity,
)
from quantpipe.evaluate.kinds.kind import Kind

KINDS: dict[str, Kind] = {
    "choice": choice.KIND,
    "exact": exact.KIND,
    "contains": contains.KIND,
    "regex": regex_match.KIND,
    "json_schema": json_schema.KIND,
    "numeric": numeric.KIND,
    "code": code.KIND,
    "similarity": similarity.KIND,
    "judge": judge.KIND,
}

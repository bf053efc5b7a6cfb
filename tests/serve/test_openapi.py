"""The API's own description against what it answers: nothing undeclared, and never a failure of the server's."""

from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import CHECKS, load_all_checks, not_a_server_error

Server = Any
PATHS = [
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/embeddings",
    "/tokenize",
    "/detokenize",
    "/v1/models",
    "/v1/models/{name}",
    "/health",
    "/ready",
    "/version",
    "/metrics",
    "/stats",
    "/",
]
BODIES = ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"]
load_all_checks()
PROMISES = [
    not_a_server_error,
    *CHECKS.get_by_names(["status_code_conformance", "content_type_conformance", "response_schema_conformance"]),
]


@pytest.fixture(scope="module")
def api(server: Server) -> Any:
    """The description, as it is served."""
    return schemathesis.openapi.from_url(f"{server.url}/openapi.json")


@pytest.mark.parametrize("mode", GenerationMode, ids=lambda mode: mode.name)
@pytest.mark.parametrize("path", PATHS)
def test_every_answer_is_one_that_the_description_declares(api: Any, path: str, mode: GenerationMode) -> None:
    """To requests that fit the description, and to ones that do not."""
    [method] = api[path]
    operation, statuses = api[path][method], set[int]()

    @settings(
        max_examples=40,
        deadline=None,
        database=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate],
    )
    @given(case=operation.as_strategy(generation_mode=mode))
    def ask(case: Any) -> None:
        if isinstance(case.body, dict) and isinstance(case.body.get("model"), str):
            case.body["model"] = "echo"  # of another, nothing but its name would be looked at
        statuses.add(case.call_and_validate(checks=PROMISES, timeout=20).status_code)

    try:
        ask()
    except Exception as error:
        if "Unsatisfiable" in type(error).__name__ or "any negative" in str(error).lower():
            pytest.skip("nothing about this request can be wrong")
        raise
    if path in BODIES:
        assert (200 in statuses) == (mode is GenerationMode.POSITIVE), statuses


def test_all_that_is_served_is_described_and_tried(api: Any) -> None:
    assert sorted(api) == sorted(PATHS)

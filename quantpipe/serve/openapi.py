"""The description of the API that clients are generated from: only what can really be answered."""

from typing import Any

from fastapi import FastAPI

# FastAPI declares these of its own accord; here a body that is not valid is a 400 like any other mistake.
UNUSED_STATUS = "422"
UNUSED_SCHEMAS = ("HTTPValidationError", "ValidationError")


def describe_truly(app: FastAPI) -> None:
    """Leave out of ``app``'s description what it never answers."""
    make = app.openapi

    def openapi() -> dict[str, Any]:
        description = make()
        for operations in description["paths"].values():
            for operation in operations.values():
                operation["responses"].pop(UNUSED_STATUS, None)
        for name in UNUSED_SCHEMAS:
            description["components"]["schemas"].pop(name, None)
        return description

    app.openapi = openapi  # type: ignore[method-assign]

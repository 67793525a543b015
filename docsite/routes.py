"""Makes the reference of the HTTP routes from the list of operations behind the server's OpenAPI document.
Never describes a route in its own words."""

from __future__ import annotations

from collections.abc import Iterator

from serve_app.api.openapi.operations import OPERATIONS, UNVERSIONED, Operation

INTRODUCTION = """\
# Routes

Written by `make docs`. Routes under `/v1` also exist without it. [Fields of requests](api-fields.md) lists the fields
of their bodies, [The API](api.md) describes their behaviour, and [Troubleshooting](../how-to/troubleshooting.md)
explains their errors. Any route may answer with a 500.

| route | what it does | needs | a 200 is | other statuses |
|---|---|---|---|---|
"""


def render() -> str:
    """Render the page as Markdown, with a line for each route."""
    return INTRODUCTION + "\n".join(_rows()) + "\n"


def _rows() -> Iterator[str]:
    duplicates = {(operation.method, operation.path) for operation in UNVERSIONED}
    for operation in OPERATIONS:
        if (operation.method, operation.path) not in duplicates:
            yield _row(operation)


def _row(operation: Operation) -> str:
    needs = operation.needs if operation.needs != "api key" else "an API key, if there are any"
    statuses = ", ".join(map(str, sorted({*operation.errors, *_refusals(operation)})))
    route = f"`{operation.method.upper()} {operation.path}`"
    return f"| {route} | {operation.summary} | {needs} | {_answer(operation)} | {statuses} |"


def _refusals(operation: Operation) -> tuple[int, ...]:
    return {"nothing": (), "api key": (401,), "admin key": (401, 403)}[operation.needs]


def _answer(operation: Operation) -> str:
    if operation.chunk is not None:
        return "JSON, or server-sent events"
    return {"application/json": "JSON", "": "empty"}.get(operation.media_type, operation.media_type)

"""Makes the reference of the HTTP routes from the list of operations that the server's OpenAPI document is made from.
Never describes a route in words of its own."""

from __future__ import annotations

from collections.abc import Iterator

from serve_app.api.openapi.operations import OPERATIONS, UNVERSIONED, Operation

INTRODUCTION = """\
# Routes

Written by `make docs`. Routes under `/v1` are also there without it. [Fields of requests](api-fields.md) has what
their bodies take, [The API](api.md) how they behave, and [Troubleshooting](../how-to/troubleshooting.md) what their
errors mean. Any route may answer with a 500.

| route | what it does | needs | a 200 is | other statuses |
|---|---|---|---|---|
"""


def render() -> str:
    """The page as Markdown: a line for each route."""
    return INTRODUCTION + "\n".join(_rows()) + "\n"


def _rows() -> Iterator[str]:
    again = {(one.method, one.path) for one in UNVERSIONED}
    for operation in OPERATIONS:
        if (operation.method, operation.path) not in again:
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

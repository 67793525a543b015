"""Owns the promise that every error code has its entry in docs/how-to/troubleshooting.md, with all its statuses.
Never judges what an entry says."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from http import HTTPStatus
from pathlib import Path

import pytest

from docsite.error_reference import ENTRIES
from serve_app.errors.api_error import ENGINE_RULES

PACKAGE = Path(__file__).parents[2] / "serve_app"
PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "troubleshooting.md"
POSITIONAL = {"_Rule": 2, "Refusal": 1, "_error": 0}
"""Functions that are called with a code, and the position of that argument."""
TABLES = {"code"}
"""Parameters that take a table of codes, such as `{404: "not_found"}`, or one of its entries."""


def words(node: ast.expr | None) -> Iterator[str]:
    """Return the texts that an expression may have."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
    elif isinstance(node, ast.IfExp):
        yield from words(node.body)
        yield from words(node.orelse)
    elif isinstance(node, ast.Dict):
        for value in node.values:
            yield from words(value)
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "get":
        yield from words(node.func.value)
        for argument in node.args:
            yield from words(argument)


def status_of(call: ast.Call) -> int | None:
    """Return the status that comes first in the call, as a number or by name."""
    first = call.args[0] if call.args else None
    if isinstance(first, ast.Constant) and isinstance(first.value, int):
        return first.value
    if isinstance(first, ast.Attribute) and first.attr in HTTPStatus.__members__:
        return HTTPStatus[first.attr].value
    return None


def codes_of(node: ast.AST) -> Iterator[tuple[str, int | None]]:
    if isinstance(node, ast.Call):
        name = node.func.id if isinstance(node.func, ast.Name) else ""
        place = POSITIONAL.get(name)
        given = [word.value for word in node.keywords if word.arg == "code"]
        given += node.args[place : place + 1] if place is not None else []
        yield from ((code, status_of(node)) for value in given for code in words(value))
    elif isinstance(node, ast.Assign):
        names = {target.id for target in node.targets if isinstance(target, ast.Name)}
        if names & TABLES:
            yield from ((code, None) for code in words(node.value) if code not in {"type", "code", "ctx"})
        elif "UNSUPPORTED" in names:
            yield from ((code, 400) for code in words(node.value))


@pytest.fixture(scope="module")
def found() -> dict[str, set[int]]:
    """Map each code to the statuses that are used with it in the code."""
    codes: defaultdict[str, set[int]] = defaultdict(set)
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            for code, status in codes_of(node):
                codes[code] |= {status} if status is not None else set()
    return codes


def test_every_code_has_its_entry_and_no_entry_is_of_a_code_that_is_gone(found: dict[str, set[int]]) -> None:
    assert found.keys() == ENTRIES.keys()


def test_an_entry_has_every_status_that_stands_beside_its_code(found: dict[str, set[int]]) -> None:
    wrong = {code: statuses for code, statuses in found.items() if not statuses <= set(ENTRIES[code].statuses)}
    assert not wrong


def test_the_engines_codes_are_given_with_their_statuses() -> None:
    assert all(rule.status in ENTRIES[rule.code].statuses for rule in ENGINE_RULES.values())


def test_the_page_has_each_code_once_with_a_meaning_and_a_remedy() -> None:
    page = PAGE.read_text(encoding="utf-8")
    for code, entry in ENTRIES.items():
        assert page.count(f"| `{code}` |") == 1
        assert entry.meaning.endswith(".")
        assert entry.remedy.endswith(".")

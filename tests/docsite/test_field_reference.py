"""Owns the promise that docs/reference/api-fields.md has every field of every route, in its right class.
Never judges what class a field should have."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, get_args

import pytest
from pydantic import BaseModel, Field, Tag

import serve_app
from docsite.field_reference import bodies_of, render, rows
from serve_app.api.admin.adapters import LoadAdapterRequest
from serve_app.api.anthropic.schema import CountTokensRequest, MessagesRequest
from serve_app.api.anthropic.tools import FAMILIES
from serve_app.api.openai.responses.includes import LOGPROBS, Includable
from serve_app.api.openai.responses.schema import ResponsesRequest
from serve_app.api.openai.responses.tools import HOSTED
from serve_app.api.openapi.operations import OPERATIONS
from serve_app.api.requests.schema import ChatRequest
from serve_app.api.requests.strict_model import USED_IF_POSSIBLE, StrictModel, Unsupported
from serve_app.api.requests.unions import by_type
from tests.serve_app.api.anthropic.test_anthropic_hints import OF_AN_ANSWER, SAME_ANSWER
from tests.serve_app.api.openai.responses.test_responses_hints import HINTS as RESPONSES_HINTS

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "api-fields.md"
BODIES = list(dict.fromkeys(one.body for one in OPERATIONS if one.body is not None))
SECTIONS = {
    section.partition("\n")[0]: dict(re.findall(r"^\| `([^`]+)` \| (\w+) \|", section, re.MULTILINE))
    for section in PAGE.read_text().split("\n## ")[1:]
}


def test_the_page_is_what_the_schemas_say() -> None:
    assert PAGE.read_text() == render(), "run `make docs`"


@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
def test_the_table_has_every_field_that_the_openapi_document_has_and_what_is_not_in_it(body: type[BaseModel]) -> None:
    """Pydantic finds the objects of a body in its own way, and knows nothing of hints and refusals."""
    document = body.model_json_schema(by_alias=True)
    objects = {name: schema.get("properties") for name, schema in document.get("$defs", {}).items()}
    objects[body.__name__] = document.get("properties")
    found: defaultdict[type[BaseModel], dict[str, str]] = defaultdict(dict)
    for row in [row for kind in bodies_of(body) for row in rows(kind)]:
        found[row.model][row.name] = row.kind
    assert {name for name, fields in objects.items() if fields} <= {model.__name__ for model in found} <= objects.keys()
    for model, told in found.items():
        also = set[str]()
        if issubclass(model, StrictModel):
            also = model.hints.keys() | model.unsupported.keys() | model.value_hints.keys()
        assert told.keys() == (objects[model.__name__] or {}).keys() | also, model
        if issubclass(model, StrictModel):
            assert {told[name] for name in model.hints} <= {"hint"}, model
            assert {told[name] for name in model.unsupported} <= {"refused"}, model


def test_every_route_that_takes_a_body_has_a_table() -> None:
    told = {title.split()[1].removeprefix("/v1") for title in SECTIONS}
    assert told == {one.path.removeprefix("/v1") for one in OPERATIONS if one.body is not None}


@pytest.mark.parametrize(
    ("route", "field", "kind"),
    [
        ("/v1/chat/completions", "temperature", "honoured"),
        ("/v1/chat/completions", "user", "honoured"),
        ("/v1/chat/completions", "verbosity", "hint"),
        ("/v1/chat/completions", "reasoning_effort", "hint"),
        ("/v1/chat/completions", "reasoning.max_tokens", "hint"),
        ("/v1/chat/completions", "guided_json", "refused"),
        ("/v1/chat/completions", "messages[].content[]{text}.cache_control", "hint"),
        ("/v1/chat/completions", "messages[].content[]{image_url}.image_url.detail", "honoured"),
        ("/v1/chat/completions", "response_format{json_schema}.json_schema.schema", "honoured"),
        ("/v1/chat/completions", "tools[].function.cache_control", "hint"),
        ("/v1/completions", "suffix", "refused"),
        ("/v1/embeddings", "dimensions", "refused"),
        ("/v1/load_lora_adapter", "lora_path", "honoured"),
    ],
)
def test_a_field_is_found_by_its_path(route: str, field: str, kind: str) -> None:
    assert SECTIONS[f"POST {route}"][field] == kind


def _named(body: type[BaseModel]) -> set[str]:
    """Return the names that the response header may give for hints in a body, according to its table."""
    found = set()
    for row in (row for kind in bodies_of(body) for row in rows(kind) if row.kind == "hint"):
        of_model = row.model.hint_path + row.name if issubclass(row.model, StrictModel) else row.name
        found |= {re.sub(r"\[\]|\{[^}]*\}", "", row.path), of_model}
    return found


CALLS = ("ignore", "without_effect", "ignore_or_refuse", "ignore_hint_in_schema", "hint_where_refused", "pass_over")
"""Functions whose first argument is the name of a hint."""


def _names_in_code() -> set[str]:
    """Collect the names of hints in the code; of a name that is put together, the beginning, up to a dot."""
    found = set()
    for path in (Path(serve_app.__file__).parent / "api").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            called = getattr(node.func, "attr", getattr(node.func, "id", "")) if isinstance(node, ast.Call) else ""
            if not isinstance(node, ast.Call) or called not in CALLS:
                continue
            match node.args[0]:
                case ast.Constant(value=str(name)):
                    found.add(name)
                case ast.JoinedStr(values=[ast.Constant(value=str(begin)), *_]):
                    found.add(begin)
    return found


def test_each_hint_that_the_code_names_has_a_row() -> None:
    names = {name for body in BODIES for name in _named(body)}
    in_code = _names_in_code()
    assert {"tools.allowed_callers", "metadata", "include.", "tools.", "input.", "messages."} <= in_code
    assert {name for name in in_code if not name.endswith(".")} <= names
    for begin in (name for name in in_code if name.endswith(".")):
        assert any(name.startswith(begin) for name in names), begin


def test_each_hint_that_a_test_asks_for_has_a_row_of_its_route() -> None:
    assert {name for _, name, _ in RESPONSES_HINTS} <= _named(ResponsesRequest)
    assert {name for _, name, _, _ in SAME_ANSWER + OF_AN_ANSWER} <= _named(MessagesRequest)
    assert {name for _, name, _, _ in SAME_ANSWER} <= _named(CountTokensRequest)


@pytest.mark.parametrize("kind", [*HOSTED, "shell", "format"])
def test_each_tool_that_a_response_does_not_run_has_a_row(kind: str) -> None:
    assert SECTIONS["POST /v1/responses"][f"tools.{kind}"] == "hint"


@pytest.mark.parametrize("kind", get_args(Includable))
def test_each_value_of_include_has_a_row_but_the_one_that_is_honoured(kind: str) -> None:
    assert (f"include.{kind}" in SECTIONS["POST /v1/responses"]) is (kind != LOGPROBS)


def test_each_family_of_anthropics_tools_has_a_row() -> None:
    for route in ("/v1/messages", "/v1/messages/count_tokens"):
        assert {SECTIONS[f"POST {route}"][f"tools.{name}"] for name in FAMILIES.values()} == {"hint"}


class _Stone(StrictModel):
    is_hint: ClassVar[bool] = True
    type: str


class _Leaf(StrictModel):
    hints: ClassVar[Unsupported] = {"shade": (1,)}
    type: Literal["leaf", "needle", "thorn"]
    again: list[_Node] | None = None


class _Node(StrictModel):
    unsupported: ClassVar[Unsupported] = {"weight": ()}
    type: Literal["node"]
    """Which it is."""
    held: _Held | None = None
    leaves: Annotated[list[_Leaf], Field(max_length=3)] | list[_Leaf] | tuple[str, ...] | None = None
    stone: _Stone | None = None
    schema_: Annotated[dict[str, Any] | None, USED_IF_POSSIBLE] = Field(None, alias="schema")


_Held = Annotated[
    Annotated[_Leaf, Tag("<leaf>")] | Annotated[_Node, Tag("<node>")],
    by_type(("leaf", "needle", "thorn", "node"), "one"),
]
_Leaf.model_rebuild()
_Node.model_rebuild()


def test_objects_are_described_in_their_place_and_those_that_hold_themselves_once() -> None:
    assert [(row.path, row.kind, row.meaning) for row in rows(_Node)] == [
        ("type", "honoured", "Which it is. One of `node`."),
        ("held", "honoured", ""),
        ("held{leaf/needle/…}.type", "honoured", "One of `leaf`, `needle`, `thorn`."),
        ("held{leaf/needle/…}.again", "honoured", ""),
        ("held{leaf/needle/…}.shade", "hint", "`1`: as it is anyway."),
        ("leaves", "honoured", ""),
        ("leaves[].type", "honoured", "One of `leaf`, `needle`, `thorn`."),
        ("leaves[].again", "honoured", ""),
        ("leaves[].shade", "hint", "`1`: as it is anyway."),
        ("stone", "honoured", ""),
        ("stone.type", "hint", ""),
        ("schema", "hint", ""),
        ("weight", "refused", ""),
    ]


def test_the_bodies_of_this_test_are_those_of_the_routes() -> None:
    assert {ChatRequest, ResponsesRequest, MessagesRequest, LoadAdapterRequest} <= set(BODIES)

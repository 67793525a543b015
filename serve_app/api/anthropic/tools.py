"""Defines the tools of an Anthropic request: the client's own, those with published schemas, and those that only
Anthropic runs. Never decides how a model sees one: `conversation` does."""

from __future__ import annotations

import re
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, model_validator
from pydantic_core import PydanticCustomError

from serve_app.api.anthropic.blocks import CacheMark
from serve_app.api.anthropic.client_tools import CLIENT_TOOLS, ClientToolForm
from serve_app.api.anthropic.hinted import ignore_hint_in_schema
from serve_app.api.requests.messages import FUNCTION_NAME
from serve_app.api.requests.strict_model import StrictModel, Unsupported
from serve_app.api.requests.unions import of_types

FAMILIES = {
    **{name: name for name in ("web_search", "web_fetch", "code_execution", "advisor", "mcp_toolset")},
    **dict.fromkeys(("tool_search_tool_bm25", "tool_search_tool_regex"), "tool_search"),
    **{name: name for name in ("bash", "text_editor", "memory", "computer", "computer_toolset", "browser_toolset")},
}
"""Maps types of tools that do not exist here to their hints' names. Types with known schemas are other versions."""
_UNDATED = ("mcp_toolset", "tool_search_tool_bm25", "tool_search_tool_regex")
_ABSENT = rf"^(?:(?:{'|'.join(FAMILIES)})_[0-9]{{8}}|{'|'.join(_UNDATED)})$"


_VERSION = re.compile("_[0-9]{8}$")


def _is_absent(kind: str) -> bool:
    return re.fullmatch(_ABSENT, kind) is not None


class _OfferedTool(StrictModel):
    hint_path: ClassVar[str] = "tools."
    hints: ClassVar[Unsupported] = {"defer_loading": (False,), "input_examples": ([],)}
    unsupported: ClassVar[Unsupported] = {
        "eager_input_streaming": (False, True),  # arguments are always streamed as they are written
    }
    allowed_callers: list[str] | None = Field(None, min_length=1, max_length=16)
    """The model gets the tool if `direct` is among them. Nobody but the model calls it."""
    strict: bool | None = None
    """If true, the inputs of every use of this tool follow its schema."""
    cache_control: CacheMark | None = None

    @model_validator(mode="after")
    def _only_the_model_calls(self) -> _OfferedTool:
        if self.allowed_callers not in (None, ["direct"]):
            why = "other callers than direct are not supported by the server"
            ignore_hint_in_schema("tools.allowed_callers", why, "allowed_callers")
        return self

    @property
    def is_offered(self) -> bool:
        """Whether the model may call it."""
        return self.allowed_callers is None or "direct" in self.allowed_callers


class Tool(_OfferedTool):
    type: Literal["custom"] | None = None
    name: str = Field(pattern=FUNCTION_NAME)
    description: str | None = None
    input_schema: dict[str, Any]
    """A JSON schema."""


class ClientTool(_OfferedTool):
    """A tool of Anthropic's that the client runs. The model gets it as a function with its published schema."""

    hints: ClassVar[Unsupported] = {**_OfferedTool.hints, "max_characters": ()}
    type: Literal[tuple(CLIENT_TOOLS)]  # type: ignore[valid-type]  # a single list of the types
    name: str

    @model_validator(mode="after")
    def _has_its_name(self) -> ClientTool:
        if self.name != self.form.name:
            text = f"should be {self.form.name}, as the type {self.type} says"
            raise PydanticCustomError("name", "{text}", {"text": text, "field": "name"})
        return self

    @property
    def form(self) -> ClientToolForm:
        return CLIENT_TOOLS[self.type]


class AbsentTool(BaseModel):
    """A tool that only Anthropic runs, or that no model here knows. The model does not get it, and its other fields are
    not read."""

    model_config = ConfigDict(strict=True, frozen=True)
    is_hint: ClassVar[bool] = True
    type: str = Field(pattern=_ABSENT)
    name: str | None = None

    @model_validator(mode="after")
    def _is_a_hint(self) -> AbsentTool:
        why = f"a tool of the type {self.type} is not supported by the server"
        ignore_hint_in_schema(f"tools.{FAMILIES[_VERSION.sub('', self.type)]}", why, "type")
        return self


def _class_of(value: Any) -> str | None:
    if isinstance(value, BaseModel):
        return f"<{type(value).__name__}>"
    if not isinstance(value, dict):
        return None
    kind = value.get("type")
    if not isinstance(kind, str) or kind == "custom":
        return "<Tool>"
    return "<ClientTool>" if kind in CLIENT_TOOLS else "<AbsentTool>"


AnyTool = Annotated[
    Annotated[Tool, Tag("<Tool>")]
    | Annotated[ClientTool, Tag("<ClientTool>")]
    | Annotated[AbsentTool, Tag("<AbsentTool>")],
    Discriminator(_class_of, custom_error_type="type", custom_error_message="should be an object"),
    of_types("custom", *CLIENT_TOOLS, is_hint=_is_absent),
]

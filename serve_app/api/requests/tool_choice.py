"""Defines the values of `tool_choice`, which say which tools an answer may or must call.
Never knows the tools themselves, nor how a call is written."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from serve_app.api.requests.messages import FUNCTION_NAME, MAX_TOOLS
from serve_app.api.requests.strict_model import StrictModel
from serve_app.api.requests.unions import kind_of


class FunctionName(StrictModel):
    name: str = Field(pattern=FUNCTION_NAME)


class NamedFunction(StrictModel):
    """The answer must be one call of this function."""

    type: Literal["function"]
    function: FunctionName


class Allowed(StrictModel):
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedFunction], Field(min_length=1, max_length=MAX_TOOLS, fail_fast=True)]


class AllowedTools(StrictModel):
    """The model gets all tools, and can call these."""

    type: Literal["allowed_tools"]
    allowed_tools: Allowed


def _kind_of_choice(value: Any) -> str | None:
    if isinstance(value, str):
        return "<word>"
    return kind_of(value, ("function", "allowed_tools"))


_CHOICES = "should be none, auto, required, or an object of type function or allowed_tools"


def choice_kinds() -> Discriminator:
    """Make the discriminator of a union with the tags `<word>`, `<function>` and `<allowed_tools>`."""
    return Discriminator(_kind_of_choice, custom_error_type="type", custom_error_message=_CHOICES)


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("<word>")]
    | Annotated[NamedFunction, Tag("<function>")]
    | Annotated[AllowedTools, Tag("<allowed_tools>")],
    choice_kinds(),
]


def must_call(choice: ToolChoice | None) -> bool:
    if isinstance(choice, AllowedTools):
        return choice.allowed_tools.mode == "required"
    return choice == "required" or isinstance(choice, NamedFunction)


def names_of(choice: ToolChoice | None) -> list[str] | None:
    """List the functions that may be called; None means all."""
    if isinstance(choice, NamedFunction):
        return [choice.function.name]
    return [one.function.name for one in choice.allowed_tools.tools] if isinstance(choice, AllowedTools) else None

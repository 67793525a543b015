"""Owns which tools a Responses request may, or must, call: the values of `tool_choice`.
Never looks for the tools; `toolbox` does."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag
from pydantic_core import PydanticCustomError

from serve_app.api.openai.responses.tools import HOSTED, HostedTool, type_alone
from serve_app.api.requests.messages import FUNCTION_NAME, MAX_TOOLS
from serve_app.api.requests.strict_model import UNSUPPORTED, StrictModel
from serve_app.api.requests.unions import kind_of


class ChosenFunction(StrictModel):
    """The answer is one call of this function. A function in a namespace is given by its own name, or by the one that
    the model reads."""

    type: Literal["function"]
    name: str = Field(pattern=FUNCTION_NAME)
    namespace: str | None = None


class ChosenCustom(StrictModel):
    """The answer is one call of this tool."""

    type: Literal["custom"]
    name: str = Field(pattern=FUNCTION_NAME)
    namespace: str | None = None


class ChosenLocal(StrictModel):
    """The answer is one call of this tool."""

    type: Literal["local_shell", "shell", "apply_patch"]


_LOCAL = ("local_shell", "shell", "apply_patch")


def _kind(value: Any) -> str | None:
    if isinstance(value, str):
        return "<word>"
    if kind_of(value, _LOCAL):
        return "<local>"
    return "<hosted>" if kind_of(value, HOSTED) else kind_of(value, ("function", "custom", "allowed_tools"))


_ONE = "should be an object of type function or custom"
Chosen = Annotated[
    Annotated[ChosenFunction, Tag("<function>")]
    | Annotated[ChosenCustom, Tag("<custom>")]
    | Annotated[ChosenLocal, Tag("<local>")]
    | Annotated[HostedTool, BeforeValidator(type_alone), Tag("<hosted>")],
    Discriminator(_kind, custom_error_type="type", custom_error_message=_ONE),
]


class ChosenTools(StrictModel):
    """The model is told of all tools, and can call only these."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[Chosen], Field(min_length=1, max_length=MAX_TOOLS, fail_fast=True)]


def _not_hosted(value: Any) -> Any:
    kind = value.get("type") if isinstance(value, dict) else None
    if kind in HOSTED:
        text = f"{kind} cannot be called: this server runs no such tool"
        raise PydanticCustomError("hosted", "{text}", {"text": text, "code": UNSUPPORTED})
    return value


_CHOICES = "should be none, auto, required, or an object of type function, custom or allowed_tools"
Choice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("<word>")]
    | Annotated[ChosenFunction, Tag("<function>")]
    | Annotated[ChosenCustom, Tag("<custom>")]
    | Annotated[ChosenLocal, Tag("<local>")]
    | Annotated[ChosenTools, Tag("<allowed_tools>")],
    Discriminator(_kind, custom_error_type="type", custom_error_message=_CHOICES),
    BeforeValidator(_not_hosted),
]

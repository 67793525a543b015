"""Owns the tools of a Responses request: functions, free-form tools, namespaces of both, and OpenAI's own.
Never tells a model of one; `toolbox` does."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import BeforeValidator, ConfigDict, Discriminator, Field, Tag

from serve_app.api.openai.responses.local_tools import LocalKind
from serve_app.api.requests.messages import FUNCTION_NAME, MAX_TOOLS
from serve_app.api.requests.strict_model import StrictModel, Unsupported
from serve_app.api.requests.structured import TextFormat, Written
from serve_app.api.requests.unions import by_type, kind_of, of_types

_NO = (False,)
_DIRECT = (["direct"], ["direct", "programmatic"], ["programmatic", "direct"])
"""The model itself may call it, whoever else may."""


class FunctionTool(StrictModel):
    unsupported: ClassVar[Unsupported] = {"async": _NO, "allowed_callers": _DIRECT}
    hints: ClassVar[Unsupported] = {"defer_loading": _NO, "output_schema": ()}
    hint_path: ClassVar[str] = "tools."
    type: Literal["function"]
    name: str = Field(pattern=FUNCTION_NAME)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """A JSON schema."""
    strict: bool | None = None
    """Constrain arguments to the schema. The default is true if the schema can be enforced; the answer says which."""


class GrammarFormat(StrictModel):
    """Text that follows a grammar. If that cannot be enforced, a forced call is refused, and others are free text."""

    type: Literal["grammar"]
    syntax: Literal["lark", "regex"]
    definition: Written


InputFormat = Annotated[
    Annotated[TextFormat, Tag("<text>")] | Annotated[GrammarFormat, Tag("<grammar>")],
    by_type(("text", "grammar"), "an object of type text or grammar"),
]


class CustomTool(StrictModel):
    """A tool whose input is text. The model writes it as a call with one argument, `input`."""

    unsupported: ClassVar[Unsupported] = {"async": _NO, "allowed_callers": _DIRECT}
    hints: ClassVar[Unsupported] = {"defer_loading": _NO}
    hint_path: ClassVar[str] = "tools."
    type: Literal["custom"]
    name: str = Field(pattern=FUNCTION_NAME)
    description: str | None = None
    format: InputFormat | None = None


Callable = Annotated[
    Annotated[FunctionTool, Tag("<function>")] | Annotated[CustomTool, Tag("<custom>")],
    by_type(("function", "custom"), "a tool of type function or custom"),
]


class NamespaceTool(StrictModel):
    """Tools under a common name, which the model sees in front of theirs."""

    type: Literal["namespace"]
    name: str = Field(pattern=FUNCTION_NAME)
    description: str = ""
    tools: Annotated[list[Callable], Field(max_length=MAX_TOOLS, fail_fast=True)]


class LocalTool(StrictModel):
    """A tool that the client runs, whose calls have a shape of their own."""

    unsupported: ClassVar[Unsupported] = {"allowed_callers": _DIRECT}
    type: Literal["local_shell", "apply_patch"]

    @property
    def name(self) -> LocalKind:
        return self.type

    @property
    def is_elsewhere(self) -> bool:
        """Whether the tool runs somewhere other than at the client."""
        return False


class ShellTool(StrictModel):
    """A shell that the client runs. In an OpenAI container it is a hint, like their other tools."""

    unsupported: ClassVar[Unsupported] = {"allowed_callers": _DIRECT}
    type: Literal["shell"]
    environment: dict[str, Any] | None = None
    """Has the type `local`, which is the default. The model is told of its skills."""

    @property
    def name(self) -> LocalKind:
        return self.type

    @property
    def is_elsewhere(self) -> bool:
        return self.environment is not None and self.environment.get("type") != "local"


Hosted = Literal[
    "web_search",
    "web_search_2025_08_26",
    "web_search_preview",
    "web_search_preview_2025_03_11",
    "file_search",
    "code_interpreter",
    "image_generation",
    "mcp",
    "tool_search",
    "computer",
    "computer_use",
    "computer_use_preview",
    "programmatic_tool_calling",
]
HOSTED: tuple[str, ...] = get_args(Hosted)


class HostedTool(StrictModel):
    """A tool that OpenAI's servers run and this one does not. The model is not told of it."""

    model_config = ConfigDict(extra="ignore")
    is_hint: ClassVar[bool] = True
    type: Hosted


def type_alone(value: Any) -> Any:
    """Drop all other fields, which are settings of a tool that is not run."""
    return {"type": value.get("type")} if isinstance(value, dict) else value


LOCAL = ("local_shell", "apply_patch")
_OURS = ("function", "custom", "namespace", "shell")


def _kind(value: Any) -> str | None:
    if kind_of(value, LOCAL):
        return "<local>"
    return "<hosted>" if kind_of(value, HOSTED) else kind_of(value, _OURS)


_TOOL = "should be an object of type function, custom, namespace, shell, local_shell or apply_patch, or a hosted tool"


Tool = Annotated[
    Annotated[FunctionTool, Tag("<function>")]
    | Annotated[CustomTool, Tag("<custom>")]
    | Annotated[NamespaceTool, Tag("<namespace>")]
    | Annotated[LocalTool, Tag("<local>")]
    | Annotated[ShellTool, Tag("<shell>")]
    | Annotated[HostedTool, BeforeValidator(type_alone), Tag("<hosted>")],
    Discriminator(_kind, custom_error_type="type", custom_error_message=_TOOL),
    of_types(*_OURS, *LOCAL, is_hint=HOSTED.__contains__),
]

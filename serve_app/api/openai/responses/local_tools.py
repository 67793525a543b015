"""Owns the tools that a client runs and OpenAI defines: `local_shell`, `shell` and `apply_patch`. Offers them as
functions, and returns their calls as items.
Never runs one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

Json = dict[str, Any]
LocalKind = Literal["local_shell", "shell", "apply_patch"]


class _Arguments(BaseModel):
    """What the model writes: its JSON schema is the function's."""

    model_config = ConfigDict(strict=True, extra="forbid")


class _LocalShell(_Arguments):
    command: list[str]
    working_directory: str = Field("", description="Where the command runs.")
    timeout_ms: int = Field(0, ge=0, description="Milliseconds after which it is ended.")


class _Shell(_Arguments):
    commands: list[str]
    timeout_ms: int = Field(0, ge=0, description="Milliseconds after which they are ended.")
    max_output_length: int = Field(0, ge=0, description="Most characters of each command's output.")


class _Patch(_Arguments):
    type: Literal["create_file", "update_file", "delete_file"]
    path: str
    diff: str = Field("", description="The file's changes as a V4A diff; of a file that is deleted, none.")


@dataclass(frozen=True, slots=True)
class _Shape:
    arguments: type[_Arguments]
    description: str
    item: str
    """The type of a call's item."""
    prefix: str
    """The prefix of the item's id."""


_SHAPES: Mapping[str, _Shape] = MappingProxyType(
    {
        "local_shell": _Shape(_LocalShell, "Runs a command: a program and its arguments.", "local_shell_call", "lsh"),
        "shell": _Shape(_Shell, "Runs commands in a shell, one after the other.", "shell_call", "sh"),
        "apply_patch": _Shape(_Patch, "Creates, changes or deletes a file.", "apply_patch_call", "apc"),
    }
)


def parameters(kind: LocalKind) -> Json:
    """Return the function's JSON schema."""
    schema = _SHAPES[kind].arguments.model_json_schema()
    names = ("type", "enum", "items", "description", "minimum")
    properties = {
        name: {word: told[word] for word in names if word in told} for name, told in schema["properties"].items()
    }
    return {
        "type": "object",
        "properties": properties,
        "required": schema["required"],
        "additionalProperties": False,
    }


def description(kind: LocalKind) -> str:
    return _SHAPES[kind].description


def id_prefix(kind: LocalKind) -> str:
    return _SHAPES[kind].prefix


def call_fields(kind: LocalKind, arguments: str) -> Json | None:
    """Return the fields of a call's item, or None if unconstrained arguments do not fit this tool."""
    try:
        given = _SHAPES[kind].arguments.model_validate_json(arguments).model_dump(exclude_unset=True)
    except ValidationError:
        return None
    if kind == "local_shell":
        given |= {"type": "exec", "env": {}}
    elif kind == "apply_patch" and given["type"] != "delete_file":
        given.setdefault("diff", "")
    elif kind == "apply_patch":
        given.pop("diff", None)
    return {"type": _SHAPES[kind].item, "operation" if kind == "apply_patch" else "action": given}


def arguments_of(action: Json) -> Json:
    """Return what the model wrote of a call that comes back, without what the item adds."""
    is_exec = action.get("type") == "exec"
    left = ("type", "env") if is_exec and not action.get("env") else ("type",) if is_exec else ()
    return {name: value for name, value in action.items() if name not in left and value is not None}

"""Owns items of tools that this server does not have, as other servers made them, and what they say to the model.
Never runs a tool, and never reads an item's settings, such as where a command ran: they are for whoever ran it."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, get_args

from pydantic import BeforeValidator, ConfigDict, Field

from serve_app.api.openai.responses.local_tools import arguments_of
from serve_app.api.requests.strict_model import StrictModel

Json = dict[str, Any]


class Called(NamedTuple):
    call_id: str
    name: str
    arguments: Json | str


class Answered(NamedTuple):
    call_id: str
    text: str


def only(model: type[StrictModel]) -> BeforeValidator:
    """Keep those fields of an object that this model has."""
    names = model.model_fields.keys()
    return BeforeValidator(
        lambda value: {name: value[name] for name in names if name in value} if isinstance(value, dict) else value
    )


class Replay(StrictModel, ABC):
    """An item that is a call, the answer to one, or both."""

    model_config = ConfigDict(extra="ignore")
    id: str | None = None

    @property
    @abstractmethod
    def told(self) -> Sequence[Called | Answered]:
        """The call, the answer, or both, in the conversation's order."""


class LocalShellCall(Replay):
    type: Literal["local_shell_call"]
    call_id: str
    action: Json

    @property
    def told(self) -> Sequence[Called | Answered]:
        return [Called(self.call_id, "local_shell", arguments_of(self.action))]


class LocalShellOutput(Replay):
    type: Literal["local_shell_call_output"]
    call_id: str | None = None
    """OpenAI calls it `id`."""
    output: str

    @property
    def told(self) -> Sequence[Called | Answered]:
        return [Answered(self.call_id or self.id or "", self.output)]


class ShellCall(Replay):
    type: Literal["shell_call"]
    call_id: str
    action: Json

    @property
    def told(self) -> Sequence[Called | Answered]:
        return [Called(self.call_id, "shell", arguments_of(self.action))]


class ShellOutput(Replay):
    type: Literal["shell_call_output"]
    call_id: str
    output: Annotated[list[Json], Field(fail_fast=True)]

    @property
    def told(self) -> Sequence[Called | Answered]:
        return [Answered(self.call_id, _written(self.output))]


class PatchCall(Replay):
    type: Literal["apply_patch_call"]
    call_id: str
    operation: Json

    @property
    def told(self) -> Sequence[Called | Answered]:
        return [Called(self.call_id, "apply_patch", arguments_of(self.operation))]


class PatchOutput(Replay):
    type: Literal["apply_patch_call_output"]
    call_id: str
    status: Literal["completed", "failed"]
    output: str | None = None

    @property
    def told(self) -> Sequence[Called | Answered]:
        return [Answered(self.call_id, self.output or self.status)]


class McpCall(Replay):
    """A call that another server made and answered."""

    type: Literal["mcp_call"]
    id: str
    server_label: str
    name: str
    arguments: str = "{}"
    output: str | None = None
    error: Any = None

    @property
    def told(self) -> Sequence[Called | Answered]:
        answer = self.output if self.output is not None else "" if self.error is None else _written(self.error)
        call = Called(self.id, f"{self.server_label}__{self.name}", self.arguments)
        return [call, Answered(self.id, answer)]


class CodeCall(Replay):
    type: Literal["code_interpreter_call"]
    id: str
    code: str | None = None
    outputs: Annotated[list[Json], Field(fail_fast=True)] | None = None

    @property
    def told(self) -> Sequence[Called | Answered]:
        logs = [str(output["logs"]) for output in self.outputs or () if "logs" in output]
        return [Called(self.id, "code_interpreter", {"code": self.code or ""}), Answered(self.id, "\n".join(logs))]


Unread = Literal[
    "web_search_call",
    "file_search_call",
    "image_generation_call",
    "computer_call",
    "computer_call_output",
    "mcp_list_tools",
    "mcp_approval_request",
    "mcp_approval_response",
    "tool_search_call",
    "tool_search_output",
    "program",
    "program_output",
    "compaction",
    "compaction_summary",
    "context_compaction",
]


class UnreadItem(StrictModel):
    """An item that holds nothing a model could read here."""

    model_config = ConfigDict(extra="ignore")
    is_hint: ClassVar[bool] = True
    type: Unread
    id: str | None = None


UNREAD: tuple[str, ...] = get_args(Unread)
REPLAYED = (
    *("local_shell_call", "local_shell_call_output", "shell_call", "shell_call_output"),
    *("apply_patch_call", "apply_patch_call_output", "mcp_call", "code_interpreter_call"),
)


def _written(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)

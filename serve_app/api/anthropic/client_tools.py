"""Owns the names and parameters of the tools that clients run and whose schemas Anthropic publishes.
Never runs one. The computer tool is not among them: it answers with images, which no template shows in a result."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

Json = dict[str, Any]

_STRING: Json = {"type": "string"}
_INTEGER: Json = {"type": "integer"}
_LINES: Json = {"type": "array", "items": _INTEGER, "minItems": 2, "maxItems": 2}


@dataclass(frozen=True, slots=True)
class ClientToolForm:
    name: str
    description: str
    properties: Json
    required: tuple[str, ...] = ()

    @property
    def input_schema(self) -> Json:
        return {"type": "object", "properties": self.properties, "required": list(self.required)}


def _command(*names: str) -> Json:
    return {"type": "string", "enum": list(names)}


_BASH = ClientToolForm(
    "bash",
    "Run a command in a bash shell that keeps its state between calls. With restart the shell begins anew.",
    {"command": _STRING, "restart": {"type": "boolean"}},
)
_EDITS: Json = {
    "path": _STRING,
    "file_text": _STRING,
    "old_str": _STRING,
    "new_str": _STRING,
    "insert_line": _INTEGER,
    "view_range": _LINES,
}
_FIRST_EDITOR = ClientToolForm(
    "str_replace_editor",
    "View, create and edit files. create takes file_text; str_replace takes old_str, which must be in the file exactly "
    "once, and new_str; insert puts new_str after insert_line; undo_edit takes the last edit of path back; view shows "
    "a file, or its lines of view_range, or a directory.",
    {"command": _command("view", "create", "str_replace", "insert", "undo_edit"), **_EDITS},
    ("command", "path"),
)
_EDITOR = ClientToolForm(
    "str_replace_based_edit_tool",
    "View, create and edit files. create takes file_text; str_replace takes old_str, which must be in the file exactly "
    "once, and new_str; insert puts insert_text after insert_line; view shows a file, or its lines of view_range, or a "
    "directory.",
    {"command": _command("view", "create", "str_replace", "insert"), **_EDITS, "insert_text": _STRING},
    ("command", "path"),
)
_MEMORY = ClientToolForm(
    "memory",
    "Keep notes for later in files under /memories. view shows a file or a directory, create takes file_text, "
    "str_replace takes old_str and new_str, insert puts insert_text after insert_line, delete takes path, and rename "
    "takes old_path and new_path. Look at /memories before you begin.",
    {
        "command": _command("view", "create", "str_replace", "insert", "delete", "rename"),
        **_EDITS,
        "insert_text": _STRING,
        "old_path": _STRING,
        "new_path": _STRING,
    },
    ("command",),
)

CLIENT_TOOLS = {
    "bash_20241022": _BASH,
    "bash_20250124": _BASH,
    "text_editor_20241022": _FIRST_EDITOR,
    "text_editor_20250124": _FIRST_EDITOR,
    "text_editor_20250429": _EDITOR,
    "text_editor_20250728": _EDITOR,
    "memory_20250818": _MEMORY,
}
"""Maps types to tools. Versions that are not listed take other parameters."""

"""Extracts the text that a model reads from the results of tools that another server ran.
Never runs a tool, and never guesses at encrypted or other contents."""

from __future__ import annotations

import json
from typing import Any

_MAX_NAME_CHARS = 50


class Unreadable(ValueError):
    """The content has no text."""


def tagged(kind: str, text: str) -> str:
    """Wrap a text in a tag named after the type of its block."""
    return f"<{kind}>\n{text}\n</{kind}>"


def call_text(name: str, given: dict[str, Any]) -> str:
    return f"{name} {json.dumps(given, ensure_ascii=False)}"


def readable(content: Any) -> str:
    """Return the text of a result's content: a string, an object of a known form, or a list of these.

    Raises:
        Unreadable: the content has no text; the message names its type.
    """
    match content:
        case str(text):
            return text
        case list(parts):
            return "\n".join(map(readable, parts))
        case {"type": "text", "text": str(text)} | {"type": "advisor_result", "text": str(text)}:
            return text
        case {"type": "web_search_result", "title": str(title), "url": str(url)}:
            return f"{title}\n{url}"
        case {"type": "web_fetch_result", "url": str(url), "content": dict(document)}:
            return f"{url}\n{readable(document)}"
        case {"type": "document", "source": {"type": "text", "data": str(text)}}:
            return text
        case {"type": "tool_search_tool_search_result", "tool_references": list(references)}:
            return readable(references)
        case {"type": "tool_reference", "tool_name": str(name)}:
            return name
        case {"stdout": str(out), "stderr": str(err), "return_code": int(code)}:
            return "\n".join(part for part in (out, err, f"exit code {code}") if part)
        case {"error_code": str(code)}:
            return f"Error: {code}"
        case {"type": "text_editor_code_execution_view_result", "content": str(text)}:
            return text
        case {"type": "text_editor_code_execution_create_result", "is_file_update": bool(is_update)}:
            return "The file was changed." if is_update else "The file was created."
        case {"type": "text_editor_code_execution_str_replace_result"}:
            return readable(content.get("lines") or [])
    raise Unreadable(f"{_kind(content)} has no text that a model could read")


def _kind(content: Any) -> str:
    kind = content.get("type") if isinstance(content, dict) else None
    if not isinstance(kind, str):
        return "this content"
    source = content.get("source")
    part = f"a part of the type {kind[:_MAX_NAME_CHARS]!r}"
    if not isinstance(source, dict):
        return part
    return f"{part} with a source of the type {str(source.get('type'))[:_MAX_NAME_CHARS]!r}"

"""Owns the task that each agent library does, the three tools for it, and loops for SDKs that have none.
Never imports anything of ours, nor a library: the code of tests/clients/tasks.py runs in the clients' environment."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

TASK = "Read greeting.txt, make it say goodbye instead of hello, then shout it by a command."
KEY = "none"
MOST_TURNS = 8


def read_file(path: str) -> str:
    """Read a file.

    Args:
        path: The file's path.
    """
    return Path(path).read_text()


def replace_in_file(path: str, old: str, new: str) -> str:
    """Replace a text in a file.

    Args:
        path: The file's path.
        old: What is replaced.
        new: What stands there afterwards.
    """
    file = Path(path)
    text = file.read_text()
    assert old in text, f"{path} does not contain {old!r}"
    file.write_text(text.replace(old, new))
    return f"Replaced in {path}."


def run_command(command: str) -> str:
    """Run a shell command.

    Args:
        command: The command line.
    """
    return subprocess.run(command, shell=True, capture_output=True, text=True, timeout=30, check=True).stdout


FUNCTIONS: dict[str, Callable[..., str]] = {f.__name__: f for f in (read_file, replace_in_file, run_command)}


def schema_of(function: Callable[..., str]) -> dict[str, Any]:
    names = [name for name in function.__annotations__ if name != "return"]
    properties = {name: {"type": "string"} for name in names}
    return {"type": "object", "properties": properties, "required": names, "additionalProperties": False}


def function_of(function: Callable[..., str]) -> dict[str, Any]:
    told = (function.__doc__ or "").partition("\n")[0]
    return {"name": function.__name__, "description": told, "parameters": schema_of(function)}


FUNCTION_TOOLS: list[Any] = [{"type": "function", "function": function_of(each)} for each in FUNCTIONS.values()]
RESPONSES_TOOLS: list[Any] = [{"type": "function", "strict": False, **function_of(each)} for each in FUNCTIONS.values()]
ANTHROPIC_TOOLS: list[Any] = [
    {"name": name, "description": (each.__doc__ or "").partition("\n")[0], "input_schema": schema_of(each)}
    for name, each in FUNCTIONS.items()
]


def result_of(name: str, arguments: str | dict[str, Any]) -> str:
    return FUNCTIONS[name](**(json.loads(arguments) if isinstance(arguments, str) else arguments))


def chat_loop(complete: Callable[[list[Any]], Any]) -> str:
    """Run the loop where `complete` answers messages with a chat message."""
    messages: list[Any] = [{"role": "user", "content": TASK}]
    for _ in range(MOST_TURNS):
        message = complete(messages)
        messages.append(message.model_dump(exclude_none=True))
        if not message.tool_calls:
            return str(message.content)
        for call in message.tool_calls:
            content = result_of(call.function.name, call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": content})
    raise AssertionError("the task did not end")


def responses_loop(respond: Callable[[list[Any]], Any]) -> str:
    """Run the loop where `respond` answers items with a response."""
    items: list[Any] = [{"role": "user", "content": TASK}]
    for _ in range(MOST_TURNS):
        response = respond(items)
        items += [item.model_dump(exclude_none=True) for item in response.output]
        calls = [item for item in response.output if item.type == "function_call"]
        if not calls:
            return "".join(part.text for item in response.output if item.type == "message" for part in item.content)
        for call in calls:
            output = result_of(call.name, call.arguments)
            items.append({"type": "function_call_output", "call_id": call.call_id, "output": output})
    raise AssertionError("the task did not end")


def messages_loop(create: Callable[[list[Any]], Any]) -> str:
    """Run the loop where `create` answers turns with an Anthropic message."""
    turns: list[Any] = [{"role": "user", "content": TASK}]
    for _ in range(MOST_TURNS):
        message = create(turns)
        blocks = [block.model_dump(exclude_none=True) for block in message.content]
        turns.append({"role": "assistant", "content": blocks})
        calls = [block for block in message.content if block.type == "tool_use"]
        if not calls:
            return "".join(block.text for block in message.content if block.type == "text")
        results = [
            {"type": "tool_result", "tool_use_id": call.id, "content": result_of(call.name, call.input)}
            for call in calls
        ]
        turns.append({"role": "user", "content": results})
    raise AssertionError("the task did not end")

"""Owns the promise that an object of an unknown type is refused in the same words on every route: its field, its type,
and the types that exist.
Never asks what the known types do."""

from __future__ import annotations

from typing import Any

import pytest

from tests.serve_app.harness import CHAT, MODEL, ScriptedClient, app_for, post

pytestmark = pytest.mark.anyio

OTHER = {"type": "telephone", "tools": [], "deep": {"x": 1}}
ASSISTANT = {"role": "assistant", "content": None, "tool_calls": [OTHER]}
RESULT = {"type": "tool_result", "tool_use_id": "a", "content": [OTHER]}
MESSAGE = {"model": MODEL.id, "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]}
RESPONSE = {"model": MODEL.id, "input": "hi"}


def said(*content: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(content)}]}


@pytest.mark.parametrize(
    ("path", "body", "place", "known"),
    [
        ("/v1/chat/completions", CHAT | {"tools": [OTHER]}, "tools.0", "function"),
        ("/v1/chat/completions", CHAT | said(OTHER), "messages.0.content.0", "text, image_url, refusal"),
        (
            "/v1/chat/completions",
            CHAT | {"messages": [*CHAT["messages"], ASSISTANT]},
            "messages.1.tool_calls.0",
            "function",
        ),
        (
            "/v1/responses",
            RESPONSE | {"tools": [OTHER]},
            "tools.0",
            "function, custom, namespace, shell, local_shell, apply_patch",
        ),
        (
            "/v1/responses",
            RESPONSE | {"input": [OTHER]},
            "input.0",
            "message, function_call, function_call_output, custom_tool_call, custom_tool_call_output, reasoning, "
            "additional_tools, item_reference, local_shell_call, local_shell_call_output, shell_call, "
            "shell_call_output, apply_patch_call, apply_patch_call_output, mcp_call, code_interpreter_call",
        ),
        (
            "/v1/messages",
            MESSAGE | {"tools": [OTHER]},
            "tools.0",
            "custom, bash_20241022, bash_20250124, text_editor_20241022, text_editor_20250124, text_editor_20250429, "
            "text_editor_20250728, memory_20250818",
        ),
        ("/v1/messages", MESSAGE | {"thinking": OTHER}, "thinking", "disabled, adaptive, enabled"),
        (
            "/v1/messages",
            MESSAGE | said(RESULT),
            "messages.0.content.0.tool_result.content.0",
            "text, image, document, search_result, tool_reference",
        ),
        (
            "/v1/messages",
            MESSAGE | said({"type": "document", "source": OTHER}),
            "messages.0.content.0.document.source",
            "text, content",
        ),
        (
            "/v1/messages",
            MESSAGE | said({"type": "image", "source": OTHER}),
            "messages.0.content.0.image.source",
            "base64, url",
        ),
        (
            "/v1/responses",
            {"model": MODEL.id, "input": [{"role": "user", "content": [OTHER]}]},
            "input.0.content.0",
            "input_text, output_text, input_image, refusal",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) and len(value) < 40 else "",
)
async def test_an_object_of_an_unknown_type_is_refused_by_it(path: str, body: Any, place: str, known: str) -> None:
    answer = await post(app_for(ScriptedClient()), path, body)
    error = answer.anthropic_error if path == "/v1/messages" else answer.error
    told = f"{place}.type: the type telephone is not supported by the server; supported are: {known}"
    assert (answer.status, error["message"]) == (400, told)
    assert path == "/v1/messages" or (error["param"], error["code"]) == (f"{place}.type", "unsupported_parameter")


async def test_a_word_that_is_unknown_is_refused_likewise() -> None:
    answer = await post(app_for(ScriptedClient()), "/v1/responses", RESPONSE | {"include": ["telephone"]})
    told = "include.0: telephone is not supported by the server; supported are: message.output_text.logprobs, "
    assert (answer.status, answer.error["param"], answer.error["code"]) == (400, "include.0", "unsupported_parameter")
    assert answer.error["message"].startswith(told)


async def test_only_the_beginning_of_a_long_type_is_quoted() -> None:
    answer = await post(app_for(ScriptedClient()), "/v1/responses", RESPONSE | {"tools": [{"type": "x" * 500}]})
    assert f"the type {'x' * 49}… is not supported" in answer.error["message"]

"""Owns what a model reads of those blocks and tools of Anthropic's requests that chats do not have.
Never tests those that chats have, too; test_anthropic does."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

import pytest

from serve_app.api.anthropic.client_tools import CLIENT_TOOLS
from serve_app.api.http.hint_header import HEADER
from tests.serve_app.api.anthropic.test_anthropic import ASK, TOOLS, USE, ask, count, read_by_the_model
from tests.serve_app.api.generation.test_tools import CALLER, app_of, prompt_of, saying
from tests.serve_app.harness import post

pytestmark = pytest.mark.anyio

TEXT = {"type": "text", "text": "hi"}
AGAIN = {"role": "user", "content": "And?"}


def turns(role: str, *blocks: Any) -> list[dict[str, Any]]:
    """Return a conversation that has a turn of these blocks and can be answered."""
    turn = {"role": role, "content": list(blocks)}
    return [*ASK["messages"], turn, AGAIN] if role == "assistant" else [turn]


async def refused(**fields: Any) -> str:
    client = saying("x")
    answer = await ask(client, **fields)
    assert (answer.status, client.submissions) == (400, [])
    return str(answer.anthropic_error["message"])


# --- documents, and what was found ----------------------------------------------------------------------------------

PLAIN = {"type": "text", "media_type": "text/plain", "data": "Fish swim."}
SOURCES = [
    PLAIN,
    {"type": "content", "content": "Fish swim."},
    {"type": "content", "content": [TEXT | {"text": "Fish swim."}]},
]
OF_THE_USER = [
    *[({"type": "document", "source": source}, "<document>\nFish swim.\n</document>") for source in SOURCES],
    (
        {"type": "document", "source": PLAIN, "title": "On fish", "context": "c", "citations": {"enabled": False}},
        "<document>\nOn fish\nc\nFish swim.\n</document>",
    ),
    (
        {
            "type": "search_result",
            "source": "s",
            "title": "t",
            "content": [TEXT],
            "cache_control": {"type": "ephemeral"},
        },
        "<search_result>\nt\ns\nhi\n</search_result>",
    ),
]


@pytest.mark.parametrize(("block", "read"), OF_THE_USER, ids=str)
async def test_what_has_text_is_read_as_text_by_the_user_and_in_results(block: Any, read: str) -> None:
    assert await read_by_the_model(messages=turns("user", block, TEXT)) == f"[user:{read}\nhi]>"
    result = {"type": "tool_result", "tool_use_id": "c", "content": [block, TEXT]}
    messages = [*ASK["messages"], {"role": "assistant", "content": [USE]}, {"role": "user", "content": [result]}]
    assert (await read_by_the_model(messages=messages)).endswith(f"[tool:{read}\nhi]>")


async def test_a_result_may_refer_to_tools() -> None:
    reference = {"type": "tool_reference", "tool_name": "weather"}
    result = {"type": "tool_result", "tool_use_id": "c", "content": [reference]}
    messages = [*ASK["messages"], {"role": "assistant", "content": [USE]}, {"role": "user", "content": [result]}]
    assert (await read_by_the_model(messages=messages)).endswith("[tool:<tool_reference>\nweather\n</tool_reference>]>")


OPENED = {"type": "document", "source": PLAIN, "title": None}
RESULTS = [
    (
        "web_search_tool_result",
        [{"type": "web_search_result", "title": "t", "url": "u", "encrypted_content": "E"}],
        "t\nu",
    ),
    ("web_search_tool_result", {"type": "web_search_tool_result_error", "error_code": "too_many"}, "Error: too_many"),
    ("web_fetch_tool_result", {"type": "web_fetch_result", "url": "u", "content": OPENED}, "u\nFish swim."),
    (
        "code_execution_tool_result",
        {"type": "code_execution_result", "stdout": "1", "stderr": "", "return_code": 0, "content": []},
        "1\nexit code 0",
    ),
    (
        "bash_code_execution_tool_result",
        {"type": "bash_code_execution_result", "stdout": "", "stderr": "no", "return_code": 1, "content": []},
        "no\nexit code 1",
    ),
    (
        "text_editor_code_execution_tool_result",
        {"type": "text_editor_code_execution_view_result", "content": "line", "file_type": "text"},
        "line",
    ),
    (
        "text_editor_code_execution_tool_result",
        {"type": "text_editor_code_execution_create_result", "is_file_update": False},
        "The file was created.",
    ),
    (
        "text_editor_code_execution_tool_result",
        {"type": "text_editor_code_execution_str_replace_result", "lines": ["-a", "+b"]},
        "-a\n+b",
    ),
    (
        "tool_search_tool_result",
        {
            "type": "tool_search_tool_search_result",
            "tool_references": [{"type": "tool_reference", "tool_name": "weather"}],
        },
        "weather",
    ),
    ("advisor_tool_result", {"type": "advisor_result", "text": "Think."}, "Think."),
    ("mcp_tool_result", "done", "done"),
    ("mcp_tool_result", [TEXT, TEXT], "hi\nhi"),
]


@pytest.mark.parametrize(("kind", "content", "read"), RESULTS, ids=str)
async def test_what_a_tool_that_another_server_ran_was_asked_and_gave_is_read_in_its_place(
    kind: str, content: Any, read: str
) -> None:
    call = {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {"query": "fish"}}
    result = {"type": kind, "tool_use_id": "s", "content": content}
    prompt = await read_by_the_model(messages=turns("assistant", TEXT, call, result, TEXT))
    told = f'<server_tool_use>\nweb_search {{"query": "fish"}}\n</server_tool_use>\n<{kind}>\n{read}\n</{kind}>'
    assert prompt == f"[user:hi][assistant:hi\n{told}\nhi][user:And?]>"


async def test_a_summary_of_what_was_said_is_read_and_one_that_failed_is_not() -> None:
    done = {"type": "compaction", "content": "We spoke of fish."}
    failed = {"type": "compaction", "content": None}
    prompt = await read_by_the_model(messages=turns("assistant", done, failed, TEXT))
    assert prompt == "[user:hi][assistant:<compaction>\nWe spoke of fish.\n</compaction>\nhi][user:And?]>"


PDF = {"type": "base64", "media_type": "application/pdf", "data": "JVBERi0="}


@pytest.mark.parametrize(
    ("role", "block", "named"),
    [
        (
            "user",
            {"type": "container_upload", "file_id": "f"},
            "content.0.type: the type container_upload is not supported",
        ),
        ("user", {"type": "x" * 500, "deep": 1}, "content.0.type: the type xxx"),
        ("assistant", {"type": "tool_addition", "tool": {}}, "content.0.type: the type tool_addition is not supported"),
        (
            "user",
            {"type": "document", "source": PDF},
            "content.0.document.source.type: the type base64 is not supported",
        ),
        ("user", {"type": "document", "source": {"type": "file", "file_id": "f"}}, "the type file is not supported"),
        (
            "user",
            {"type": "document", "source": PLAIN, "citations": {"enabled": True}},
            "content.0.document.citations: ",
        ),
        ("user", {"type": "redacted_thinking", "data": "E"}, "only allowed in a message of the assistant"),
        ("user", {"type": "tool_reference", "tool_name": "f"}, "the type tool_reference is not supported"),
        ("assistant", {"type": "document", "source": PLAIN}, "only allowed in a message of the user"),
        ("system", {"type": "document", "source": PLAIN}, "only allowed in a message of the user"),
        ("system", {"type": "compaction", "content": "a"}, "not allowed in a message of the system"),
        (
            "assistant",
            {
                "type": "web_fetch_tool_result",
                "tool_use_id": "s",
                "content": {"type": "web_fetch_result", "url": "u", "content": {"type": "document", "source": PDF}},
            },
            "content.0.content: a part of the type 'document' with a source of the type 'base64' has no text",
        ),
        (
            "assistant",
            {
                "type": "code_execution_tool_result",
                "tool_use_id": "s",
                "content": {"type": "encrypted_code_execution_result", "encrypted_stdout": "E", "return_code": 0},
            },
            "content.0.content: a part of the type 'encrypted_code_execution_result' has no text",
        ),
    ],
    ids=str,
)
async def test_what_cannot_be_read_is_refused_by_its_type(role: str, block: Any, named: str) -> None:
    message = await refused(messages=[*ASK["messages"], {"role": role, "content": [block]}, AGAIN])
    assert named in message
    assert len(message) < 900


async def test_images_of_results_are_refused_by_their_place_where_the_model_takes_none() -> None:
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "iVBOR"}}
    result = {"type": "tool_result", "tool_use_id": "c", "content": [TEXT, image]}
    messages = [*ASK["messages"], {"role": "assistant", "content": [USE]}, {"role": "user", "content": [result]}]
    message = await refused(messages=messages)
    assert message.startswith("messages.2.content.0.tool_result.content.1.image.source: ")


DROPPED = re.compile(
    r"messages[.[](\d+)[\].]+content[.[](\d+)[\].]+(?:tool_result[.]content[.[](\d+)[\].]+)?(image|document|pdf)"
)
"""How Claude Code finds the block to leave out of all further requests."""
PICTURE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "iVBOR"}}
MEDIA = [
    (PICTURE, "image"),
    (PICTURE | {"source": PICTURE["source"] | {"media_type": "image/tiff"}}, "image"),
    (PICTURE | {"source": {"type": "file", "file_id": "f"}}, "image"),
    (PICTURE | {"scale": 2}, "image"),
    ({"type": "document", "source": PDF}, "document"),
]


@pytest.mark.parametrize("transformations", [None, {}, {"oversized_image": "downsize"}, {"oversized_image": "error"}])
async def test_a_picture_is_scaled_down_where_that_may_be_and_refused_where_it_must_not(transformations: Any) -> None:
    message = await refused(messages=[{"role": "user", "content": [PICTURE | {"transformations": transformations}]}])
    told = message.partition(": ")[0], "takes no images" in message  # for want of a model that takes any
    if transformations == {"oversized_image": "error"}:
        assert told == ("messages.0.content.0.image.transformations", False)
    else:
        assert told == ("messages.0.content.0.image.source", True)


@pytest.mark.parametrize(("block", "kind"), MEDIA)
async def test_a_refusal_names_a_picture_or_document_as_claude_code_searches_for_it(block: Any, kind: str) -> None:
    result = {"type": "tool_result", "tool_use_id": "c", "content": [TEXT, block]}
    called = [*ASK["messages"], {"role": "assistant", "content": [USE]}]
    found = DROPPED.match(await refused(messages=[*called, {"role": "user", "content": [result]}]))
    assert found is not None
    assert found.groups() == ("2", "0", "1", kind)
    found = DROPPED.match(await refused(messages=[{"role": "user", "content": [TEXT, block]}]))
    assert found is not None
    assert found.groups() == ("0", "1", None, kind)


# --- messages that say nothing --------------------------------------------------------------------------------------


@pytest.mark.parametrize("nothing", ["", [], [{"type": "text", "text": ""}]], ids=str)
@pytest.mark.parametrize("role", ["user", "assistant", "system"])
async def test_a_message_without_content_changes_nothing(role: str, nothing: Any) -> None:
    empty = {"role": role, "content": nothing}
    said = [*ASK["messages"], {"role": "assistant", "content": "Well,"}, AGAIN]
    plain = await read_by_the_model(messages=said)
    for place in range(len(said) + 1):
        assert await read_by_the_model(messages=[*said[:place], empty, *said[place:]]) == plain
    assert (await count(messages=[empty, *said])).json == {"input_tokens": len(plain)}


@pytest.mark.parametrize("system", ["", [], [{"type": "text", "text": ""}]], ids=str)
async def test_a_system_prompt_without_content_changes_nothing(system: Any) -> None:
    assert await read_by_the_model(system=system) == "[user:hi]>"


async def test_as_many_stop_sequences_as_a_chats_are_taken() -> None:
    assert (await ask(saying("x"), stop_sequences=[f"<{number}>" for number in range(64)])).status == 200


# --- tools of published schemas -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", CLIENT_TOOLS)
async def test_a_tool_that_the_client_runs_is_a_function_of_its_schema(kind: str) -> None:
    form = CLIENT_TOOLS[kind]
    tool = {"type": kind, "name": form.name, "cache_control": {"type": "ephemeral"}}
    given = {"name": form.name, "description": form.description, "input_schema": form.input_schema}
    assert await read_by_the_model(tools=[tool]) == await read_by_the_model(tools=[given])


async def test_a_tool_that_the_client_runs_is_called_by_its_name_and_may_be_forced() -> None:
    call = '<tool_call>\n{"name": "bash", "arguments": {"command": "ls"}}\n</tool_call>'
    client = saying(call)
    tools = [{"type": "bash_20250124", "name": "bash"}]
    answer = await ask(client, tools=tools, tool_choice={"type": "tool", "name": "bash"})
    (block,) = answer.json["content"]
    assert (block["type"], block["name"], block["input"]) == ("tool_use", "bash", {"command": "ls"})
    assert HEADER not in answer.headers
    assert client.submissions[0].sampling.grammar is not None


@pytest.mark.parametrize(
    ("tool", "named"),
    [
        ({"type": "bash_20250124", "name": "shell"}, "tools.0.name: should be bash, as the type bash_20250124 says"),
        (
            {"type": "bash_20250124", "name": "bash", "input_schema": {}},
            "tools.0.input_schema: this field is not known",
        ),
        ({"type": "retrieval_20250101", "name": "r"}, "tools.0.type: the type retrieval_20250101 is not supported"),
        ({"type": "web_search", "name": "r"}, "tools.0.type: the type web_search is not supported"),
        ({"type": "web_search_20250305_more", "name": "r"}, "tools.0.type: the type web_search_20250305_more is not"),
        ({"type": 5, "name": "r"}, "tools.0.type"),
        ("bash", "tools.0: should be an object"),
    ],
    ids=str,
)
async def test_a_tool_of_an_unknown_type_or_form_is_refused_by_name(tool: Any, named: str) -> None:
    assert (await refused(tools=[tool])).startswith(named)


# --- turns of the system's ------------------------------------------------------------------------------------------

FIRST_ONLY = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('late') }}{% endif %}"
    "{% if m.role == 'user' and not loop.first and messages[loop.index0 - 1].role == 'user' %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}[{{ m.role }}:{{ m.content }}]{% endfor %}>"
)


async def test_a_late_turn_of_the_systems_is_not_lost_where_the_template_takes_none() -> None:
    client = saying("x")
    late = {"role": "system", "content": [{"type": "text", "text": "Told.", "cache_control": {"type": "ephemeral"}}]}
    messages = [*ASK["messages"], late, {"role": "assistant", "content": "a"}, AGAIN]
    app = app_of(client, replace(CALLER, tool_parser=None), FIRST_ONLY)
    answer = await post(app, "/v1/messages", ASK | {"messages": messages, "system": "s"})
    assert (answer.status, HEADER in answer.headers) == (200, False), answer.json
    assert prompt_of(client) == "[system:s][user:hi\n\n<system>\nTold.\n</system>][assistant:a][user:And?]>"


async def test_tools_beside_unusable_ones_are_shown_to_the_model() -> None:
    tools = [*TOOLS, {"type": "code_execution_20250825", "name": "code_execution"}]
    assert json.dumps("weather") in await read_by_the_model(tools=tools)
    assert "code_execution" not in await read_by_the_model(tools=tools)

"""Owns the contract of what comes back to /v1/responses: sealed thoughts, references, and items of other servers.
Never tests messages and functions: test_responses does."""

from __future__ import annotations

from base64 import urlsafe_b64encode
from typing import Any

import pytest

from serve_app.api.generation.sealing import Seal, make_seal
from serve_app.api.http.hint_header import HEADER
from serve_app.api.ingress import create_app
from serve_app.api.openai.forms import renamed
from serve_app.api.openai.responses.earlier import NOTHING, whole_input
from serve_app.api.openai.responses.replays import Replay
from serve_app.api.openai.responses.schema import ResponsesRequest
from serve_app.api.openai.responses.toolbox import Toolbox
from serve_app.api.openai.responses.turns import Turns
from serve_app.api.requests.messages import MAX_TOOLS
from serve_app.api.text.chat_template import ChatTemplate
from serve_app.api.text.tokenizer import Tokenizer
from serve_app.errors.api_error import ApiError
from serve_app.settings.application import AppSettings
from tests.serve_app.api.generation.test_tools import CALL, TEMPLATE, THINKER, prompt_of, saying
from tests.serve_app.api.openai.responses.test_responses import ASK, TOOLS, events, together, valid
from tests.serve_app.harness import Answer, ScriptedClient, post

pytestmark = pytest.mark.anyio

KEY, OLD_KEY = (urlsafe_b64encode(bytes([byte] * 32)).decode() for byte in range(2))
SUMMARY = [{"type": "summary_text", "text": "In short."}]
USER = {"role": "user", "content": "hi"}
SEALED = {"include": ["reasoning.encrypted_content"]}
THOUGHTS = "Hm,\n 🦜"
THINKING = f"<think>\n{THOUGHTS}\n</think>\n\nYes.{CALL}"


async def ask(client: ScriptedClient, *keys: str, strict: bool = False, **fields: Any) -> Answer:
    tokenizer = Tokenizer.byte_level()
    tokenizer._chat_template = ChatTemplate(TEMPLATE, {})
    app = create_app(client, tokenizer, THINKER, strict=strict, seal=Seal(keys) if keys else None)
    return await post(app, "/v1/responses", ASK | fields)


def sealed(item: dict[str, Any]) -> dict[str, Any]:
    """Return the item as sent back by a client that keeps no plain thoughts."""
    return {name: item[name] for name in ("type", "id", "summary", "encrypted_content")}


@pytest.mark.parametrize("stream", [False, True])
async def test_sealed_thoughts_can_be_sent_back_to_any_replica_with_the_key(stream: bool) -> None:
    answer = await ask(saying(THINKING, 5), KEY, tools=TOOLS, stream=stream, **SEALED)
    response = together(events(answer)) if stream else valid(answer.json)
    thought, message, call = response["output"]
    assert THOUGHTS not in thought["encrypted_content"]
    assert HEADER not in answer.headers
    again, plain = saying("x"), saying("x")
    answer = await ask(again, OLD_KEY, KEY, strict=True, input=[USER, sealed(thought), message, call])
    assert answer.status == 200, answer.json
    await ask(plain, input=[USER, thought, message, call])
    assert prompt_of(again) == prompt_of(plain) == f"[user:hi][assistant:Yes.?{THOUGHTS}!weatherOslo]>"


async def test_thoughts_are_sealed_where_that_is_asked_for_and_there_is_a_key() -> None:
    assert "encrypted_content" not in (await ask(saying(THINKING), KEY)).json["output"][0]
    answer = await ask(saying(THINKING), **SEALED)
    assert "encrypted_content" not in answer.json["output"][0]
    assert answer.headers[HEADER] == "include.reasoning.encrypted_content"


async def test_thoughts_that_were_cut_off_are_sealed_as_far_as_they_went() -> None:
    response = valid((await ask(saying("<think>\nHm"), KEY, **SEALED)).json)
    (thought,) = response["output"]
    assert Seal([KEY]).open(thought["encrypted_content"]) == thought["content"][0]["text"] == "Hm"


@pytest.mark.parametrize(
    "content",
    ["gAAAAABopaque", "", "é", Seal([OLD_KEY]).close("old"), Seal([KEY]).close("x")[:-3]],
    ids=["another's", "empty", "no-ascii", "old-key", "cut"],
)
async def test_thoughts_that_were_sealed_elsewhere_leave_their_summary(content: str) -> None:
    client = saying("x")
    given = [USER, {"type": "reasoning", "id": "r", "summary": SUMMARY, "encrypted_content": content}]
    answer = await ask(client, KEY, input=given)
    assert (answer.status, answer.headers[HEADER]) == (200, "input.reasoning.encrypted_content")
    assert prompt_of(client) == "[user:hi][assistant:?In short.]>"
    assert "content" not in given[1]


async def test_a_seal_opens_nothing_of_another_tenant() -> None:
    """Regression: who had found a sealed thought in somebody's log could have the model repeat it."""
    seal = Seal([KEY, OLD_KEY])
    assert seal.of("a").open(seal.of("a").close("x")) == "x"
    assert seal.of("a").open(Seal([OLD_KEY], "a").close("x")) == "x"
    for other in (seal, seal.of("b"), seal.of("a ")):
        assert other.open(seal.of("a").close("x")) is None


async def test_a_replica_draws_a_key_where_no_other_has_to_open_what_it_sealed() -> None:
    drawn = make_seal((), 1)
    assert drawn is not None
    assert drawn.open(drawn.close("a")) == "a"
    assert make_seal((), 2) is None
    kept = make_seal((KEY, OLD_KEY), 2)
    assert kept is not None
    assert Seal([KEY]).open(kept.close("a")) == "a"
    assert kept.open(Seal([OLD_KEY]).close("b")) == "b"


def test_a_key_that_is_none_is_refused_when_the_config_is_read_and_not_repeated() -> None:
    assert AppSettings(reasoning_keys=(KEY,)).reasoning_keys == (KEY,)
    with pytest.raises(ValueError, match="reasoning_keys") as refused:
        AppSettings(reasoning_keys=("secret",))
    assert "secret" not in str(refused.value)


REPLAYS: list[tuple[list[dict[str, Any]], str]] = [
    (
        [
            {
                "type": "local_shell_call",
                "id": "l",
                "call_id": "c",
                "status": "completed",
                "action": {"type": "exec", "command": ["ls"], "env": {}, "city": "Oslo"},
            },
            {"type": "local_shell_call_output", "id": "c", "output": "a.txt"},
        ],
        "[assistant:!local_shellOslo][tool:a.txt]",
    ),
    (
        [
            {"type": "shell_call", "call_id": "c", "action": {"commands": ["ls"], "city": "Rome"}, "environment": None},
            {"type": "shell_call_output", "call_id": "c", "output": [{"stdout": "a", "stderr": ""}]},
        ],
        '[assistant:!shellRome][tool:[{"stdout": "a", "stderr": ""}]]',
    ),
    (
        [
            {
                "type": "apply_patch_call",
                "call_id": "c",
                "status": "completed",
                "operation": {"type": "delete_file", "path": "a"},
            },
            {"type": "apply_patch_call_output", "call_id": "c", "status": "failed"},
        ],
        "[assistant:!apply_patch][tool:failed]",
    ),
    (
        [
            {
                "type": "mcp_call",
                "id": "m",
                "server_label": "maps",
                "name": "find",
                "arguments": '{"city": "Oslo"}',
                "output": "there",
                "status": "completed",
            }
        ],
        "[assistant:!maps__findOslo][tool:there]",
    ),
    (
        [
            {
                "type": "code_interpreter_call",
                "id": "k",
                "container_id": "x",
                "code": "1",
                "outputs": [{"type": "logs", "logs": "2"}],
                "status": "completed",
            }
        ],
        "[assistant:!code_interpreter][tool:2]",
    ),
]


@pytest.mark.parametrize(("items", "read"), REPLAYS, ids=lambda value: str(value)[:40])
async def test_what_other_servers_tools_said_is_read_by_the_model(items: list[dict[str, Any]], read: str) -> None:
    client = saying("x")
    answer = await ask(client, strict=True, input=[USER, *items])
    assert (answer.status, HEADER in answer.headers) == (200, False), answer.json
    assert prompt_of(client) == f"[user:hi]{read}>"


@pytest.mark.parametrize(
    ("item", "param"),
    [
        ({"type": "mcp_call", "id": "m", "server_label": "maps"}, "input.0.name"),
        ({"type": "local_shell_call", "call_id": "c", "action": "ls"}, "input.0.action"),
        ({"type": "apply_patch_call_output", "call_id": "c", "status": "lost"}, "input.0.status"),
        ({"type": "custom_tool_call", "call_id": "c", "name": "n", "input": {}}, "input.0.input"),
        ({"type": "reasoning", "encrypted_content": 1}, "input.0.encrypted_content"),
        ({"type": "telephone_call", "id": "a"}, "input.0.type"),
        ({"type": "item_reference", "id": "a"}, "input.0"),
        ({"type": "compaction_trigger"}, "input.0.type"),
        ({"type": "configuration_update", "reasoning": {"effort": "low"}}, "input.0.type"),
        ({"type": "additional_tools", "role": "user", "tools": []}, "input.0.role"),
        ({"type": "additional_tools", "role": "developer", "tools": [{"type": "function"}]}, "input.0.tools.0.name"),
    ],
    ids=str,
)
async def test_an_item_that_cannot_be_read_is_refused_by_its_place(item: dict[str, Any], param: str) -> None:
    client = saying("x")
    answer = await ask(client, input=[item])
    assert (answer.status, answer.error["param"]) == (400, param), answer.json
    assert not param.endswith(("0", "type")) or item["type"] in answer.error["message"]
    assert not client.submissions


async def test_a_reference_to_an_item_of_the_same_request_is_that_item() -> None:
    client = saying("x")
    given = [{"type": "message", "id": "m", **USER}, {"type": "item_reference", "id": "m"}]
    assert (await ask(client, strict=True, input=given)).status == 200
    assert prompt_of(client) == "[user:hi][user:hi]>"


async def test_a_reference_is_to_a_call_and_not_to_its_output_with_the_same_id() -> None:
    """In OpenAI's schema, an output's `id` may be its call's."""
    call = {"type": "local_shell_call", "id": "l", "call_id": "l", "action": {"type": "exec", "command": ["ls"]}}
    output = {"type": "local_shell_call_output", "id": "l", "output": "b.txt"}
    other = {"type": "function_call_output", "id": "o", "call_id": "l", "output": "b.txt"}
    client = saying("x")
    given = [USER, call, output, {"type": "item_reference", "id": "l"}, other]
    assert (await ask(client, strict=True, input=given)).status == 200
    assert prompt_of(client) == "[user:hi][assistant:!local_shell][tool:b.txt][assistant:!local_shell][tool:b.txt]>"
    answer = await ask(saying("x"), input=[USER, {"type": "item_reference", "id": "l"}, output])
    assert (answer.status, answer.error["param"]) == (400, "input.1"), "the call is not in the request"


@pytest.mark.parametrize("is_before", [True, False])
async def test_a_reference_to_an_output_by_an_id_of_its_own_is_that_output(is_before: bool) -> None:
    call = {"type": "function_call", "id": "fc", "call_id": "c", "name": "f", "arguments": "{}"}
    output = {"type": "function_call_output", "id": "fco", "call_id": "c", "output": "5"}
    reference = {"type": "item_reference", "id": "fco"}
    client = saying("x")
    answer = await ask(client, input=[USER, call, *([reference, output] if is_before else [output, reference])])
    assert answer.status == 200, answer.json
    assert prompt_of(client) == "[user:hi][assistant:!f][tool:5][tool:5]>"


async def test_a_reference_to_what_would_have_been_stored_says_what_to_set() -> None:
    """The AI SDK sends such references unless its own option says otherwise. It does not read `store` in an answer."""
    answer = await ask(saying("x"), input=[USER | {"type": "message"}, {"type": "item_reference", "id": "msg_1"}])
    assert (answer.status, answer.error["param"]) == (400, "input.1")
    assert "set `store: false` (AI SDK: providerOptions.openai.store)" in answer.error["message"]


def test_an_item_that_is_replayed_must_say_what_it_tells() -> None:
    class Mute(Replay):
        type: str = "mute"

    with pytest.raises(TypeError, match="told"):
        Mute()  # type: ignore[abstract]


async def test_an_item_is_referred_to_once_so_that_no_body_grows_without_bound() -> None:
    items = [{"type": "message", "id": name, **USER} for name in ("m", "n")]
    references = [{"type": "item_reference", "id": name} for name in ("m", "n", "m")]
    client = saying("x")
    assert (await ask(client, input=[*items, *references[:2]])).status == 200
    assert prompt_of(client) == "[user:hi]" * 4 + ">"
    client = saying("x")
    answer = await ask(client, input=[*items, *references])
    assert (answer.status, answer.error["param"]) == (400, "input.4"), answer.json
    assert "'m' is referred to again" in answer.error["message"]
    assert not client.submissions


MCP = {"type": "mcp_call", "id": "m", "server_label": "s", "name": "n"}


@pytest.mark.parametrize(
    "arguments", [r'{"a": "\ud800"}', f'{{"a": {"[" * 900}{"]" * 900}}}', "[1]", f'{{"a": {"9" * 5000}}}', "no JSON"]
)
async def test_arguments_of_another_servers_call_are_read_however_it_wrote_them(arguments: str) -> None:
    answer = await ask(saying("x"), input=[USER, MCP | {"arguments": arguments}])
    assert answer.status == 200, answer.json


CALLED = {"type": "function_call", "call_id": "c", "name": "weather", "arguments": "{}"}


@pytest.mark.parametrize(
    ("fields", "template", "param"),
    [
        ({"input": "x" * 50_000}, None, "input"),
        ({"input": [USER | {"content": "x" * 50_000}], "instructions": "y"}, None, "input"),
        ({"input": "x"}, "{{ raise_exception('no such messages') }}", "input"),
        ({"input": [USER, *[CALLED] * (MAX_TOOLS + 1)]}, None, f"input.{MAX_TOOLS + 1}"),
        ({"input": [*[CALLED] * MAX_TOOLS, MCP]}, None, f"input.{MAX_TOOLS}"),
    ],
    ids=["long", "long-items", "template", "calls", "replays"],
)
async def test_a_fault_of_the_conversation_is_told_by_the_requests_own_fields(
    fields: dict[str, Any], template: str | None, param: str
) -> None:
    tokenizer = Tokenizer.byte_level()
    tokenizer._chat_template = ChatTemplate(template or TEMPLATE, {})
    answer = await post(create_app(saying("x"), tokenizer, THINKER), "/v1/responses", ASK | fields)
    assert (answer.status, answer.error["param"]) == (400, param), answer.json
    assert "tool_calls" not in answer.error["message"]
    assert "these input" not in answer.error["message"]


def test_a_word_is_a_fields_name_only_where_it_stands_first() -> None:
    names = {"messages": "input"}
    for param, message, told in [
        ("messages.0", "messages.0: no messages", ("input.0", "input.0: no messages")),
        ("messages", "The template refuses these messages", ("input", "The template refuses these messages")),
        ("tools.0.messages", "tools.0.messages: none", ("tools.0.messages", "tools.0.messages: none")),
    ]:
        error = renamed(ApiError(400, message, param=param), names)
        assert (error.param, error.message) == told


IMAGE = {"type": "input_image", "image_url": "data:image/png;base64,AAAA"}


@pytest.mark.parametrize(
    ("given", "param"),
    [
        (
            [
                {"type": "message", "id": "m", "role": "user", "content": [{"type": "input_text", "text": "a"}, IMAGE]},
                {"type": "item_reference", "id": "m"},
            ],
            "input.0.content.1.image_url",
        ),
        (
            [
                {"type": "function_call", "call_id": "c", "name": "weather", "arguments": "{}"},
                {
                    "type": "function_call_output",
                    "call_id": "c",
                    "output": [{"type": "input_text", "text": "a"}, IMAGE],
                },
                {"type": "function_call_output", "call_id": "d", "output": [IMAGE]},
                USER,
            ],
            "input.1.output.1.image_url",
        ),
    ],
    ids=["reference", "output"],
)
async def test_an_image_is_told_by_its_place_wherever_it_is(given: list[dict[str, Any]], param: str) -> None:
    answer = await ask(saying("x"), input=given)
    assert (answer.status, answer.error["param"]) == (400, param), answer.json
    assert "takes no images" in answer.error["message"]


def test_images_of_outputs_are_shown_after_all_of_them_as_the_users() -> None:
    request = ResponsesRequest.model_validate(
        {
            "model": "m",
            "input": [
                {
                    "type": "function_call_output",
                    "call_id": "c",
                    "output": [{"type": "input_text", "text": "a"}, IMAGE],
                },
                {"type": "custom_tool_call_output", "call_id": "d", "output": [IMAGE]},
                {"type": "function_call_output", "call_id": "e", "output": "b"},
                USER,
            ],
        }
    )
    turns = Turns(Toolbox(), None)
    told = [(turn["role"], turn["content"]) for turn in turns.messages(whole_input(request, NOTHING))]
    shown = {"type": "image_url", "image_url": {"url": IMAGE["image_url"], "detail": None}}
    assert told == [
        ("tool", "a\n[image]"),
        ("tool", "[image]"),
        ("tool", "b"),
        ("user", [shown, shown]),
        ("user", "hi"),
    ]
    assert turns.images == ["input.0.output.1.image_url", "input.1.output.0.image_url"]


async def test_late_instructions_keep_their_place() -> None:
    client = saying("x")
    given = [USER, {"role": "assistant", "content": "a"}, {"role": "developer", "content": "b"}, USER]
    given += [{"role": "system", "content": "c"}]
    assert (await ask(client, input=given, instructions="i")).status == 200
    assert prompt_of(client) == "[system:i][user:hi][assistant:a][developer:b][user:hi][system:c]>"


async def test_compacted_turns_are_passed_over_and_named() -> None:
    client = saying("x")
    answer = await ask(client, input=[{"type": "compaction", "id": "c", "encrypted_content": "g"}, USER])
    assert (answer.status, answer.headers[HEADER]) == (200, "input.compaction")
    assert prompt_of(client) == "[user:hi]>"

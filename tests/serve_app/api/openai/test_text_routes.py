"""Owns the contract of /tokenize, /detokenize and /tokenizer_info: vLLM's bodies, and the tokens that generation sees.
Never depends on an engine: the routes need none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from starlette.types import ASGIApp
from tokenizers import models, pre_tokenizers, processors

from serve_app.api.ingress import create_app
from serve_app.api.text.tokenizer import Tokenizer
from tests.serve_app.api.generation.test_tools import TOOLS, app_of, saying
from tests.serve_app.harness import CHAT, MODEL, Exchange, ScriptedClient, app_for, complete, finished, get, post

pytestmark = pytest.mark.anyio
BOTH = pytest.mark.parametrize("prefix", ["", "/v1"])
SPECIALS = ["<eos>", "<|system|>", "<|developer|>", "<|user|>", "<|assistant|>", "<|tool|>"]


def app() -> ASGIApp:
    return app_for(ScriptedClient())


def word_app(root: Path) -> ASGIApp:
    """Make an app for a model whose post-processor puts `<s>` first,
    with a gap in its ids and no chat template."""
    core = tokenizers.Tokenizer(models.WordLevel({"[UNK]": 0, "a": 1, "b": 2, "far": 9}, unk_token="[UNK]"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    core.add_special_tokens(["<s>"])
    bos = core.token_to_id("<s>")
    core.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", bos)])
    core.save(str(root / "tokenizer.json"))
    (root / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>"}))
    return create_app(ScriptedClient(), Tokenizer.from_dir(root), MODEL)


@BOTH
async def test_a_prompt_becomes_the_tokens_that_a_completion_computes(prefix: str) -> None:
    client = ScriptedClient([finished()])
    await complete(client, prompt="hé")
    answer = await post(app(), f"{prefix}/tokenize", {"model": MODEL.id, "prompt": "hé"})
    assert answer.status == 200
    assert answer.json == {
        "count": 3,
        "max_model_len": MODEL.max_model_len,
        "tokens": [0x68, 0xC3, 0xA9],
        "token_strs": None,
    }
    assert client.submissions[0].prompt_token_ids == tuple(answer.json["tokens"])


@BOTH
async def test_a_conversation_becomes_the_tokens_that_a_chat_computes(prefix: str) -> None:
    client = ScriptedClient([finished()])
    await post(app_for(client), "/v1/chat/completions", CHAT)
    answer = await post(app(), f"{prefix}/tokenize", CHAT)
    assert answer.json["tokens"] == [259, *b"hi", 256, 260]
    assert client.submissions[0].prompt_token_ids == tuple(answer.json["tokens"])


async def test_without_a_generation_prompt_a_conversation_ends_with_its_last_message() -> None:
    answer = await post(app(), "/tokenize", CHAT | {"add_generation_prompt": False})
    assert answer.json["tokens"] == [259, *b"hi", 256]


TALK = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Well"}]
CALLED = {"id": "c", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
CONVERSATIONS: list[dict[str, Any]] = [
    {"tools": TOOLS},
    {"tools": TOOLS, "tool_choice": "none"},
    {"tools": TOOLS, "tool_choice": "required"},
    {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "weather"}}},
    {"tools": []},
    {"documents": [{"text": "a"}]},
    {"chat_template_kwargs": {"enable_thinking": False}},
    {"messages": TALK, "continue_final_message": True, "add_generation_prompt": False},
    {"messages": TALK, "add_generation_prompt": False},
    {"messages": [*CHAT["messages"], {"role": "assistant", "tool_calls": [CALLED]}]},
]


@pytest.mark.parametrize("fields", CONVERSATIONS, ids=str)
async def test_what_a_chats_prompt_depends_on_is_counted_as_the_chat_counts_it(fields: dict[str, Any]) -> None:
    client = saying("a")
    routes = app_of(client)
    assert (await post(routes, "/v1/chat/completions", CHAT | fields)).status == 200
    answer = await post(routes, "/tokenize", CHAT | fields)
    assert tuple(answer.json["tokens"]) == client.submissions[0].prompt_token_ids
    assert answer.json["count"] == len(answer.json["tokens"])


async def test_each_of_these_changes_the_prompt_or_is_known_not_to() -> None:
    prompts = [(await post(app_of(saying("a")), "/tokenize", CHAT | fields)).json["tokens"] for fields in CONVERSATIONS]
    plain = (await post(app_of(saying("a")), "/tokenize", CHAT)).json["tokens"]
    assert [prompt == plain for prompt in prompts] == [False, True, False, False, True, *[False] * 5]
    assert bytes(prompts[7]).endswith(b"Well")
    assert not bytes(prompts[8]).endswith(b"Well")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"chat_template_kwargs": {"nonsense": 1}}, "chat_template_kwargs.nonsense"),
        ({"documents": [{"text": "a"}]}, "documents"),
        ({"tools": TOOLS}, "tools"),
    ],
)
async def test_what_the_template_would_ignore_is_refused_as_the_chat_refuses_it(
    fields: dict[str, Any], param: str
) -> None:
    plain = "{% for m in messages %}{{ m.content }}{% endfor %}"
    told = []
    for path in ("/tokenize", "/v1/chat/completions"):
        answer = await post(app_of(saying("a"), MODEL, plain), path, CHAT | fields)
        assert answer.status == 400
        told.append(answer.error)
    assert told[0] == told[1]
    assert told[0]["param"] == param


async def test_special_tokens_of_the_post_processor_are_added_to_texts_unless_they_are_not_asked_for(
    tmp_path: Path,
) -> None:
    words = word_app(tmp_path)
    bos = (await get_json(words, "/tokenizer_info"))["bos_token_id"]
    for fields, tokens in (
        ({}, [bos, 1, 2]),
        ({"add_special_tokens": None}, [bos, 1, 2]),
        ({"add_special_tokens": True}, [bos, 1, 2]),
        ({"add_special_tokens": False}, [1, 2]),
    ):
        assert (await post(words, "/tokenize", {"prompt": "a b"} | fields)).json["tokens"] == tokens


async def test_special_tokens_of_the_post_processor_are_added_to_conversations_where_they_are_asked_for(
    tmp_path: Path,
) -> None:
    word_app(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }} {% endfor %}")
    words = create_app(ScriptedClient(), Tokenizer.from_dir(tmp_path), MODEL)
    bos = (await get_json(words, "/tokenizer_info"))["bos_token_id"]
    body = {"messages": [{"role": "user", "content": "a b"}]}
    assert (await post(words, "/tokenize", body)).json["tokens"] == [1, 2]
    assert (await post(words, "/tokenize", body | {"add_special_tokens": True})).json["tokens"] == [bos, 1, 2]


async def test_token_strings_are_the_vocabularys_entries_and_come_where_they_are_asked_for() -> None:
    answer = await post(app(), "/tokenize", {"prompt": "a é", "return_token_strs": True})
    assert answer.json["token_strs"] == ["a", "Ġ", "Ã", "©"]
    for off in (False, None):
        answer = await post(app(), "/tokenize", {"prompt": "a", "return_token_strs": off})
        assert answer.json["token_strs"] is None


@BOTH
@pytest.mark.parametrize("text", ["", "hé", "<eos>a<|user|>", "a\u2028b \n c"])
async def test_what_was_tokenized_is_detokenized_to_the_same_text(prefix: str, text: str) -> None:
    tokens = (await post(app(), f"{prefix}/tokenize", {"prompt": text})).json["tokens"]
    answer = await post(app(), f"{prefix}/detokenize", {"model": MODEL.id, "tokens": tokens})
    assert (answer.status, answer.json) == (200, {"prompt": text})


async def test_a_long_text_is_read_in_a_thread_to_the_same_tokens() -> None:
    answer = await post(app(), "/tokenize", {"prompt": "x" * 50_000})
    assert (answer.json["count"], set(answer.json["tokens"])) == (50_000, {ord("x")})
    back = await post(app(), "/detokenize", {"tokens": answer.json["tokens"]})
    assert back.json == {"prompt": "x" * 50_000}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": 1}, "prompt"),
        ("/tokenize", {"prompt": ["a"]}, "prompt"),
        ("/tokenize", {"prompt": None, "messages": None}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": CHAT["messages"]}, "prompt"),
        ("/tokenize", {"prompt": "a", "add_special_tokens": 1}, "add_special_tokens"),
        ("/tokenize", {"prompt": "a", "add_generation_prompt": True}, "add_generation_prompt"),
        ("/tokenize", {"prompt": "a", "truncate": 1}, "truncate"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"messages": [{"role": "alien", "content": "a"}]}, "messages.0.role"),
        ("/tokenize", CHAT | {"chat_template": "x"}, "chat_template"),
        ("/tokenize", CHAT | {"tools": [{}]}, "tools.0.type"),
        ("/tokenize", CHAT | {"tool_choice": "any"}, "tool_choice"),
        ("/tokenize", CHAT | {"continue_final_message": True, "add_generation_prompt": True}, "add_generation_prompt"),
        ("/tokenize", {"prompt": "a", "tools": []}, "tools"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": "1"}, "tokens"),
        ("/detokenize", {"tokens": [1, "a"]}, "tokens.1"),
        ("/detokenize", {"tokens": [1, -1]}, "tokens.1"),
        ("/detokenize", {"tokens": [1, True]}, "tokens.1"),
        ("/detokenize", {"tokens": [1, 262]}, "tokens.1"),
        ("/detokenize", {"tokens": [1], "skip_special_tokens": True}, "skip_special_tokens"),
    ],
    ids=str,
)
async def test_a_wrong_body_is_a_400_that_names_the_field(path: str, body: Any, param: str) -> None:
    answer = await post(app(), path, body)
    assert (answer.status, answer.error["type"], answer.error["param"]) == (400, "invalid_request_error", param)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (262, "token id 262 is out of vocabulary: this model's ids are 0 to 261."),
        (2**31 - 1, "token id 2147483647 is out of vocabulary: this model's ids are 0 to 261."),
        (2**31, "Input should be less than 2147483648, but it is 2147483648"),
        (2**70, "Input should be less than 2147483648"),
        (-1, "Input should be greater than or equal to 0, but it is -1"),
        (1.5, "Input should be a valid integer, but it is 1.5"),
        (1.0, "Input should be a valid integer, but it is 1.0"),
        (True, "Input should be a valid integer, but it is true"),
        (None, "Input should be a valid integer, but it is null"),
        ("97", 'Input should be a valid integer, but it is "97"'),
        ("9" * 21, "Input should be a valid integer"),
        ([1], "Input should be a valid integer"),
    ],
    ids=repr,
)
@BOTH
async def test_what_is_no_token_id_is_named_with_its_place_the_limit_and_the_value(
    prefix: str, wrong: Any, message: str
) -> None:
    answer = await post(app(), f"{prefix}/detokenize", {"tokens": [97, wrong, 98]})
    assert (answer.status, answer.error["param"], answer.error["code"]) == (400, "tokens.1", "invalid_value")
    assert answer.error["message"] == f"tokens.1: {message}"


async def test_an_id_between_those_of_tokens_is_said_to_be_unused(tmp_path: Path) -> None:
    words = word_app(tmp_path)
    last = (await get_json(words, "/tokenizer_info"))["vocab_size"] - 1
    error = (await post(words, "/detokenize", {"tokens": [1, 5]})).error
    assert error["param"] == "tokens.1"
    ids = f"this model's ids are 0 to {last}, but this one is unused."
    assert error["message"] == f"tokens.1: token id 5 is out of vocabulary: {ids}"


async def test_a_conversation_without_a_template_is_a_400_that_says_so(tmp_path: Path) -> None:
    error = (await post(word_app(tmp_path), "/tokenize", CHAT)).error
    assert (error["param"], error["code"]) == ("messages", "invalid_value")
    assert "no chat template" in error["message"]


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize"])
async def test_another_model_is_a_404_and_none_is_the_served_one(path: str) -> None:
    body: dict[str, Any] = {"prompt": "a"} if path == "/tokenize" else {"tokens": [97]}
    answer = await post(app(), path, body | {"model": "other"})
    assert (answer.status, answer.error["code"], answer.error["param"]) == (404, "model_not_found", "model")
    for same in ({}, {"model": None}, {"model": MODEL.id}):
        assert (await post(app(), path, body | same)).status == 200


@pytest.mark.parametrize("path", ["/tokenize", "/v1/detokenize"])
async def test_bodies_have_the_limits_of_every_route(path: str) -> None:
    small = app_for(ScriptedClient(), max_body_bytes=1000)
    assert (await post(small, path, b"x" * 1001)).status == 413
    answer = await Exchange(small, "POST", path, b"{}", [("content-type", "text/plain")]).finish()
    assert (answer.status, answer.error["code"]) == (415, "unsupported_media_type")


async def test_the_facts_of_a_tokenizer_are_shown() -> None:
    assert (await get(ScriptedClient(), "/tokenizer_info")).json == {
        "model": MODEL.id,
        "vocab_size": 262,
        "bos_token_id": None,
        "bos_token": None,
        "eos_token_id": 256,
        "eos_token": "<eos>",
        "special_tokens": [{"id": 256 + place, "text": text} for place, text in enumerate(SPECIALS)],
        "has_chat_template": True,
    }


async def test_the_facts_of_a_model_without_a_template_and_with_a_first_token(tmp_path: Path) -> None:
    info = await get_json(word_app(tmp_path), "/tokenizer_info")
    assert (info["bos_token"], info["eos_token_id"], info["has_chat_template"]) == ("<s>", None, False)
    assert info["special_tokens"] == [{"id": info["bos_token_id"], "text": "<s>"}]


async def get_json(app: ASGIApp, path: str) -> Any:
    return (await Exchange(app, "GET", path, headers=()).finish()).json

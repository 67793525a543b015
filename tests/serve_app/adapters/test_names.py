"""Owns the contract of models' names: which names and aliases a client may use, which name an answer carries,
and what is listed.
Never loads an adapter: names need none."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from datetime import datetime
from typing import Any

import pytest
from pydantic import ValidationError

from engine.protocol import AdapterRef
from serve_app.adapters.aliases import Aliases
from serve_app.adapters.names import AdapterNames
from serve_app.api.ingress import create_app
from serve_app.api.text.tokenizer import Tokenizer
from serve_app.engines.engine_client import ServedModel
from serve_app.images.intake import ImageIntake
from serve_app.settings.application import AppSettings
from tests.serve_app.harness import CHAT, MODEL, PROMPT, Answer, Exchange, ScriptedClient, finished, scheduled, tokens

pytestmark = pytest.mark.anyio

LAW = AdapterRef("law", "/law", "0f")
ALIASES = {
    "claude-*": MODEL.id,
    "claude-law-*": "law",
    "claude-3": "law",
    "gpt-[45]*": "second",
    "gone": "left",
}


def names(model: ServedModel = MODEL) -> AdapterNames:
    return AdapterNames(model, [LAW], other_names=["second", "third/x"], aliases=ALIASES)


def app_of(client: ScriptedClient | None = None, model: ServedModel = MODEL) -> Any:
    return create_app(client or ScriptedClient(), Tokenizer.byte_level(), model, adapters=names(model))


async def get(path: str, model: ServedModel = MODEL) -> Answer:
    return await Exchange(app_of(model=model), "GET", path, headers=()).finish()


@pytest.mark.parametrize(
    ("asked", "answers"),
    [
        (MODEL.id, MODEL.id),
        ("second", MODEL.id),
        ("third/x", MODEL.id),
        ("claude-sonnet-4-5-20250929", MODEL.id),
        ("claude-", MODEL.id),
        ("gpt-4o", MODEL.id),
        ("gpt-5", MODEL.id),
        ("law", "law"),
        ("second:law", "second:law"),
        ("claude-3", "law"),  # a name comes before the patterns
        ("claude-law-1", MODEL.id),  # of which the first match counts
    ],
)
def test_a_name_or_an_alias_is_answered_by_what_it_stands_for(asked: str, answers: str) -> None:
    served = names().served(asked)
    assert (served.id, served.adapter) == (answers, LAW if "law" in answers else None)


@pytest.mark.parametrize("asked", ["", "Claude-3", "gpt-3", "xclaude-3", "gone", "left", "third", "law:second", "*"])
def test_a_name_that_nothing_has_is_not_found(asked: str) -> None:
    with pytest.raises(Exception, match="does not exist") as error:
        names().served(asked)
    assert vars(error.value)["status"] == 404


def test_a_served_name_goes_before_an_alias_also_where_it_comes_later() -> None:
    known = names()
    assert known.served("claude-5").adapter is None
    known.put(replace(LAW, name="claude-5"))
    assert known.served("claude-5").id == "claude-5"
    known.remove("claude-5")
    assert known.served("claude-5").id == MODEL.id


def test_an_alias_of_an_adapter_lives_as_long_as_it() -> None:
    known = names()
    known.remove("law")
    assert "claude-3" not in dict(known.listed())
    with pytest.raises(Exception, match="does not exist"):
        known.served("claude-3")


def test_a_pattern_is_matched_in_time_that_a_client_cannot_stretch() -> None:
    aliases = Aliases({"*a*a*a*a*a*a*a*a*b": "x"})
    assert aliases.target("a" * 20_000) is None  # exponential, if the matcher backtracked


BODIES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", CHAT),
    ("/v1/completions", PROMPT),
    ("/v1/responses", {"input": "hi"}),
    ("/v1/messages", CHAT | {"max_tokens": 8}),
    ("/chat/completions", CHAT),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "body"), BODIES)
async def test_an_answer_says_which_model_it_is_from_and_not_what_it_was_asked_for(
    path: str, body: dict[str, Any], stream: bool
) -> None:
    """As with vLLM and OpenAI, a client that asks for an alias is told the name that it stands for."""
    for asked, named in (("second", MODEL.id), ("claude-x", MODEL.id), ("claude-3", "law")):
        client = ScriptedClient([scheduled()], tokens("hello"), [finished()])
        data = json.dumps(body | {"model": asked, "stream": stream}).encode()
        answer = await Exchange(app_of(client), "POST", path, data).finish()
        assert answer.status == 200, answer.json
        found = set(re.findall(r'"model": ?"([^"]*)"', b"".join(answer.parts).decode()))
        assert found == {named}
        assert client.submissions[0].adapter == (LAW if named == "law" else None)


async def test_what_can_be_asked_for_is_listed_but_for_patterns() -> None:
    listed = (await get("/v1/models")).json
    assert [(one["id"], one["root"], one["parent"]) for one in listed["data"]] == [
        (MODEL.id, MODEL.id, None),
        ("second", MODEL.id, None),
        ("third/x", MODEL.id, None),
        ("law", MODEL.id, MODEL.id),
        ("claude-3", MODEL.id, MODEL.id),
    ]
    assert (listed["object"], "models" in listed) == ("list", False)
    for one in listed["data"]:
        assert (await get(f"/v1/models/{one['id']}")).json == one
        assert (await get(f"/models/{one['id']}")).json == one


async def test_an_alias_can_be_looked_up_by_the_name_that_a_client_has() -> None:
    told = (await get("/v1/models/claude-opus-5")).json
    assert (told["id"], told["root"]) == ("claude-opus-5", MODEL.id)


async def test_the_context_has_every_name_that_clients_know_it_by() -> None:
    told = (await get(f"/v1/models/{MODEL.id}")).json
    assert {told[name] for name in ("max_model_len", "context_length", "context_window")} == {MODEL.max_model_len}


async def test_a_models_capabilities_are_those_that_its_requests_have() -> None:
    assert (await get(f"/v1/models/{MODEL.id}")).json["capabilities"] == ["completion"]
    images = ImageIntake.__new__(ImageIntake)
    able = replace(MODEL, tool_parser="hermes", reasoning_parser="qwen3", pooling="mean", images=images)
    told = (await get(f"/v1/models/{MODEL.id}", able)).json
    assert told["capabilities"] == ["completion", "tools", "vision", "thinking", "embedding"]


async def test_codex_finds_the_list_that_it_looks_for() -> None:
    answer = await get("/v1/models?client_version=0.169.0")
    assert answer.json == (await get("/v1/models")).json | {"models": []}


async def test_the_list_has_what_anthropics_client_reads() -> None:
    listed = (await get("/v1/models?limit=1000")).json
    assert {name: listed[name] for name in ("has_more", "first_id", "last_id")} == {
        "has_more": False,
        "first_id": MODEL.id,
        "last_id": "claude-3",
    }
    for one in listed["data"]:
        assert (one["type"], one["display_name"]) == ("model", one["id"])
        assert datetime.fromisoformat(one["created_at"]).timestamp() == MODEL.created


# --- the config ------------------------------------------------------------------------------------------------------


def test_a_config_names_a_model_once_or_several_times() -> None:
    assert AppSettings(model="m").model_names == ("m",)
    assert AppSettings.model_validate({"model": "m", "served_model_name": "a"}).model_names == ("a",)
    several = AppSettings.model_validate({"model": "m", "served_model_name": ["a", "b"]})
    assert (several.model_id, several.model_names) == ("a", ("a", "b"))


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ({"served_model_name": []}, "served_model_name\n.*at least 1 item"),
        ({"served_model_name": ""}, "served_model_name.0\n.*at least 1 character"),
        ({"served_model_name": ["a", ""]}, "served_model_name.1\n.*at least 1 character"),
        ({"served_model_name": 5}, "served_model_name\n.*should be a name or a list of names"),
        ({"served_model_name": ["a", "b", "a"]}, "served_model_name has a name twice: a, b, a"),
        ({"model_aliases": {"x*": "b"}}, r"model_aliases has x\* for b, which is not served; served are: a\."),
        ({"model_aliases": {"a": "a"}}, "model_aliases has a, which is served under that name itself"),
        ({"model_aliases": {"": "a"}}, "model_aliases"),
        ({"model_aliases": {"x": "a", "y": "x"}}, "model_aliases has y for x, which is an alias itself; name what"),
        (
            {"served_model_name": ["a", "b"], "lora_adapters": {"b": "/b"}, "engine": {"max_loras": 1}},
            "lora_adapters has one named b, which is the model's own name",
        ),
    ],
)
def test_names_that_cannot_be_meant_are_refused_at_the_start(args: dict[str, Any], says: str) -> None:
    with pytest.raises(ValidationError, match=says):
        AppSettings.model_validate({"served_model_name": "a"} | args)


def test_an_alias_may_stand_for_an_adapter_of_the_config() -> None:
    args = {"lora_adapters": {"law": "/law"}, "engine": {"max_loras": 1}, "model_aliases": {"claude-*": "law"}}
    assert AppSettings.model_validate(args).model_aliases == {"claude-*": "law"}

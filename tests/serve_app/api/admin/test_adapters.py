"""Owns the contract of adapters over HTTP: their names, who may change them, what a change leaves alone. Long: each of
them, with several engines, too, and with clients that leave.
Never needs weights: the fake executor's rows differ with each adapter."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from starlette.types import ASGIApp

from engine.async_engine import AsyncEngine
from engine.build.engine import build_engine
from engine.config import EngineConfig, FakeConfig
from engine.protocol import AdapterRef, EngineError, ErrorCode, RequestRejected
from serve_app.adapters.named_adapters import NamedAdapters
from serve_app.adapters.names import AdapterNames
from serve_app.api.ingress import create_app
from serve_app.api.text.tokenizer import Tokenizer
from serve_app.auth.keys import Keys
from serve_app.channel.handle_client import same_adapter
from serve_app.settings.application import AppSettings
from tests.serve_app.harness import (
    CHAT,
    MODEL,
    PROMPT,
    TIMEOUT_S,
    Answer,
    Exchange,
    LocalClient,
    ScriptedClient,
    finished,
    tokens,
)
from tests.support.conditions import until

pytestmark = pytest.mark.anyio
ADMIN = "sk-admin"
KEYS = Keys(admin_sha256=hashlib.sha256(ADMIN.encode()).hexdigest())
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 8, "ignore_eos": True}
LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"


@pytest.fixture
def engine() -> Iterator[AsyncEngine]:
    config = EngineConfig(executor="fake", max_model_len=200, max_loras=3, fake=FakeConfig(step_delay_ms=1))
    engine = build_engine("", config)
    yield engine
    engine.shutdown()


@pytest.fixture
def app(engine: AsyncEngine) -> ASGIApp:
    return create_app(LocalClient(engine), Tokenizer.byte_level(), MODEL, keys=KEYS, allow_lora_updates=True)


def write(directory: Path, name: str, contents: str) -> str:
    path = directory / name
    path.mkdir(exist_ok=True)
    (path / "adapter_config.json").write_text(contents)
    return str(path)


async def send(app: ASGIApp, path: str, body: Any, key: str = ADMIN) -> Answer:
    headers = [("content-type", "application/json"), ("authorization", f"Bearer {key}")]
    return await Exchange(app, "POST", path, json.dumps(body).encode(), headers).finish()


async def get(app: ASGIApp, path: str) -> Answer:
    return await Exchange(app, "GET", path, headers=()).finish()


async def load(app: ASGIApp, name: str, path: str, **more: Any) -> Answer:
    return await send(app, LOAD, {"lora_name": name, "lora_path": path, **more})


async def text_of(app: ASGIApp, model: str, **more: Any) -> str:
    answer = await send(app, "/v1/completions", PROMPT | GREEDY | {"model": model} | more)
    assert answer.status == 200, answer.json
    assert answer.json["model"] == model
    return str(answer.json["choices"][0]["text"])


async def test_an_adapter_answers_under_its_name_and_the_model_s_from_its_load_to_its_unload(
    app: ASGIApp, tmp_path: Path
) -> None:
    plain = await text_of(app, MODEL.id)
    answer = await load(app, "a", write(tmp_path, "a", "one"))
    assert answer.status == 200
    assert answer.headers["content-type"].startswith("text/plain")
    assert b"".join(answer.parts) == b"Success: LoRA adapter 'a' added successfully."
    adapted = await text_of(app, "a")
    assert adapted != plain
    assert await text_of(app, f"{MODEL.id}:a") == adapted
    assert await text_of(app, MODEL.id) == plain
    assert (await send(app, UNLOAD, {"lora_name": "a"})).status == 200
    for name in ("a", f"{MODEL.id}:a"):
        gone = await send(app, "/v1/completions", PROMPT | {"model": name})
        assert (gone.status, gone.error["code"], gone.error["param"]) == (404, "model_not_found", "model")
    again = await send(app, UNLOAD, {"lora_name": "a"})
    assert (again.status, again.error["param"]) == (404, "lora_name")


async def test_the_list_of_models_has_each_adapter_with_its_parent(app: ASGIApp, tmp_path: Path) -> None:
    await load(app, "a", write(tmp_path, "a", "one"))
    base, adapter = (await get(app, "/v1/models")).json["data"]
    assert (base["parent"], base["root"]) == (None, MODEL.id)
    assert adapter == base | {"id": "a", "display_name": "a", "parent": MODEL.id}
    assert (await get(app, "/v1/models/a")).json == adapter
    assert (await get(app, f"/v1/models/{MODEL.id}:a")).json["id"] == f"{MODEL.id}:a"
    assert (await get(app, f"/v1/models/{MODEL.id}:b")).status == 404


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", CHAT),
        ("/v1/completions", PROMPT),
        ("/v1/responses", {"input": "hi"}),
        ("/v1/messages", CHAT | {"max_tokens": 8}),
        ("/v1/messages/count_tokens", CHAT),
        ("/tokenize", {"prompt": "hi"}),
        ("/detokenize", {"tokens": [72]}),
    ],
)
async def test_every_route_that_names_a_model_knows_adapters_and_no_others(path: str, body: dict[str, Any]) -> None:
    client = ScriptedClient(tokens("hi"), [finished()])
    adapter = AdapterRef("a", "/a", "0f")
    app = create_app(client, Tokenizer.byte_level(), MODEL, adapters=AdapterNames(MODEL, [adapter]))
    for name in ("a", f"{MODEL.id}:a"):
        answer = await send(app, path, body | {"model": name})
        assert answer.status == 200, answer.json
        assert answer.json.get("model", name) == name
    assert {submission.adapter for submission in client.submissions} <= {adapter}
    assert (await send(app, path, body | {"model": f"{MODEL.id}:b"})).status == 404
    client.submissions.clear()
    assert (await send(app, path, body | {"model": MODEL.id})).status == 200
    assert {submission.adapter for submission in client.submissions} <= {None}


async def test_embeddings_are_computed_with_the_adapter_that_is_named(engine: AsyncEngine, tmp_path: Path) -> None:
    model = replace(MODEL, pooling="mean")
    app = create_app(LocalClient(engine), Tokenizer.byte_level(), model, keys=KEYS, allow_lora_updates=True)
    await load(app, "a", write(tmp_path, "a", "one"))
    vectors = []
    for name in (MODEL.id, "a"):
        answer = await send(app, "/v1/embeddings", {"model": name, "input": "hi"})
        assert answer.json["model"] == name
        vectors.append(answer.json["data"][0]["embedding"])
    assert vectors[0] != vectors[1]


async def test_a_name_that_is_taken_is_replaced_only_on_request_and_streams_that_run_keep_the_old_weights(
    app: ASGIApp, engine: AsyncEngine, tmp_path: Path
) -> None:
    old, new = write(tmp_path, "old", "one"), write(tmp_path, "new", "two")
    await load(app, "a", old)
    long = {"max_tokens": 60, "prompt": "tell"}
    alone = await text_of(app, "a", **long)
    running = asyncio.ensure_future(text_of(app, "a", **long))
    async with asyncio.timeout(TIMEOUT_S):
        while not engine.load().num_running:
            await asyncio.sleep(0)
    refused = await load(app, "a", new)
    assert (refused.status, refused.error["param"]) == (400, "lora_name")
    assert "load_inplace" in refused.error["message"]
    assert (await load(app, "a", new, load_inplace=True)).status == 200
    assert await text_of(app, "a", **long) != alone
    assert await running == alone


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"lora_name": MODEL.id, "lora_path": "/a"}, "lora_name"),
        ({"lora_name": "a:b", "lora_path": "/a"}, "lora_name"),
        ({"lora_name": "", "lora_path": "/a"}, "lora_name"),
        ({"lora_name": "a", "lora_path": "/nowhere"}, "lora_path"),
        ({"lora_name": "a", "lora_path": "/" + "x" * 1000}, "lora_path"),
        ({"lora_name": "a"}, "lora_path"),
        ({"lora_name": "a", "lora_path": "/a", "lora_int_id": 1}, "lora_int_id"),
    ],
)
async def test_what_cannot_be_loaded_is_a_400_that_names_the_field_and_leaves_no_name(
    app: ASGIApp, body: dict[str, Any], param: str
) -> None:
    answer = await send(app, LOAD, body)
    assert (answer.status, answer.error["param"]) == (400, param)
    assert len((await get(app, "/v1/models")).json["data"]) == 1


@pytest.mark.parametrize("path", [LOAD, UNLOAD])
async def test_only_the_admin_key_opens_the_routes_and_only_where_the_setting_allows(
    engine: AsyncEngine, path: str
) -> None:
    body = {"lora_name": "a"} | ({"lora_path": "/a"} if path == LOAD else {})
    client = LocalClient(engine)
    closed = create_app(client, Tokenizer.byte_level(), MODEL, keys=KEYS)
    answer = await send(closed, path, body)
    assert (answer.status, answer.error["code"]) == (403, "lora_updates_disabled")
    assert "allow_lora_updates is false" in answer.error["message"]
    allowed = create_app(client, Tokenizer.byte_level(), MODEL, keys=KEYS, allow_lora_updates=True)
    assert (await send(allowed, path, body, key="sk-other")).status == 401
    without = create_app(client, Tokenizer.byte_level(), MODEL, allow_lora_updates=True)
    assert (await send(without, path, body)).error["code"] == "admin_disabled"


async def test_an_adapter_that_an_engine_cannot_have_now_is_a_503_that_says_when_to_come_back() -> None:
    refusal = RequestRejected(ErrorCode.ADAPTER_UNAVAILABLE, "2 adapters in memory (max_loras)", "model")
    names = AdapterNames(MODEL, [AdapterRef("a", "/a", "0f")])
    app = create_app(ScriptedClient(refusal), Tokenizer.byte_level(), MODEL, adapters=names)
    answer = await send(app, "/v1/completions", PROMPT | {"model": "a"})
    assert (answer.status, answer.error["code"]) == (503, "adapter_unavailable")
    assert "max_loras" in answer.error["message"]
    assert "retry-after" in answer.headers


# --- several engines --------------------------------------------------------------------------------------------------

HERE = AdapterRef("a", "/a", "0f")
REFUSED = RequestRejected(ErrorCode.INVALID_PARAMETER, "/a is no directory", "lora_path")


def test_engines_that_all_have_it_agree() -> None:
    assert same_adapter({"e1": HERE, "e2": HERE}) == HERE


def test_engines_of_which_some_had_loaded_it_before_it_was_withdrawn_say_so() -> None:
    withdrawn = RequestRejected(ErrorCode.ADAPTER_WITHDRAWN, "a was unloaded", "lora_name")
    with pytest.raises(RequestRejected) as refused:
        same_adapter({"e1": HERE, "e2": withdrawn, "e3": REFUSED})
    assert refused.value is withdrawn


async def test_a_load_that_was_withdrawn_is_a_409_that_is_not_to_be_repeated() -> None:
    """Regression: it was a 503 with Retry-After, so that clients loaded again what had just been unloaded."""
    withdrawn = RequestRejected(ErrorCode.ADAPTER_WITHDRAWN, "a was unloaded", "lora_name")
    client = SlowClient(withdrawn)
    client.may_end.set()
    app = create_app(client, Tokenizer.byte_level(), MODEL, keys=KEYS, allow_lora_updates=True)
    answer = await load(app, "a", "/a")
    assert (answer.status, answer.error["code"]) == (409, "adapter_withdrawn")
    assert (answer.headers["x-should-retry"], answer.headers.get("retry-after")) == ("false", None)


@pytest.mark.parametrize(
    ("answers", "says"),
    [
        ({"e1": REFUSED, "e2": REFUSED}, "^/a is no directory$"),
        ({"e1": HERE, "e2": REFUSED, "e3": HERE}, "engine replicas e2 of 3 refuse it.*no directory"),
        ({"e1": HERE, "e2": AdapterRef("a", "/a", "f0")}, "different files on the machines of e1, e2"),
    ],
)
def test_engines_that_do_not_are_named(answers: dict[str, AdapterRef | EngineError], says: str) -> None:
    with pytest.raises(RequestRejected, match=says) as refused:
        same_adapter(answers)
    assert refused.value.param == "lora_path"


# --- settings ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"lora_adapters": {"a": "/a"}}, "lora_adapters is set, but engine.max_loras is 0"),
        ({"allow_lora_updates": True}, "allow_lora_updates is true, but engine.max_loras is 0"),
        ({"lora_adapters": {"a:b": "/a"}, "engine": {"max_loras": 1}}, "lora_adapters"),
        ({"lora_adapters": {"m": "/a"}, "served_model_name": "m", "engine": {"max_loras": 1}}, "the model's own name"),
    ],
)
def test_settings_that_could_serve_no_adapter_are_refused_at_start(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        AppSettings.model_validate(settings)


async def test_a_config_s_adapter_that_cannot_be_loaded_is_named(engine: AsyncEngine, tmp_path: Path) -> None:
    named = NamedAdapters(engine)
    with pytest.raises(RequestRejected, match=r"lora_adapters, b \(/nowhere\): adapter_config.json cannot be read"):
        await named.load_all({"a": write(tmp_path, "a", "one"), "b": "/nowhere"})


async def test_a_load_that_another_engine_refused_is_undone(engine: AsyncEngine, tmp_path: Path) -> None:
    named = NamedAdapters(engine)
    first = await named.load("a", write(tmp_path, "first", "one"))
    second = await named.load("a", write(tmp_path, "second", "two"))
    assert engine.adapters.loaded == (second.digest,)
    named.restore("a", second.path, first)
    assert named.known == [first]
    assert engine.adapters.loaded == ()
    named.restore("b", "/b", None)  # this replica's engine has refused it itself
    assert named.known == [first]


@pytest.mark.parametrize(
    "end", [lambda named, _: named.unload("a"), lambda named, path: named.restore("a", path, None)]
)
async def test_an_adapter_that_is_unloaded_while_it_is_loaded_stays_so(
    engine: AsyncEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: Callable[[NamedAdapters, str], None]
) -> None:
    """Regression: a replica that took too long to load it had it in the end, and told it to later ingress replicas."""
    named, path, load, may = NamedAdapters(engine), write(tmp_path, "a", "one"), engine.adapters.load, asyncio.Event()

    async def slowly(path: str) -> str:
        digest = await load(path)
        await may.wait()
        return digest

    monkeypatch.setattr(engine.adapters, "load", slowly)
    loading = asyncio.create_task(named.load("a", path))
    await until(lambda: engine.adapters.loaded)
    end(named, path)
    may.set()
    with pytest.raises(RequestRejected, match="a was unloaded, or its load was undone, while it was loaded") as refused:
        await loading
    assert refused.value.code is ErrorCode.ADAPTER_WITHDRAWN
    assert (named.known, engine.adapters.loaded) == ([], ())


async def test_a_load_says_what_the_name_means_so_that_it_can_be_undone() -> None:
    befores: list[AdapterRef | None] = []

    class Recording(ScriptedClient):
        async def load_adapter(self, name: str, path: str, before: AdapterRef | None) -> AdapterRef:
            befores.append(before)
            return AdapterRef(name, path, path)

    app = create_app(Recording(), Tokenizer.byte_level(), MODEL, keys=KEYS, allow_lora_updates=True)
    for path in ("/a", "/b"):
        assert (await load(app, "a", path, load_inplace=True)).status == 200
    assert befores == [None, AdapterRef("a", "/a", "/a")]


@pytest.mark.parametrize("reaches_here", [False, True])
async def test_an_unload_that_failed_can_be_repeated(reaches_here: bool) -> None:
    """The name was forgotten before the other replicas were told, and then a repetition was a 404 that told nobody."""
    told: list[str] = []
    names = AdapterNames(MODEL, [AdapterRef("a", "/a", "0f")])

    class Failing(ScriptedClient):
        async def unload_adapter(self, name: str) -> None:
            told.append(name)
            if reaches_here:
                names.remove(name)
            if len(told) == 1:
                raise EngineError(ErrorCode.ENGINE_DEAD, "A replica does not answer.")

    app = create_app(Failing(), Tokenizer.byte_level(), MODEL, keys=KEYS, allow_lora_updates=True, adapters=names)
    assert (await send(app, UNLOAD, {"lora_name": "a"})).status == 503
    assert (await send(app, UNLOAD, {"lora_name": "a"})).status == (404 if reaches_here else 200)
    assert (told, names.get("a")) == (["a", "a"], None)


# --- clients that leave -----------------------------------------------------------------------------------------------

OF_A_REQUEST: ContextVar[str | None] = ContextVar("of_a_request", default=None)


class SlowClient(ScriptedClient):
    """Changes the adapter `a` only when `may_end` is set."""

    def __init__(self, error: EngineError | None = None) -> None:
        super().__init__()
        self.may_end = asyncio.Event()
        self.calls: list[str] = []
        self.contexts: list[str | None] = []
        self._error = error

    async def load_adapter(self, name: str, path: str, before: AdapterRef | None) -> AdapterRef:
        await self._change(f"load {name}", name)
        return await super().load_adapter(name, path, before)

    async def unload_adapter(self, name: str) -> None:
        await self._change(f"unload {name}", name)

    async def _change(self, call: str, name: str) -> None:
        self.calls.append(call)
        self.contexts.append(OF_A_REQUEST.get())
        if name == "a":
            await self.may_end.wait()
            self.calls.append(f"{call} ends")
            if self._error is not None:
                raise self._error


async def leave(client: SlowClient, app: ASGIApp, path: str) -> None:
    """Send a change of the adapter `a` whose client leaves once it has begun."""
    OF_A_REQUEST.set("Serve's")
    body = {"lora_name": "a"} | ({"lora_path": "/a"} if path == LOAD else {})
    task = asyncio.ensure_future(send(app, path, body))
    await until(lambda: client.calls)
    await cancel(task)


async def cancel(task: asyncio.Future[Answer]) -> None:
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


@pytest.mark.parametrize("path", [LOAD, UNLOAD])
async def test_a_change_that_has_begun_is_completed_without_its_client_and_before_the_next(path: str) -> None:
    """Regression: some replicas had the adapter then and others not. Serve also cancels the calls that were made in a
    request's context."""
    client, names = SlowClient(), AdapterNames(MODEL, [AdapterRef("a", "/a", "0f")] if path == UNLOAD else [])
    app = create_app(client, Tokenizer.byte_level(), MODEL, keys=KEYS, allow_lora_updates=True, adapters=names)
    await leave(client, app, path)
    following = asyncio.ensure_future(load(app, "b", "/b"))
    impatient = asyncio.ensure_future(load(app, "c", "/c"))
    for _ in range(20):
        await asyncio.sleep(0)
    await cancel(impatient)
    client.may_end.set()
    assert (await following).status == 200
    change = "load a" if path == LOAD else "unload a"
    assert client.calls == [change, f"{change} ends", "load b"]
    assert (names.get("a") is not None) == (path == LOAD)
    assert client.contexts == [None, None]


async def test_a_change_that_fails_without_its_client_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    client = SlowClient(EngineError(ErrorCode.ENGINE_DEAD, "A replica does not answer."))
    app = create_app(client, Tokenizer.byte_level(), MODEL, keys=KEYS, allow_lora_updates=True)
    await leave(client, app, LOAD)
    client.may_end.set()
    assert (await load(app, "b", "/b")).status == 200
    (record,) = [record for record in caplog.records if "client" in record.message]
    assert record.exc_info is not None
    assert "A replica does not answer." in str(record.exc_info[1])

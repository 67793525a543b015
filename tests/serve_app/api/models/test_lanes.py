"""Owns the contract of several models behind one API. Long: each route, and a model that sleeps.
Each request is read, counted and answered by the model that it names, and what is told of the server tells of all.
Never starts an engine: a script answers for each model, and says which it is."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from prometheus_client.parser import text_string_to_metric_families
from starlette.types import ASGIApp
from tokenizers import decoders, models, pre_tokenizers

from engine.protocol import AdapterRef, EngineError, ErrorCode
from serve_app.adapters.names import AdapterNames
from serve_app.admission.gate import Gate
from serve_app.api.ingress import create_app_of
from serve_app.api.models.lane import Lane
from serve_app.api.text.tokenizer import Tokenizer
from serve_app.auth.keys import Keys
from serve_app.engines.engine_load import EngineLoad
from serve_app.errors.api_error import ApiError, cannot_wake
from serve_app.metrics.activity import EngineActivity, FleetActivity, IngressActivity
from serve_app.metrics.exposition import Scrape
from serve_app.metrics.ingress_recorder import IngressRecorder
from serve_app.metrics.values import ReplicaSamples
from serve_app.settings.responses_store import ResponsesStoreSettings
from serve_app.store.memory import LocalMemory
from tests.serve_app.harness import CHAT, MODEL, PROMPT, Answer, Exchange, ScriptedClient, finished, scheduled, tokens

pytestmark = pytest.mark.anyio

ADMIN = "sk-admin"
FIRST, SECOND = replace(MODEL, id="org/first"), replace(MODEL, id="second", max_model_len=64, pooling="mean")
LAW = AdapterRef("law", "/law", "0f")


class Client(ScriptedClient):
    """Answers with its model's text, and has replicas of its own."""

    def __init__(self, text: str, script: Sequence[Any] | None = None) -> None:
        super().__init__(*([[scheduled()], tokens(text), [finished()]] if script is None else script))
        self.name = text
        self.loaded: list[str] = []
        self.recorder: IngressRecorder | None = None

    async def metrics(self) -> Scrape:
        assert self.recorder is not None
        return Scrape([], [ReplicaSamples("ingress-1", self.recorder.samples())], {"engine": len(self.name)})

    async def load_adapter(self, name: str, path: str, before: AdapterRef | None) -> AdapterRef:
        self.loaded.append(name)
        return await super().load_adapter(name, path, before)


def other_tokenizer(directory: Path) -> Tokenizer:
    """Make one whose tokens are the same bytes under other ids."""
    pieces = sorted(pre_tokenizers.ByteLevel.alphabet(), reverse=True)
    core = tokenizers.Tokenizer(models.BPE(vocab={piece: number for number, piece in enumerate(pieces)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.save(str(directory / "tokenizer.json"))
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    (directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    return Tokenizer.from_dir(directory)


class Server:
    """Two models: the first has the byte-level tokenizer, the second another."""

    def __init__(self, directory: Path, *, sleeper: Any = None, updates: tuple[bool, bool] = (True, True)) -> None:
        self.clients = (Client("one"), Client("two"))
        self.gates = (Gate(), Gate())
        self.names = (
            AdapterNames(FIRST, [LAW], other_names=["uno"], aliases={"claude-*": FIRST.id, "gpt-x": "law"}),
            AdapterNames(SECOND, aliases={"claude-3": "second", "gpt-*": "second"}),
        )
        self.tokenizers = (Tokenizer.byte_level(), other_tokenizer(directory))
        self.loads: list[EngineLoad | None] = [None, None]
        recorders = [IngressRecorder(gate) for gate in self.gates]
        for client, recorder in zip(self.clients, recorders, strict=True):
            client.recorder = recorder
        self.lanes = [
            Lane(
                self.clients[number],
                self.tokenizers[number],
                self.names[number],
                self.gates[number],
                recorders[number],
                engine_load=lambda number=number: self.loads[number],
                allow_lora_updates=updates[number],
                sleeper=sleeper if number else None,
            )
            for number in range(2)
        ]
        keys = Keys(admin_sha256=hashlib.sha256(ADMIN.encode()).hexdigest())
        memory = LocalMemory(ResponsesStoreSettings())
        self.app: ASGIApp = create_app_of(self.lanes, memory=memory, keys=keys)

    async def post(self, path: str, body: Any, *, key: str = ADMIN) -> Answer:
        headers = [("content-type", "application/json"), ("authorization", f"Bearer {key}")]
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        return await Exchange(self.app, "POST", path, data, headers).finish()

    async def get(self, path: str) -> Answer:
        return await Exchange(self.app, "GET", path, headers=()).finish()

    @property
    def asked(self) -> list[int]:
        return [len(client.submissions) for client in self.clients]


@pytest.fixture
def server(tmp_path: Path) -> Server:
    return Server(tmp_path)


BODIES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", CHAT),
    ("/v1/completions", PROMPT),
    ("/v1/responses", {"input": "hi"}),
    ("/v1/messages", CHAT | {"max_tokens": 8}),
    ("/completions", PROMPT),
]


# --- which model answers --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "body"), BODIES)
async def test_each_route_is_answered_by_the_model_that_is_asked_for_with_its_own_tokenizer(
    server: Server, path: str, body: dict[str, Any], stream: bool
) -> None:
    for number, model in enumerate((FIRST, SECOND)):
        answer = await server.post(path, body | {"model": model.id, "stream": stream})
        assert answer.status == 200, answer.json
        text = b"".join(answer.parts).decode()
        assert f'"{model.id}"' in text
        prompt = server.clients[number].submissions[-1].prompt_token_ids
        assert server.tokenizers[number].decode(list(prompt)).count("hi") == 1
    assert server.asked == [1, 1]


@pytest.mark.parametrize(
    ("asked", "number", "named"),
    [
        ("org/first", 0, "org/first"),
        ("uno", 0, "org/first"),
        ("law", 0, "law"),
        ("uno:law", 0, "uno:law"),
        ("claude-4", 0, "org/first"),
        ("claude-3", 1, "second"),  # a name of the second goes before a pattern of the first
        ("gpt-x", 0, "law"),
        ("gpt-4o", 1, "second"),
        ("second", 1, "second"),
    ],
)
async def test_a_name_an_adapter_or_an_alias_of_any_model_finds_it(
    server: Server, asked: str, number: int, named: str
) -> None:
    answer = await server.post("/v1/completions", PROMPT | {"model": asked})
    assert answer.json["model"] == named
    assert server.asked == [1 - number, number]
    assert (await server.get(f"/v1/models/{asked}")).json["root"] == server.lanes[number].model.id


@pytest.mark.parametrize(
    "body",
    [
        b'{"prompt": "hi", "model": "org/first", "model": "second", "max_tokens": 2}',
        b'{"max_tokens": 2, "prompt": "\xc3\xa9 \\ud83d\\ude00", "model": "\\u0073econd"}',
        json.dumps({"prompt": "model", "model": "second", "max_tokens": 2}).encode(),
    ],
    ids=["twice", "escaped", "as-text"],
)
async def test_the_model_is_read_as_the_routes_read_it(server: Server, body: bytes) -> None:
    answer = await server.post("/v1/completions", body)
    assert (answer.status, answer.json["model"]) == (200, "second")
    assert server.asked == [0, 1]


@pytest.mark.parametrize(("path", "body"), BODIES)
async def test_an_unknown_model_is_not_found_and_the_error_names_those_that_there_are(
    server: Server, path: str, body: dict[str, Any]
) -> None:
    answer = await server.post(path, body | {"model": "third"})
    assert answer.status == 404
    assert "`third` does not exist" in answer.json["error"]["message"]
    assert "this server serves `org/first`, `second`." in answer.json["error"]["message"]
    assert server.asked == [0, 0]


@pytest.mark.parametrize(
    ("body", "param"),
    [(b'{"prompt": "hi"}', "model"), (b'{"prompt": "hi", "model": 7}', "model"), (b'{"prompt": "hi"', None)],
)
async def test_a_body_without_a_model_is_refused_as_with_one_model(
    server: Server, body: bytes, param: str | None
) -> None:
    answer = await server.post("/v1/completions", body)
    assert (answer.status, answer.error["param"]) == (400, param)


async def test_only_the_model_that_makes_embeddings_is_asked_for_them(server: Server) -> None:
    refused = await server.post("/v1/embeddings", {"model": "org/first", "input": "hi"})
    assert refused.status in (400, 404)
    await server.post("/v1/embeddings", {"model": "second", "input": "hi"})
    assert server.asked == [0, 1]


async def test_the_limits_are_those_of_the_model(server: Server) -> None:
    long = PROMPT | {"prompt": "x" * 100}
    assert (await server.post("/v1/completions", long | {"model": "org/first"})).status == 200
    answer = await server.post("/v1/completions", long | {"model": "second"})
    assert (answer.status, answer.error["code"]) == (400, "context_length_exceeded")


# --- routes without an engine ---------------------------------------------------------------------------------------


async def test_texts_are_encoded_and_decoded_by_the_model_that_is_asked_for(server: Server) -> None:
    for number, model in enumerate((FIRST, SECOND)):
        told = (await server.post("/tokenize", {"model": model.id, "prompt": "hi"})).json
        assert told["tokens"] == server.tokenizers[number].encode("hi", add_special_tokens=True)
        assert told["max_model_len"] == model.max_model_len
        back = await server.post("/detokenize", {"model": model.id, "tokens": told["tokens"]})
        assert back.json == {"prompt": "hi"}
        info = (await server.get(f"/tokenizer_info?model={model.id}")).json
        assert (info["model"], info["vocab_size"]) == (model.id, server.tokenizers[number].vocab_size)
    assert (await server.get("/tokenizer_info")).json["model"] == "org/first"
    assert (await server.post("/tokenize", {"prompt": "hi"})).json["max_model_len"] == FIRST.max_model_len
    assert (await server.post("/tokenize", {"model": "third", "prompt": "hi"})).status == 404
    assert (await server.get("/tokenizer_info?model=third")).status == 404


async def test_a_conversations_tokens_are_counted_by_the_model_that_is_asked_for(server: Server) -> None:
    counts = [
        (await server.post("/v1/messages/count_tokens", CHAT | {"model": model.id})).json["input_tokens"]
        for model in (FIRST, SECOND)
    ]
    assert counts[1] == 2  # its template is the text alone
    assert counts[0] > 2


async def test_all_models_are_listed_with_their_adapters_and_aliases(server: Server) -> None:
    listed = (await server.get("/v1/models")).json["data"]
    assert [(one["id"], one["root"], one["max_model_len"]) for one in listed] == [
        ("org/first", "org/first", 200),
        ("uno", "org/first", 200),
        ("law", "org/first", 200),
        ("gpt-x", "org/first", 200),
        ("second", "second", 64),
        ("claude-3", "second", 64),
    ]
    missing = await server.get("/v1/models/third")
    assert (missing.status, "`org/first`, `second`" in missing.error["message"]) == (404, True)


# --- responses that are kept ----------------------------------------------------------------------------------------


async def test_a_kept_response_knows_its_model_and_another_can_go_on_from_it(server: Server) -> None:
    first = (await server.post("/v1/responses", {"model": "org/first", "input": "hi"})).json
    then = {"model": "second", "input": "and?", "previous_response_id": first["id"]}
    second = (await server.post("/v1/responses", then)).json
    assert (first["model"], second["model"]) == ("org/first", "second")
    prompt = server.tokenizers[1].decode(list(server.clients[1].submissions[0].prompt_token_ids))
    assert prompt == "hioneand?"
    headers = [("authorization", f"Bearer {ADMIN}")]
    kept = await Exchange(server.app, "GET", f"/v1/responses/{second['id']}", headers=headers).finish()
    assert kept.json["model"] == "second"


# --- what is told of the server -------------------------------------------------------------------------------------


async def test_requests_are_counted_for_the_model_that_they_ask_for(server: Server) -> None:
    for _ in range(2):
        await server.post("/v1/completions", PROMPT | {"model": "second"})
    await server.post("/v1/completions", PROMPT | {"model": "org/first"})
    await server.post("/v1/chat/completions", CHAT | {"model": "second", "verbosity": "low"})
    text = b"".join((await server.get("/metrics")).parts).decode()
    families = {family.name: family for family in text_string_to_metric_families(text)}
    assert len(families) == text.count("# TYPE"), "each family's head stands once"

    def total(name: str, **labels: str) -> dict[str, float]:
        return {
            sample.labels["model_name"]: sample.value
            for sample in families[name].samples
            if labels.items() <= sample.labels.items()
        }

    assert total("chunkserve:requests", outcome="complete") == {"org/first": 1, "second": 3}
    assert total("chunkserve:ignored_fields", field="verbosity") == {"second": 1}
    assert total("chunkserve:replicas_missing", deployment="engine") == {"org/first": 3, "second": 3}


async def test_the_load_is_told_of_all_models_together_and_of_each(server: Server) -> None:
    told = (await server.get("/load")).json
    assert len(told["engines"]) == 2
    assert set(told["models"]) == {"org/first", "second"}
    assert told["models"]["second"]["engines"] == told["engines"][1:]
    with server.gates[1].enter():
        told = (await server.get("/load")).json
    assert (told["ingress"]["num_live"], told["models"]["second"]["ingress"]["num_live"]) == (1, 1)
    assert told["models"]["org/first"]["ingress"]["num_live"] == 0


def fail(client: Client, *methods: str) -> None:
    async def failing() -> Any:
        raise EngineError(ErrorCode.ENGINE_DEAD, "gone")

    for method in methods:
        setattr(client, method, failing)


async def test_a_model_whose_engines_do_not_answer_has_an_error_in_the_load_beside_the_others(server: Server) -> None:
    whole = (await server.get("/load")).json
    fail(server.clients[0], "load")
    answer = await server.get("/load")
    assert (answer.status, answer.json["engines"]) == (200, whole["engines"][1:])
    assert answer.json["ingress"] == whole["ingress"]
    first, second = answer.json["models"].values()
    assert second == whole["models"]["second"]
    assert (first["engines"], first["ingress"]) == ([], whole["models"]["org/first"]["ingress"])
    assert (first["error"]["code"], first["error"]["message"]) == ("engine_dead", "The engine is not running.")
    fail(server.clients[1], "load")
    answer = await server.get("/load")
    assert (answer.status, answer.error["code"]) == (503, "engine_dead")


async def test_a_model_whose_prefix_caches_stay_is_named_beside_those_that_were_emptied(server: Server) -> None:
    """Regression guard: the models after the first that failed kept theirs, and nobody knew which had."""
    fail(server.clients[0], "reset_prefix_cache")
    answer = await server.post("/admin/reset_prefix_cache", {})
    assert (answer.status, answer.json["dropped_blocks"]) == (200, [3])
    first, second = (answer.json["models"][model.id] for model in (FIRST, SECOND))
    assert (first["dropped_blocks"], first["error"]["code"]) == ([], "engine_dead")
    assert second == {"dropped_blocks": [3]}
    fail(server.clients[1], "reset_prefix_cache")
    assert (await server.post("/admin/reset_prefix_cache", {})).status == 503


async def test_the_activity_names_each_models_engines_and_counts_an_ingress_once(server: Server) -> None:
    def engine(name: str) -> EngineActivity:
        return EngineActivity(
            engine=name,
            num_running=0,
            num_waiting=0,
            num_blocks=1,
            num_held_blocks=0,
            max_num_seqs=1,
            max_num_batched_tokens=1,
            tpot_ms=None,
            window_s=1,
            prompt_tokens_per_s=0,
            generated_tokens_per_s=0,
            gap_p50_ms=None,
            gap_p99_ms=None,
            steps=(),
        )

    server.clients[0].fleet = FleetActivity([engine("a")], [IngressActivity("i", 2, 1)], 1)
    server.clients[1].fleet = FleetActivity([engine("b")], [IngressActivity("i", 3, 0)], 0)
    told = (await server.get("/activity")).json
    assert told["models"] == [{"model": "org/first", "engines": ["a"]}, {"model": "second", "engines": ["b"]}]
    assert told["ingresses"] == [{"ingress": "i", "num_live": 5, "num_waiting": 1}]
    assert ([one["engine"] for one in told["engines"]], told["num_missing"]) == (["a", "b"], 1)


async def test_a_load_balancer_is_told_of_the_fullest_model(server: Server) -> None:
    server.loads[:] = [EngineLoad(0.25, 1), EngineLoad(0.75, 2)]
    headers = [
        ("content-type", "application/json"),
        ("authorization", f"Bearer {ADMIN}"),
        ("endpoint-load-metrics-format", "TEXT"),
    ]
    body = json.dumps(PROMPT | {"model": "second"}).encode()
    answer = await Exchange(server.app, "POST", "/v1/completions", body, headers).finish()
    told = answer.headers["endpoint-load-metrics"]
    assert "kv_cache_usage_perc=0.75" in told
    assert "num_requests_waiting=3" in told


async def test_the_server_is_healthy_as_long_as_an_engine_of_any_model_answers(server: Server) -> None:
    """A model without an engine must not take the others out of a load balancer; its own requests are refused."""
    server.clients[1].health = EngineError(ErrorCode.ENGINE_DEAD, "gone")
    assert [(await server.get(path)).status for path in ("/health", "/ready")] == [200, 200]
    server.clients[0].health = EngineError(ErrorCode.ENGINE_DEAD, "gone, too")
    assert [(await server.get(path)).status for path in ("/health", "/ready")] == [503, 503]


async def test_draining_closes_every_models_gate(server: Server) -> None:
    assert (await server.post("/admin/drain", {})).json == {"draining": True}
    assert all(gate.is_draining for gate in server.gates)
    assert (await server.post("/v1/completions", PROMPT | {"model": "second"})).status == 503
    assert (await server.post("/admin/resume", {})).json == {"draining": False}
    assert (await server.post("/v1/completions", PROMPT | {"model": "second"})).status == 200
    assert server.clients[0].drains == [True, False]
    assert (await server.post("/admin/reset_prefix_cache", {})).json == {
        "dropped_blocks": [3, 3],
        "models": {"org/first": {"dropped_blocks": [3]}, "second": {"dropped_blocks": [3]}},
    }


# --- adapters -------------------------------------------------------------------------------------------------------


async def test_an_adapter_is_loaded_for_the_model_that_is_named(server: Server) -> None:
    asked = {"lora_name": "tax", "lora_path": "/tax"}
    refused = await server.post("/v1/load_lora_adapter", asked)
    assert (refused.status, refused.error["param"]) == (400, "model")
    assert "org/first, second" in refused.error["message"]
    assert (await server.post("/v1/load_lora_adapter", asked | {"model": "second"})).status == 200
    assert (server.clients[0].loaded, server.clients[1].loaded) == ([], ["tax"])
    answer = await server.post("/v1/completions", PROMPT | {"model": "tax"})
    assert answer.json["model"] == "tax"
    assert server.asked == [0, 1]
    assert (await server.post("/v1/unload_lora_adapter", {"lora_name": "tax", "model": "org/first"})).status == 404
    assert (await server.post("/v1/unload_lora_adapter", {"lora_name": "tax", "model": "second"})).status == 200
    assert (await server.post("/v1/completions", PROMPT | {"model": "tax"})).status == 404


async def test_an_adapter_gets_no_name_that_another_model_or_its_adapter_has(server: Server) -> None:
    for name in ("uno", "law"):
        body = {"lora_name": name, "lora_path": "/x", "model": "second", "load_inplace": True}
        refused = await server.post("/v1/load_lora_adapter", body)
        assert (refused.status, refused.error["param"]) == (400, "lora_name")
    assert server.clients[1].loaded == []


async def test_only_the_model_whose_adapters_may_change_changes_them(tmp_path: Path) -> None:
    server = Server(tmp_path, updates=(False, True))
    body = {"lora_name": "tax", "lora_path": "/tax"}
    assert (await server.post("/v1/load_lora_adapter", body | {"model": "org/first"})).status == 403
    assert (await server.post("/v1/load_lora_adapter", body | {"model": "second"})).status == 200


# --- an adapter that no engine has read yet --------------------------------------------------------------------------


async def test_an_adapter_of_which_only_the_path_is_known_is_asked_for_and_never_sent(tmp_path: Path) -> None:
    """Regression: after a roll-out that added it, requests had a digest that no file has, for good."""
    server, known = Server(tmp_path), AdapterRef("tax", "/tax", "0a" * 16)
    server.names[0].put(replace(known, digest=""))
    answers: list[AdapterRef | EngineError | None] = [None, EngineError(ErrorCode.ENGINE_DEAD, "gone"), known]

    async def ask_adapters() -> None:
        match answers.pop(0):
            case AdapterRef() as told:
                server.names[0].put(told)
            case EngineError() as error:
                raise error

    lanes = [replace(server.lanes[0], ask_adapters=ask_adapters), server.lanes[1]]
    server.app = create_app_of(lanes)
    body = PROMPT | {"model": "tax"}
    refused = await server.post("/v1/completions", body)
    assert (refused.status, refused.error["code"]) == (503, "adapter_unavailable")
    assert "No engine has read the adapter tax yet" in refused.error["message"]
    assert (await server.post("/v1/completions", body)).status == 503
    assert server.asked == [0, 0]
    assert (await server.post("/v1/completions", body)).status == 200
    assert (await server.post("/v1/completions", body)).status == 200
    assert [submission.adapter for submission in server.clients[0].submissions] == [known, known]
    assert not answers, "it is not asked for again"


# --- a model that sleeps --------------------------------------------------------------------------------------------


class Sleeper:
    """Wakes when the test says so. `learns`: what happens then."""

    def __init__(self) -> None:
        self.is_known = False
        self.calls = 0
        self.has_engine = asyncio.Event()
        self.error: ApiError | None = None
        self.learns = lambda: None

    async def wake(self) -> None:
        self.calls += 1
        await self.has_engine.wait()
        if self.error is not None:
            raise self.error
        if not self.is_known:
            self.learns()
            self.is_known = True


async def test_a_request_for_a_sleeping_model_waits_until_it_is_awake_and_others_do_not(tmp_path: Path) -> None:
    sleeper = Sleeper()
    server = Server(tmp_path, sleeper=sleeper)
    body = json.dumps(PROMPT | {"model": "second"}).encode()
    headers = [("content-type", "application/json"), ("authorization", f"Bearer {ADMIN}")]
    waiting = Exchange(server.app, "POST", "/v1/completions", body, headers)
    assert (await server.post("/v1/completions", PROMPT | {"model": "org/first"})).status == 200
    assert waiting.silent
    assert server.gates[1].snapshot().num_live == 1
    assert (await server.get("/ready")).status == 200, "a model that sleeps does not make the server unready"
    sleeper.has_engine.set()
    assert (await waiting.finish()).json["model"] == "second"
    assert server.asked == [1, 1]


async def test_a_request_is_read_only_once_it_is_known_what_the_model_takes(tmp_path: Path) -> None:
    """Regression of the easy way: limits and inputs of a model are known from its engine, and not before."""
    sleeper = Sleeper()
    server = Server(tmp_path, sleeper=sleeper)
    sleeper.learns = lambda: server.names[1].become(replace(SECOND, max_model_len=200))
    sleeper.has_engine.set()
    long = PROMPT | {"prompt": "x" * 100, "model": "second"}
    assert (await server.post("/tokenize", {"model": "second", "prompt": "hi"})).json["max_model_len"] == 200
    assert (await server.post("/v1/completions", long)).status == 200


async def test_a_model_that_cannot_be_woken_is_a_503_that_says_when_to_retry(tmp_path: Path) -> None:
    sleeper = Sleeper()
    sleeper.error = cannot_wake("second", 3)
    sleeper.has_engine.set()
    server = Server(tmp_path, sleeper=sleeper)
    answer = await server.post("/v1/completions", PROMPT | {"model": "second", "stream": True})
    assert (answer.status, answer.error["code"], answer.headers["retry-after"]) == (503, "model_asleep", "10")
    assert (
        "`second` has no engine and could not be woken: no engine of it was ready within 3 s" in answer.error["message"]
    )
    assert server.gates[1].snapshot().num_live == 0
    assert server.asked == [0, 0]


async def test_a_deadline_ends_the_wait_for_a_sleeping_model(tmp_path: Path) -> None:
    sleeper = Sleeper()
    sleeper.is_known = True
    server = Server(tmp_path, sleeper=sleeper)
    answer = await server.post("/v1/completions", PROMPT | {"model": "second", "timeout_ms": 50})
    assert (answer.status, answer.error["code"]) == (504, "deadline_exceeded")


async def test_listing_counting_and_decoding_wake_no_model_that_was_awake_before(tmp_path: Path) -> None:
    sleeper = Sleeper()
    sleeper.is_known = True
    server = Server(tmp_path, sleeper=sleeper)
    for path in ("/v1/models", "/metrics", "/load", "/activity", "/health", "/tokenizer_info?model=second"):
        assert (await server.get(path)).status == 200
    assert (await server.post("/tokenize", {"model": "second", "prompt": "hi"})).status == 200
    assert (await server.post("/v1/messages/count_tokens", CHAT | {"model": "second"})).status == 200
    assert sleeper.calls == 0


async def test_a_deadline_ends_the_wait_for_a_model_that_nobody_has_woken_yet(tmp_path: Path) -> None:
    """The first wake of a replica is read after the wait: neither the field nor the header had a say in it."""
    server = Server(tmp_path, sleeper=Sleeper())
    answer = await server.post("/v1/completions", PROMPT | {"model": "second", "timeout_ms": 50})
    assert (answer.status, answer.error["code"]) == (504, "deadline_exceeded")


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/messages/count_tokens"])
@pytest.mark.parametrize("model", ["third", 7, None])
async def test_what_names_no_model_wakes_none(tmp_path: Path, path: str, model: Any) -> None:
    server, sleeper = Server(tmp_path), Sleeper()
    server.lanes[0] = replace(server.lanes[0], sleeper=sleeper)
    app = create_app_of(server.lanes)
    body = json.dumps((PROMPT if path == "/v1/completions" else CHAT) | {"model": model}).encode()
    answer = await Exchange(app, "POST", path, body, [("content-type", "application/json")]).finish()
    assert answer.status in (400, 404)
    assert sleeper.calls == 0

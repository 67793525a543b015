"""Owns the promise that a long session outlives the engine replica that holds its cache: its texts are whole, and all
that was sent before is read from a cache, except in the turn that lost the engine.
Never measures time: what a turn computes anew is counted in tokens."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import httpx
import pytest

from engine.build.engine import build_engine
from engine.config import EngineConfig, FakeConfig
from loadtest.server import Server
from serve_app.api.ingress import create_app
from serve_app.api.text.tokenizer import Tokenizer
from serve_app.engines.engine_client import ServedModel
from tests.chaos.support import ENGINE, MODEL, engine_pid, fake, kill, until_replicas
from tests.serve_app.harness import LocalClient, post
from tests.support.serve_process import serve_run

pytestmark = [pytest.mark.anyio, pytest.mark.chaos]

Json = dict[str, Any]

NUM_TURNS, KILLED_AT, COMPACTED_AT = 43, 20, 32
PAUSES = (8, 26, 38)
PAUSE_S = 1.5
"""Longer than the period in which engines report what they have cached."""
BLOCK = 16
SHARE = 0.95
CONTEXT = 65_536
POOL = {
    "block_size": BLOCK,
    "max_model_len": CONTEXT,
    "num_kv_blocks": 2 * CONTEXT // BLOCK,
    "max_num_batched_tokens": 8192,
}
SYSTEM = "You change files. " + "Be careful with everything that you touch. " * 450
SUMMARY = "What was done so far: " + "a file was read and changed. " * 40
READ = {
    "name": "read",
    "description": "Reads.",
    "parameters": {
        "type": "object",
        "properties": {"path": {"type": "string", "pattern": "^[a-z]{40}$"}},
        "required": ["path"],
        "additionalProperties": False,
    },
}


@dataclass(frozen=True)
class Reply:
    """The answer of a turn: the arguments of the one call that it makes."""

    arguments: str
    num_prompt_tokens: int
    num_cached_tokens: int

    @classmethod
    def of(cls, arguments: str, usage: Json) -> Reply:
        return cls(arguments, usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"])


Ask = Callable[[Json], Awaitable[Reply]]


@dataclass
class Session:
    """A program that works with a tool. The model has to call it in each turn, with a path that depends on all that was
    said before, so that one token missing, added or changed alters every later turn."""

    ask: Ask
    replies: list[Reply] = field(default_factory=list)
    said: list[Json] = field(default_factory=lambda: [{"role": "user", "content": "Change the files."}])

    async def turn(self, number: int) -> None:
        if number == COMPACTED_AT:
            self.said = [{"role": "user", "content": SUMMARY}]
        reply = await self.ask(self._body())
        self.replies.append(reply)
        call = {"id": f"call_{number}", "type": "function"}
        call |= {"function": {"name": "read", "arguments": reply.arguments}}
        self.said.append({"role": "assistant", "content": "", "tool_calls": [call]})
        lines = "".join(f"{number * 40 + line}: x = {line}\n" for line in range(30))
        self.said.append({"role": "tool", "tool_call_id": call["id"], "content": lines})

    def _body(self) -> Json:
        messages = [{"role": "system", "content": SYSTEM}, *self.said]
        tools = [{"type": "function", "function": READ}]
        asked = {"model": MODEL, "messages": messages, "tools": tools, "tool_choice": "required"}
        return asked | {"parallel_tool_calls": False, "temperature": 0, "max_tokens": 300}


async def undisturbed_session() -> list[str]:
    """Return what an engine in this process calls, turn by turn."""
    engine = build_engine(MODEL, EngineConfig(executor="fake", fake=FakeConfig(), **POOL))
    model = ServedModel(id=MODEL, max_model_len=CONTEXT, created=0, tool_parser="hermes")
    app = create_app(LocalClient(engine), Tokenizer.byte_level(), model)

    async def ask(body: Json) -> Reply:
        answer = await post(app, "/v1/chat/completions", body)
        assert answer.status == 200, answer.json
        (call,) = answer.json["choices"][0]["message"]["tool_calls"]
        return Reply.of(call["function"]["arguments"], answer.json["usage"])

    session = Session(ask)
    try:
        for number in range(NUM_TURNS):
            await session.turn(number)
    finally:
        engine.shutdown()
    return [reply.arguments for reply in session.replies]


async def streamed(client: httpx.AsyncClient, body: Json, begun: asyncio.Event) -> Reply:
    """Read a streamed turn. `begun` is set when the first arguments of the call have arrived."""
    asked = body | {"stream": True, "stream_options": {"include_usage": True}}
    arguments, usage, ended = "", None, False
    async with client.stream("POST", "/v1/chat/completions", json=asked) as answer:
        assert answer.status_code == 200, await answer.aread()
        async for line in answer.aiter_lines():
            if line == "data: [DONE]":
                ended = True
            elif line.startswith("data: "):
                chunk = json.loads(line.removeprefix("data: "))
                assert "error" not in chunk, chunk
                usage = chunk["usage"] or usage
                for choice in chunk["choices"]:
                    for call in choice["delta"].get("tool_calls") or ():
                        arguments += call["function"].get("arguments") or ""
                        begun.set()
    assert ended
    assert usage is not None
    return Reply.of(arguments, usage)


@pytest.fixture(scope="module")
def two_engines() -> Iterator[Server]:
    args = fake(step_delay_ms=3, engine_replicas=2)
    args["engine"] |= POOL
    with serve_run(args) as server:
        yield server


async def busiest(client: httpx.AsyncClient) -> str:
    """Return the engine that generates most tokens a second."""
    engines = (await client.get("/activity")).json()["engines"]
    found: str = max(engines, key=lambda engine: engine["generated_tokens_per_s"])["engine"]
    return found


async def num_moves(client: httpx.AsyncClient) -> float:
    lines = (await client.get("/metrics")).text.splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith("chunkserve:migrations_total"))


def num_lacking(replies: Sequence[Reply]) -> list[int]:
    """Count, for each turn, the tokens that the turn before already had and that were not read from a cache. A
    compaction keeps what precedes the conversation. A last block that was not full is computed again and not
    counted."""
    lacking = [0]
    for number, (before, reply) in enumerate(pairwise(replies), 1):
        had = len(SYSTEM) if number == COMPACTED_AT else before.num_prompt_tokens
        lacking.append(max(had - had % BLOCK - reply.num_cached_tokens, 0))
    return lacking


async def test_a_session_of_43_turns_is_read_from_the_cache_though_its_engine_is_killed(two_engines: Server) -> None:
    async with httpx.AsyncClient(base_url=two_engines.url, timeout=60) as client:
        begun = asyncio.Event()
        session = Session(lambda body: streamed(client, body, begun))
        for number in range(NUM_TURNS):
            if number in PAUSES:
                await until_replicas(two_engines, ENGINE, 2)
                await asyncio.sleep(PAUSE_S)
            if number == KILLED_AT:
                pid = engine_pid(two_engines, await busiest(client))
                begun.clear()
                turn = asyncio.ensure_future(session.turn(number))
                await begun.wait()
                kill(pid)
                await turn
            else:
                await session.turn(number)
        assert await num_moves(client) == 1, "the engine was killed in the middle of an answer"
    assert [reply.arguments for reply in session.replies] == await undisturbed_session()
    lacking = num_lacking(session.replies)
    print(f"read again, by turn: { {turn: count for turn, count in enumerate(lacking) if count} }")
    sent_again = sum(reply.num_prompt_tokens for reply in session.replies[:-1])
    assert sum(lacking) <= (1 - SHARE) * sent_again, lacking

"""Owns the faults, and what chaos tests observe: processes of one server by role, load, and undisturbed answers.
Never touches a process that the server under test did not start."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
from starlette.types import ASGIApp

from engine.build.engine import build_engine
from engine.config import EngineConfig
from loadtest.server import Server
from serve_app.api.ingress import create_app
from serve_app.api.text.tokenizer import Tokenizer
from serve_app.engines.engine_client import ServedModel
from tests.serve_app.harness import Exchange, LocalClient
from tests.support.serve_process import members_of
from tests.support.streams import Answer, Stream

MODEL = "smollm2-135m-instruct"
ENGINE, INGRESS = "chunkserve:Engine", "chunkserve:Ingress"


def fake(*, step_delay_ms: float, **settings: Any) -> dict[str, Any]:
    """Return settings of an application whose engines are scripted and have room for any crowd of these tests."""
    engine = {"executor": "fake", "max_num_seqs": 256, "fake": {"step_delay_ms": step_delay_ms}}
    return {"engine": engine, "engine_num_cpus": 0.1, "ingress_num_cpus": 0.1, **settings}


def replicas(server: Server, role: str) -> list[int]:
    """Return the process ids of the replicas of one deployment, in no order of age."""
    return [pid for pid in members_of(server.process.pid) if f"ray::ServeReplica:{role}" in command_of(pid)]


def engine_pid(server: Server, name: str) -> int:
    """Find the process of an engine replica by the name it has in `/activity` and `/metrics`: it holds its log file
    open."""
    log = f"/replica_{ENGINE.replace(':', '_')}_{name}.log"
    (found,) = (pid for pid in replicas(server, ENGINE) if any(file.endswith(log) for file in _open_files(pid)))
    return found


def _open_files(pid: int) -> list[str]:
    files = []
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):  # closed meanwhile
            files.append(os.readlink(entry))
    return files


def command_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
    except OSError:  # ended meanwhile
        return ""


def kill(pid: int, signum: int = signal.SIGKILL) -> None:
    os.kill(pid, signum)


def completion(i: int, max_tokens: int) -> dict[str, Any]:
    """Return the i-th request of a crowd: half of them are greedy, half are sampled with a seed of their own."""
    sampling = {"temperature": 0} if i % 2 else {"temperature": 0.8, "seed": i}
    prompt = f"Story {i}: " + "once upon a time " * (i % 5)
    return {"model": MODEL, "prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, **sampling}


def completions(count: int, max_tokens: int) -> list[dict[str, Any]]:
    return [completion(i, max_tokens) for i in range(count)]


async def undisturbed(bodies: Sequence[dict[str, Any]]) -> list[Answer]:
    """Return what a scripted engine in this process answers, without Ray: answers depend on the request alone."""
    engine = build_engine(MODEL, EngineConfig(executor="fake"))
    model = ServedModel(id=MODEL, max_model_len=engine.config.max_model_len, created=0)
    app = create_app(LocalClient(engine), Tokenizer.byte_level(), model)
    try:
        answers = [await whole_answer(app, body) for body in bodies]
    finally:
        engine.shutdown()
    return [
        (a["choices"][0]["text"], a["choices"][0]["finish_reason"], a["usage"]["completion_tokens"]) for a in answers
    ]


async def whole_answer(app: ASGIApp, body: dict[str, Any]) -> Any:
    exchange = Exchange(app, "POST", "/v1/completions", json.dumps(body).encode())
    await exchange.task  # for as long as it takes
    return (await exchange.finish()).json


def check_undisturbed(streams: Sequence[Stream], expected: Sequence[Answer]) -> None:
    """Check that no stream failed, and that none has a token missing, added or changed."""
    assert [stream.fault for stream in streams] == [None] * len(streams)
    assert [stream.answer for stream in streams] == list(expected)


async def loads(server: Server) -> list[dict[str, Any]]:
    """Return each engine's load. While a replica is being replaced there may be no answer, which gives an empty
    list."""
    async with httpx.AsyncClient() as client:
        try:
            response = await client.get(f"{server.url}/load", timeout=15)
        except httpx.HTTPError:
            return []
    return list(response.json()["engines"]) if response.status_code == 200 else []


def live(engines: Sequence[dict[str, Any]]) -> int:
    return sum(engine["num_running"] + engine["num_waiting"] for engine in engines)


def held(engines: Sequence[dict[str, Any]]) -> tuple[int, int]:
    """Count the requests, and the blocks that they hold."""
    return live(engines), sum(engine["num_held_blocks"] for engine in engines)


async def until_free(server: Server, num_engines: int, timeout_s: float = 60) -> float:
    """Wait until that many engines answer and none holds anything; return how many seconds it took."""
    begin = time.monotonic()
    while True:
        engines = await loads(server)
        if len(engines) == num_engines and held(engines) == (0, 0):
            return time.monotonic() - begin
        assert time.monotonic() - begin < timeout_s, f"after {timeout_s} s: {engines}"
        await asyncio.sleep(0.05)


async def until_replicas(server: Server, role: str, count: int, timeout_s: float = 90) -> list[int]:
    async with asyncio.timeout(timeout_s):
        while len(pids := replicas(server, role)) != count:
            await asyncio.sleep(0.1)
    return pids

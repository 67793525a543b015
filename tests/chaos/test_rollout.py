"""Owns the promise that a changed config, deployed while streams run, breaks neither them nor new ones, tells streams
longer than the drain timeout of their end, and lets no answer be of two models.
Never says how long a roll-out takes."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from loadtest.server import ROOT, SERVE, Server
from tests.chaos.support import (
    ENGINE,
    INGRESS,
    check_undisturbed,
    completions,
    fake,
    replicas,
    undisturbed,
    until_free,
    until_replicas,
)
from tests.support.serve_process import serve_run
from tests.support.streams import Crowd, Stream, begun, read_all

pytestmark = [pytest.mark.anyio, pytest.mark.chaos]

SETTINGS = fake(step_delay_ms=100, engine_replicas=2, ingress_replicas=2)
NUM_TOKENS = 150


@pytest.fixture(scope="module", params=["HAProxy", "Python proxy"])
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    env = {"RAY_SERVE_ENABLE_HA_PROXY": "1" if request.param == "HAProxy" else "0"}
    with serve_run(SETTINGS, env=env) as started:
        yield started


def deploy(server: Server, directory: Path, settings: dict[str, Any]) -> None:
    """Deploy as a user does: change config.yaml, and call `serve deploy`."""
    config = yaml.safe_load((ROOT / "config.yaml").read_text())
    config["http_options"]["port"] = int(server.url.rpartition(":")[2])
    config["applications"][0]["args"].update(settings)
    path = directory / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    dashboard = re.search(r"dashboard at \S*?(http://[\d.:]+)", server.output)
    assert dashboard, server.output
    # `serve run` asks for the Ray token that it made; other commands send it only when they are told to.
    env = {**os.environ, "RAY_AUTH_MODE": "token"}
    subprocess.run([SERVE, "deploy", "--address", dashboard[1], str(path)], check=True, timeout=60, env=env)


async def trickle(server: Server, stop: asyncio.Event) -> list[Stream]:
    """Ask for short streams, one after another."""
    streams = []
    while not stop.is_set():
        streams += await read_all(server.url, completions(1, 5))
    return streams


async def check_roll_out(server: Server, directory: Path, settings: dict[str, Any], num_engines: int) -> None:
    """Deploy in the middle of streams, and wait for the new state; neither running nor new streams may notice."""
    bodies = completions(40, NUM_TOKENS)
    crowd = Crowd(server.url, bodies)
    crowd.start()
    await crowd.until(begun)
    stop = asyncio.Event()
    newcomers = asyncio.ensure_future(trickle(server, stop))
    await asyncio.to_thread(deploy, server, directory, settings)
    check_undisturbed(await crowd.finish(), await undisturbed(bodies))
    await until_replicas(server, ENGINE, num_engines)
    stop.set()
    short = await newcomers
    print(f"{len(short)} short streams meanwhile")
    check_undisturbed(short, await undisturbed(completions(1, 5)) * len(short))
    await until_free(server, num_engines)


async def test_a_rolling_redeploy_breaks_no_stream(server: Server, tmp_path: Path) -> None:
    before = {*replicas(server, ENGINE), *replicas(server, INGRESS)}
    changed = SETTINGS | {"engine": SETTINGS["engine"] | {"max_num_seqs": 200}}
    await check_roll_out(server, tmp_path, changed, 2)
    async with asyncio.timeout(60):
        while before & {*replicas(server, ENGINE), *replicas(server, INGRESS)}:
            await asyncio.sleep(0.2)
    assert len(await until_replicas(server, INGRESS, 2)) == 2


async def test_a_scale_down_breaks_no_stream(server: Server, tmp_path: Path) -> None:
    changed = SETTINGS | {"engine": SETTINGS["engine"] | {"max_num_seqs": 200}, "engine_replicas": 1}
    await check_roll_out(server, tmp_path, changed, 1)


async def test_a_stream_longer_than_the_drain_timeout_ends_with_an_error_frame(server: Server, tmp_path: Path) -> None:
    """Its ingress replica goes, and its connection with it: Serve used to kill the process in the middle of it."""
    short = SETTINGS | {"drain_timeout_s": 3}
    before = {*replicas(server, INGRESS)}
    await asyncio.to_thread(deploy, server, tmp_path, short)
    async with asyncio.timeout(60):
        while before & {*replicas(server, INGRESS)}:
            await asyncio.sleep(0.2)
    crowd = Crowd(server.url, completions(8, 1000))
    crowd.start()
    await crowd.until(begun)
    changed = {"engine": SETTINGS["engine"] | {"max_num_seqs": 200}, "max_body_bytes": 2**20}
    await asyncio.to_thread(deploy, server, tmp_path, short | changed)
    streams = await crowd.finish()
    assert [(stream.broken, stream.done) for stream in streams] == [(None, True)] * len(streams)
    assert {stream.error and stream.error["code"] for stream in streams} == {"draining"}


async def test_no_answer_is_of_two_models(tmp_path: Path) -> None:
    """Regression: streams continued on the new model, and each version of the ingress used both."""

    def settings(reply: str) -> dict[str, Any]:
        engine = SETTINGS["engine"] | {"fake": {"step_delay_ms": 100, "reply": reply * 4000}}
        return SETTINGS | {"engine": engine, "drain_timeout_s": 2}

    with serve_run(settings("a")) as server:
        crowd = Crowd(server.url, completions(20, 400))  # longer than engines are left for their streams
        crowd.start()
        await crowd.until(begun)
        stop, old = asyncio.Event(), {*replicas(server, ENGINE), *replicas(server, INGRESS)}
        newcomers = asyncio.ensure_future(trickle(server, stop))
        await asyncio.to_thread(deploy, server, tmp_path, settings("b"))
        streams = await crowd.finish()
        async with asyncio.timeout(90):
            while old & {*replicas(server, ENGINE), *replicas(server, INGRESS)}:
                await asyncio.sleep(0.2)
        await until_replicas(server, ENGINE, 2)
        await until_replicas(server, INGRESS, 2)
        stop.set()
        short = await newcomers
        assert {stream.text[:1] for stream in streams} <= {"a", "b"}
        for stream in (*streams, *short):
            assert len(set(stream.text)) <= 1
        after = await read_all(server.url, completions(4, 5))
        check_undisturbed(after, [("bbbbb", "length", 5)] * 4)

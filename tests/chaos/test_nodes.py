"""Owns the promise that the end of a node, announced or not, breaks no stream, over a cluster of two raylets.
Never asserts where Serve puts replicas; the cluster has room for one engine on each node."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from loadtest.server import ROOT, SERVE, Server, ended, free_port
from tests.chaos.support import check_undisturbed, completions, fake, live, loads, undisturbed, until_free
from tests.support.streams import Crowd, begun, read_all

pytestmark = [pytest.mark.anyio, pytest.mark.chaos]


@dataclass(frozen=True, slots=True)
class TwoNodes:
    """A cluster that takes orders; see two_nodes."""

    process: subprocess.Popen[str]

    def order(self, text: str) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write(text + "\n")
        self.process.stdin.flush()
        return self.answer()

    def answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("{"):
                return dict(json.loads(line))
        raise AssertionError(f"the cluster ended with {self.process.wait()}")


def config_for_two_nodes(port: int) -> dict[str, Any]:
    """Return a config in which an engine fills a node and the ingress is on the node that stays."""
    config: dict[str, Any] = yaml.safe_load((ROOT / "config.yaml").read_text())
    config["http_options"]["port"] = port
    settings = fake(step_delay_ms=100, engine_replicas=2, max_migrations=5) | {"engine_num_cpus": 1}
    (application,) = config["applications"]
    application["args"].update(settings)
    application["deployments"] = [
        {"name": "Ingress", "ray_actor_options": {"num_cpus": 0, "resources": {"head": 0.01}}}
    ]
    return config


@pytest.fixture
def two_nodes() -> Iterator[tuple[TwoNodes, Server]]:
    temp = Path(tempfile.mkdtemp(prefix="cs", dir="/tmp"))  # a short path, because Ray's sockets are below it
    env = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0", "RAY_TMPDIR": str(temp)}
    session: dict[str, Any] = {"start_new_session": True, "env": env, "cwd": ROOT}
    port = free_port()
    (temp / "config.yaml").write_text(yaml.safe_dump(config_for_two_nodes(port)))
    log = temp / "serve.log"
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    cluster = subprocess.Popen([sys.executable, "-m", "tests.chaos.two_nodes"], **session, **pipes)
    try:
        with ended(cluster), log.open("wb") as output:
            nodes = TwoNodes(cluster)
            command = [SERVE, "run", "--address", nodes.answer()["address"], str(temp / "config.yaml")]
            serve = subprocess.Popen(command, **session, stdout=output, stderr=subprocess.STDOUT)
            with ended(serve):
                server = Server(serve, port, log)
                server.wait_until_ready()
                yield nodes, server
    finally:
        for pipe in (cluster.stdin, cluster.stdout):
            assert pipe is not None
            pipe.close()
        shutil.rmtree(temp, ignore_errors=True)


async def test_streams_of_a_node_that_drains_and_then_ends_go_on(two_nodes: tuple[TwoNodes, Server]) -> None:
    nodes, server = two_nodes
    await until_free(server, 2)
    bodies = completions(30, 200)
    crowd = Crowd(server.url, bodies)
    crowd.start()
    await crowd.until(begun)
    assert [bool(live([engine])) for engine in await loads(server)] == [True, True]
    assert (await asyncio.to_thread(nodes.order, "drain 60"))["accepted"]
    await crowd.until(lambda stream: stream.num_frames > 80)
    assert crowd.num_live == len(bodies), "nothing is cut while the node drains"
    assert (await asyncio.to_thread(nodes.order, "remove"))["removed"]
    check_undisturbed(await crowd.finish(), await undisturbed(bodies))
    check_undisturbed(await read_all(server.url, bodies[:4]), await undisturbed(bodies[:4]))


async def test_streams_of_a_node_that_is_lost_without_a_word_go_on(two_nodes: tuple[TwoNodes, Server]) -> None:
    nodes, server = two_nodes
    await until_free(server, 2)
    bodies = completions(30, 200)
    crowd = Crowd(server.url, bodies)
    crowd.start()
    await crowd.until(begun)
    assert [bool(live([engine])) for engine in await loads(server)] == [True, True]
    assert (await asyncio.to_thread(nodes.order, "remove"))["removed"]
    check_undisturbed(await crowd.finish(), await undisturbed(bodies))
    check_undisturbed(await read_all(server.url, bodies[:4]), await undisturbed(bodies[:4]))

"""Engine replicas that follow the load, in a server as a user would configure it.
Never says how fast: only that all requests are answered on the way up and down."""

from __future__ import annotations

import asyncio
import re

import httpx
import pytest
import yaml

from loadtest.server import ROOT, Server
from tests.chaos.support import (
    ENGINE,
    check_undisturbed,
    completions,
    fake,
    replicas,
    undisturbed,
    until_free,
    until_replicas,
)
from tests.support.serve_process import serve_run
from tests.support.streams import Stream, read_all, read_stream

pytestmark = [pytest.mark.anyio, pytest.mark.chaos]

PAGE = (ROOT / "docs" / "how-to" / "autoscaling.md").read_text()
(EXAMPLE,) = re.findall(r"```yaml\n# .*\n(autoscaling:.*?)```", PAGE, re.DOTALL)
# Settings as the page has them, but quick: nobody runs a test that waits for five quiet minutes.
SCALING = yaml.safe_load(EXAMPLE)["autoscaling"] | {
    "upscale_delay_s": 1,
    "downscale_delay_s": 3,
    "downscale_step": 0.5,
    "startup_time_s": 0,
}
NUM_CLIENTS = 12


async def keep_asking(server: Server, client: int, stop: asyncio.Event) -> list[Stream]:
    """Send one request after the other until `stop` is set; read the last one to its end."""
    streams: list[Stream] = []
    for body in completions(100_000, max_tokens=40)[client::NUM_CLIENTS]:
        if stop.is_set():
            break
        streams.append(Stream())
        await read_stream(server.url, body, streams[-1])
    return streams


async def test_engines_go_from_one_to_three_and_back_under_load_and_no_request_fails() -> None:
    settings = fake(step_delay_ms=20, autoscaling=SCALING)
    settings["engine"]["max_num_seqs"] = 4  # three engines seat all clients; at the utilization that is aimed for: two
    with serve_run(settings) as server:
        stop = asyncio.Event()
        clients = [asyncio.create_task(keep_asking(server, client, stop)) for client in range(NUM_CLIENTS)]
        await until_replicas(server, ENGINE, 3, timeout_s=150)
        stop.set()
        crowd = [stream for streams in await asyncio.gather(*clients) for stream in streams]
        few = asyncio.Event()
        lonely = asyncio.create_task(keep_asking(server, 0, few))  # the fleet shrinks while one client continues
        await until_replicas(server, ENGINE, 1, timeout_s=150)
        few.set()
        crowd += await lonely
        await until_free(server, 1)
    assert [stream.fault for stream in crowd if stream.fault] == []
    assert len(crowd) > NUM_CLIENTS


async def test_the_last_engine_goes_when_nothing_is_asked_for_and_a_request_waits_for_the_next() -> None:
    quick = SCALING | {"min_replicas": 0, "downscale_to_zero_delay_s": 3}
    with serve_run(fake(step_delay_ms=5, autoscaling=quick)) as server:
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
            for _ in range(2):
                await until_replicas(server, ENGINE, 0, timeout_s=150)
                for _ in range(30):  # which a load balancer asks
                    assert (await client.get("/health")).status_code == 200
                    await asyncio.sleep(0.2)
                assert replicas(server, ENGINE) == []
                bodies = completions(5, 20)
                check_undisturbed(await read_all(server.url, bodies), await undisturbed(bodies))

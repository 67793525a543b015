"""Owns the promise that no client harms another: those that storm in and out, and those that do not read.
Never measures speed."""

from __future__ import annotations

import asyncio
import random
import socket
import struct
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from urllib.parse import urlsplit

import pytest

from loadtest.server import Server
from tests.chaos.support import check_undisturbed, completion, completions, fake, undisturbed, until_free
from tests.support.serve_process import serve_run
from tests.support.streams import Stream, connect, follow, read_all, request_bytes

pytestmark = [pytest.mark.anyio, pytest.mark.chaos]

STORM_CLIENTS, STORM_AT_A_TIME = 1000, 100
RESET = struct.pack("ii", 1, 0)  # SO_LINGER: close sends a reset
NUM_SLOW = 3
SLOW_TOKENS = 3000
"""Buffers on the way may hold a whole answer; the tests of the channel cover one that does not fit."""


# --- clients that come and go ----------------------------------------------------------------------------------------


async def come_and_go(server: Server, i: int) -> str:
    """Connect, get as far as chance decides, and leave by a reset or in good order; return how far this client was to
    go."""
    rng = random.Random(i)
    body = completion(i, rng.choice([3, 300]))
    request = request_bytes(server.url, body | {"stream": rng.random() < 0.7})
    act = rng.choice(["connects", "sends half a request", "asks", "asks", "waits a moment", "waits a moment", "reads"])
    reader, writer = await connect(server.url)
    with suppress(ConnectionError):
        if act == "sends half a request":
            request = request[: rng.randrange(1, len(request))]
        if act != "connects":
            writer.write(request)
            await writer.drain()
        if act == "waits a moment":
            await asyncio.sleep(rng.expovariate(10))
        if act == "reads":
            await reader.read(rng.choice([1, 1000, 10000]))
    if rng.random() < 0.5:
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
    writer.close()
    return act


async def test_a_thousand_clients_that_storm_in_and_out_leave_nothing_behind(server: Server) -> None:
    places = asyncio.Semaphore(STORM_AT_A_TIME)

    async def one(i: int) -> str:
        async with places:
            return await come_and_go(server, i)

    acts = await asyncio.gather(*(one(i) for i in range(STORM_CLIENTS)))
    assert len(set(acts)) == 5
    took_s = await until_free(server, 3)
    print(f"{STORM_CLIENTS} clients came and went; engines were free {took_s:.2f} s after the last")
    bodies = completions(6, 20)
    check_undisturbed(await read_all(server.url, bodies), await undisturbed(bodies))


# --- clients that do not read ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["HAProxy", "Python proxy"])
def fast_server(request: pytest.FixtureRequest) -> Iterator[Server]:
    """An engine that answers faster than anybody reads."""
    env = {"RAY_SERVE_ENABLE_HA_PROXY": "1" if request.param == "HAProxy" else "0"}
    with serve_run(fake(step_delay_ms=0, max_unread_tokens=200), env=env) as server:
        yield server


def connect_slowly(url: str) -> socket.socket:
    """Open a connection whose own buffer is as small as it can be."""
    parts = urlsplit(url)
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
    sock.connect((parts.hostname, parts.port))
    return sock


async def test_clients_that_do_not_read_hold_up_nobody_and_hold_nothing_for_ever(fast_server: Server) -> None:
    """These clients get what they ask for or an error, but never an answer with a hole."""
    slow_body = completion(1, SLOW_TOKENS) | {"logprobs": 5}
    others = completions(8, 100)
    with ExitStack() as stack:
        slow = [stack.enter_context(connect_slowly(fast_server.url)) for _ in range(NUM_SLOW)]
        for sock in slow:
            sock.sendall(request_bytes(fast_server.url, slow_body))
        check_undisturbed(await read_all(fast_server.url, others), await undisturbed(others))
        await until_free(fast_server, 1)  # while they still do not read
        (expected,) = await undisturbed([slow_body])
        for sock in slow:
            stream = Stream()
            reader, writer = await asyncio.open_connection(sock=sock.dup())
            try:
                await follow(reader, stream)
            except (OSError, EOFError) as error:
                stream.broken = repr(error)
            writer.close()
            print(f"of {SLOW_TOKENS} tokens {len(stream.text)} came: {stream.fault}")
            assert stream.answer == expected if stream.fault is None else expected[0].startswith(stream.text)

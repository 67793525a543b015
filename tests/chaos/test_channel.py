"""Owns the promise that streams outlive the token channel: its connections are cut while tokens flow.
Never needs privileges: a process may take over a socket of its own child, and shut it down."""

from __future__ import annotations

import asyncio
import socket

import pytest

from loadtest.server import Server
from tests.chaos.hangs import borrowed, channel_sockets
from tests.chaos.support import INGRESS, check_undisturbed, completions, replicas, undisturbed
from tests.support.streams import Crowd, begun

pytestmark = [pytest.mark.anyio, pytest.mark.chaos]

CUT_INTERVAL_S = 1.0


def shut(pid: int, fd: int) -> None:
    """Shut down a connection that another process is using."""
    with borrowed(pid, fd) as connection:
        connection.shutdown(socket.SHUT_RDWR)


async def test_streams_are_whole_when_the_channel_is_cut_again_and_again(server: Server) -> None:
    bodies = completions(40, 100)
    crowd = Crowd(server.url, bodies)
    crowd.start()
    await crowd.until(begun)
    num_cut = 0
    while crowd.num_live:
        for pid in replicas(server, INGRESS):
            for *_, fd in channel_sockets(pid)[1]:
                shut(pid, fd)
                num_cut += 1
        await asyncio.sleep(CUT_INTERVAL_S)
    check_undisturbed(await crowd.finish(), await undisturbed(bodies))
    print(f"{num_cut} connections of the channel cut")
    assert num_cut >= 6

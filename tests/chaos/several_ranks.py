"""Owns what chaos tests of engines over several ranks share: who leads, who follows, and streams that outlive either.
Never starts a server: each kind of ranks has its own, of two engines of two ranks."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from loadtest.server import Server
from tests.chaos.support import ENGINE, check_undisturbed, command_of, kill, loads, replicas
from tests.support.serve_process import members_of
from tests.support.streams import Crowd, read_all

ENGINES, RANKS = 2, 2


def leaders(server: Server) -> list[int]:
    return replicas(server, ENGINE)


def followers(server: Server) -> list[int]:
    """Return the ranks that do not lead."""
    return [pid for pid in members_of(server.process.pid) if "ray::Follower" in command_of(pid)]


async def until_all_answer(server: Server) -> None:
    async with asyncio.timeout(180):
        while len(await loads(server)) < ENGINES or len(followers(server)) != ENGINES * (RANKS - 1):
            await asyncio.sleep(0.2)


async def check_streams_outlive_any_rank(server: Server, bodies: Sequence[dict[str, Any]], num_frames: int) -> None:
    """Check that streams are those of an undisturbed run, whichever rank is killed once each has had more than
    `num_frames` frames."""
    await until_all_answer(server)
    undisturbed = [stream.answer for stream in await read_all(server.url, bodies)]
    for victims in (followers, leaders):
        await until_all_answer(server)
        crowd = Crowd(server.url, bodies)
        crowd.start()
        await crowd.until(lambda stream: stream.num_frames > num_frames)
        kill(victims(server)[0])
        check_undisturbed(await crowd.finish(), undisturbed)

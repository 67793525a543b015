"""Contracts of what an ingress replica counts on its way to the engines: each frame, gap and move once.
Never goes through a socket except where it counts frames."""

from __future__ import annotations

import asyncio

import pytest

from engine.protocol import (
    EngineError,
    ErrorCode,
    Event,
    Finished,
    FinishReason,
    SamplingParams,
    Submission,
    Token,
    Usage,
)
from serve_app.channel import migration
from serve_app.channel.frames import Entry, pack
from serve_app.channel.migration import Migration
from serve_app.channel.token_receiver import TokenReceiver, TokenStream
from serve_app.metrics.channel_counts import ChannelCounts
from tests.serve_app.channel.rig import HOST, LONG, rig

pytestmark = pytest.mark.anyio

END = Finished("r", FinishReason.LENGTH, Usage(2, 3, 0))
EVENTS: list[Event] = [*(Token("r", number) for number in range(3)), END]
RAW = [pack(event) for event in EVENTS]
DEAD = EngineError(ErrorCode.ENGINE_DEAD, "gone")


class Attempt:
    """An attempt that gives these events, and then raises."""

    replica_id = "a"

    def __init__(self, events: list[Event], error: EngineError) -> None:
        self._events = events
        self._error = error

    async def take(self) -> list[Event]:
        if not self._events:
            raise self._error
        events, self._events = self._events, []
        return events

    def close(self, *, complete: bool = False) -> None:
        pass


async def move(*attempts: Attempt, max_migrations: int = 2) -> tuple[ChannelCounts, EngineError | None]:
    """Return what was counted while one answer went through these attempts, and how it failed."""
    counts, left = ChannelCounts(), list(attempts)
    asked = Submission("r", (1, 2), SamplingParams(max_tokens=3))
    moving = Migration(max_migrations, 10.0, 256, counts)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(migration, "FIRST_BACKOFF_S", 0)
        try:
            async for _ in moving.stream(asked, lambda rest, avoid: left.pop(0)):
                pass
        except EngineError as error:
            return counts, error
    return counts, None


async def test_an_answer_that_stays_where_it_began_has_not_moved() -> None:
    assert await move(Attempt(EVENTS, DEAD)) == (ChannelCounts(), None)


async def test_each_move_of_an_answer_is_counted() -> None:
    attempts = Attempt([], DEAD), Attempt(EVENTS[:1], DEAD), Attempt(EVENTS[1:], DEAD)
    assert await move(*attempts) == (ChannelCounts(migrations=2), None)


async def test_an_answer_that_lacks_its_last_event_alone_is_complete_without_a_move() -> None:
    assert await move(Attempt(EVENTS[:3], DEAD)) == (ChannelCounts(), None)


async def test_an_answer_that_finds_no_other_engine_has_failed_to_move_once() -> None:
    assert await move(*(Attempt([], DEAD) for _ in range(3))) == (
        ChannelCounts(migrations=2, failed_migrations=1),
        DEAD,
    )
    assert await move(Attempt([], DEAD), max_migrations=0) == (ChannelCounts(failed_migrations=1), DEAD)


async def test_a_failure_of_the_request_itself_is_no_move_that_failed() -> None:
    broken = EngineError(ErrorCode.STEP_FAILED, "broken")
    assert await move(Attempt([], broken)) == (ChannelCounts(), broken)


def test_a_stream_that_loses_frames_is_one_gap_and_one_completion() -> None:
    stream = TokenStream("r", 0, 1000)
    stream.receive(Entry(0, 1, RAW[1:2]))
    stream.receive(Entry(0, 2, RAW[2:3]))
    assert stream.counts == ChannelCounts(gaps=1)
    stream.complete(Entry(0, 0, RAW))
    assert stream.counts == ChannelCounts(gaps=1, completions=1)


def test_a_stream_that_the_channel_brought_to_its_end_counts_nothing() -> None:
    stream = TokenStream("r", 0, 1000)
    stream.receive(Entry(0, 0, RAW))
    stream.complete(Entry(0, 0, RAW))
    assert stream.counts == ChannelCounts()


async def test_every_frame_that_an_ingress_receives_is_counted_in_its_own_counts() -> None:
    async with rig() as engine:
        counts = ChannelCounts()
        receiver = TokenReceiver(HOST, 1000, counts)
        engine._receivers.append(receiver)
        other = engine.receiver()
        call = engine.call(receiver, "a", sampling=LONG)
        await asyncio.gather(call.read_all(), engine.call(other, "b").read_all())
    assert 2 <= counts.frames <= 101 + 1
    assert (counts.gaps, counts.migrations) == (0, 0)

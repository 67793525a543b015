"""Owns the contract of uvicorn under bad requests, once Ray Serve has called our callback. Long: each way to be bad.
Requests are unfinished, oversized or malformed. Never tests HAProxy, which has limits of its own."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import pytest
import uvicorn
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http import auto

from serve_app.edge import http_protocol
from serve_app.edge.cors import VARIABLE, Policy, written
from serve_app.edge.guard import Guard
from serve_app.edge.http_protocol import BoundedHttpProtocol
from serve_app.edge.http_server import guard_ours, guard_shared
from serve_app.edge.limits import MAX_HEAD_BYTES, MAX_HEADERS, MAX_URL_BYTES

GET = b"GET /x HTTP/1.1\r\nHost: a\r\n"
TIMEOUT_S = 20  # only reached on failure
pytestmark = pytest.mark.anyio


PAGE = "https://chat.example.com"
POLICY = Policy("/x", (PAGE,))
OWN = "access-control-allow-origin: " + PAGE


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BoundedHttpProtocol, "cors", ())
    monkeypatch.setattr(auto, "AutoHTTPProtocol", auto.AutoHTTPProtocol)  # restored afterwards
    (middleware,) = guard_ours()
    assert (middleware.cls, middleware.kwargs) == (Guard, {"speaks_for_ray": True, "cors": ()})


async def echo(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer GET at once, POST once the body has come, with it if that is wanted, and `/unread` without it. `/begins`
    begins before the body, and `/waits` waits until it may go on."""
    if scope["type"] == "websocket":
        await send({"type": "websocket.accept"})
        await scope["state"]["may_go_on"].wait()
        await send({"type": "websocket.close"})
        return
    if scope["path"] == "/waits":
        await scope["state"]["may_go_on"].wait()
    if scope["path"] == "/begins":
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"begun", "more_body": True})
    more, body = scope["method"] == "POST" and scope["path"] != "/unread", b""
    while more:
        message = await receive()
        body += message.get("body", b"")
        more = message.get("more_body", False)
    answer = body if scope["state"]["echoes"] else b"ok"
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(answer))]})
    await send({"type": "http.response.body", "body": answer})


@asynccontextmanager
async def serving(
    may_go_on: asyncio.Event | None = None, seen: list[Scope] | None = None, *, echoes: bool = False
) -> AsyncIterator[int]:
    """Yield the port of a server as Ray starts it. `seen`: gets the scopes of its requests. `echoes`: it answers with
    what was posted."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if seen is not None:
            seen.append(scope)
        await echo({**scope, "state": {"may_go_on": may_go_on, "echoes": echoes}}, receive, send)

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        config = uvicorn.Config(app, log_level="critical", lifespan="off", timeout_graceful_shutdown=1)
        server = uvicorn.Server(config)
        task = asyncio.create_task(server.serve(sockets=[listener]))
        try:
            yield listener.getsockname()[1]
        finally:
            server.should_exit = True
            await task


async def said(port: int, *parts: bytes) -> bytes:
    """Return all that the server sends until it closes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        for part in parts:
            writer.write(part)
            await writer.drain()
        return await asyncio.wait_for(reader.read(), TIMEOUT_S)
    finally:
        writer.close()


def check_refused(answer: bytes, status: int, code: str) -> None:
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(f"HTTP/1.1 {status} ".encode())
    assert b"content-type: application/json" in head
    assert json.loads(body)["error"]["code"] == code


@pytest.mark.parametrize(
    "fields",
    [
        b"x-a: " + b"a" * (MAX_HEAD_BYTES + 1) + b"\r\n\r\n",
        b"x-a: b\r\n" * (MAX_HEADERS + 1) + b"\r\n",
        b"x-a: " + b"a" * 1_000_000,
        b"x-a: b\r\n" * 200_000,
    ],
    ids=["bytes", "count", "a value without an end", "headers without an end"],
)
async def test_headers_beyond_the_limits_are_a_431(fields: bytes) -> None:
    """uvicorn has no limits, and kept everything in memory."""
    async with serving() as port:
        check_refused(await first_answer(port, GET + fields), 431, "headers_too_large")


async def first_answer(port: int, data: bytes) -> bytes:
    """Return what a client reads that writes without looking. The connection may end in a reset, because the server
    does not read the rest."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    answer = b""
    try:
        writer.write(data)
        while b"}}" not in answer and (part := await asyncio.wait_for(reader.read(4096), TIMEOUT_S)):
            answer += part
    finally:
        writer.transport.abort()
    return answer


@pytest.mark.parametrize("sent", [b"no request\r\n\r\n", GET + b"x-a: b\r\n" * (MAX_HEADERS + 1) + b"\r\n"])
async def test_a_request_that_is_refused_unread_is_logged(sent: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """The app never sees it. Regression: our parsing dropped uvicorn's warning, the only trace of it in the log."""
    told: list[str] = []
    monkeypatch.setattr(logging.getLogger("uvicorn.error"), "warning", told.append)
    async with serving() as port:
        assert (await first_answer(port, sent)).startswith(b"HTTP/1.1 4")
    assert told == ["Invalid HTTP request received."]


async def test_headers_at_the_limits_are_taken() -> None:
    fields = b"x-a: b\r\n" * (MAX_HEADERS - 2) + b"connection: close\r\n\r\n"
    large = b"x-a: " + b"a" * (MAX_HEAD_BYTES - 100) + b"\r\nconnection: close\r\n\r\n"
    async with serving() as port:
        for sent in (fields, large):
            assert (await said(port, GET + sent)).endswith(b"ok")


CHUNKED = b" HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n"


@pytest.mark.parametrize("path", [b"/x", b"/unread"])
@pytest.mark.parametrize(
    "part", [b"x-a: b\r\n" * 1000, b"x-a: " + b"a" * 5_000 + b"\r\n", b"x" * 8192], ids=["count", "bytes", "no end"]
)
async def test_trailers_beyond_the_limits_end_the_connection(path: bytes, part: bytes) -> None:
    """uvicorn kept all of them in memory, without a key: 50 MB of trailers became 1.5 GB of headers."""
    async with serving() as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"POST " + path + CHUNKED)
        if path == b"/unread":
            await asyncio.wait_for(reader.readuntil(b"ok"), TIMEOUT_S)
        written = 0
        with suppress(ConnectionError):  # the server does not read the rest
            while written < 50_000_000 and not reader.at_eof():
                writer.write(part)
                await writer.drain()
                written += len(part)
        assert written < 20_000_000, "more than the sockets of both ends hold"
        writer.transport.abort()


async def test_a_read_from_one_chunks_size_to_the_nexts_is_not_counted_as_a_trailer() -> None:
    async with serving() as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        size = b"%x\r\n" % (2 * MAX_HEAD_BYTES)
        writer.write(b"POST /x HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n" + size)
        for more in (size, size, b"0\r\n\r\n"):
            assert await said(port, GET + b"connection: close\r\n\r\n") != b"", "the part was read meanwhile"
            writer.write(b"a" * 2 * MAX_HEAD_BYTES + b"\r\n" + more)
        assert (await asyncio.wait_for(reader.readuntil(b"ok"), TIMEOUT_S)).startswith(b"HTTP/1.1 200")
        writer.close()


async def test_trailers_within_the_limits_are_discarded_and_the_connection_goes_on() -> None:
    """uvicorn appended them to the headers of the request that the app was handling."""
    seen: list[Scope] = []
    trailers = b"x-a: " + b"a" * (MAX_HEAD_BYTES - 1000) + b"\r\n" + b"x-b: c\r\n" * 100 + b"\r\n"
    async with serving(seen=seen) as port:
        for middle in (0, 10_000):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            for part in (b"POST /x" + CHUNKED, trailers[:middle], trailers[middle:]):
                writer.write(part)
                await writer.drain()
                assert await said(port, GET + b"connection: close\r\n\r\n") != b"", "the part was read meanwhile"
            assert (await asyncio.wait_for(reader.readuntil(b"ok"), TIMEOUT_S)).startswith(b"HTTP/1.1 200")
            writer.write(GET + b"connection: close\r\n\r\n")
            assert (await asyncio.wait_for(reader.read(), TIMEOUT_S)).endswith(b"ok")
            writer.close()
    names = {name for scope in seen for name, _ in scope["headers"]}
    assert names == {b"host", b"transfer-encoding", b"connection"}


# The head with which Java's own client begins a connection.
JAVAS = (
    b"POST /x HTTP/1.1\r\nConnection: Upgrade, HTTP2-Settings\r\nHost: a\r\n"
    b"HTTP2-Settings: AAEAAEAAAAIAAAABAAMAAABkAAQBAAAAAAUAAEAA\r\nTransfer-Encoding: chunked\r\nUpgrade: h2c\r\n"
    b"User-Agent: Java-http-client/17.0.15\r\nContent-Type: application/json\r\n\r\n"
)
BODY = b"2\r\n{}\r\n0\r\n\r\n"


@pytest.mark.parametrize(
    "parts", [[JAVAS + BODY], [JAVAS, BODY], [JAVAS[:90], JAVAS[90:] + BODY[:4], BODY[4:]]], ids=len
)
async def test_an_offer_of_http2_is_not_taken_and_costs_no_body(parts: list[bytes]) -> None:
    """Regression: Spring AI's and LangChain4j's requests were a 400, since llhttp takes what follows for another
    protocol, and uvicorn let it."""
    seen: list[Scope] = []
    plain = GET.replace(b"GET", b"POST") + b"Content-Length: 2\r\nConnection: close, Upgrade\r\nUpgrade: h2c\r\n\r\n{}"
    async with serving(seen=seen, echoes=True) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for part in parts:
            writer.write(part)
            await writer.drain()
            assert await said(port, GET + b"connection: close\r\n\r\n") != b"", "the part was read meanwhile"
        assert (await asyncio.wait_for(reader.readuntil(b"{}"), TIMEOUT_S)).startswith(b"HTTP/1.1 200")
        writer.write(JAVAS + BODY + plain)
        rest = await asyncio.wait_for(reader.read(), TIMEOUT_S)
        assert rest.count(b"HTTP/1.1 200 OK") == rest.count(b"{}") == 2
        writer.close()
    assert {b"upgrade", b"http2-settings"}.isdisjoint(name for scope in seen for name, _ in scope["headers"])


@pytest.mark.parametrize(
    ("head", "code"),
    [
        (JAVAS.replace(b"/x", b"http://[/x"), "invalid_http"),
        (JAVAS.replace(b"/x", b"/" + b"a" * MAX_URL_BYTES), "url_too_long"),
    ],
)
async def test_an_offer_in_a_bad_head_is_refused_as_any_other(head: bytes, code: str) -> None:
    async with serving() as port:
        check_refused(await first_answer(port, head), 414 if code == "url_too_long" else 400, code)


async def test_a_body_before_a_head_in_the_same_read_is_not_counted_as_one() -> None:
    """A valid pipelined request got a 431."""
    body = b"a" * 40_000
    first = b"POST /x HTTP/1.1\r\nHost: a\r\nContent-Length: 40000\r\n\r\n" + body
    async with serving() as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(first + GET[:8])
        assert (await asyncio.wait_for(reader.readuntil(b"ok"), TIMEOUT_S)).startswith(b"HTTP/1.1 200")
        writer.write(GET[8:] + b"Connection: close\r\n\r\n")
        assert (await asyncio.wait_for(reader.read(), TIMEOUT_S)).startswith(b"HTTP/1.1 200")
        writer.close()


async def test_a_second_head_without_an_end_is_a_431() -> None:
    async with serving() as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(GET + b"\r\n" + GET[:8])
        await asyncio.wait_for(reader.readuntil(b"ok"), TIMEOUT_S)
        writer.write(GET[8:] + b"x-a: " + b"a" * 1_000_000)
        answer = await asyncio.wait_for(reader.readuntil(b"}}"), TIMEOUT_S)
        check_refused(answer, 431, "headers_too_large")
        writer.transport.abort()


async def test_a_url_beyond_the_limit_is_a_414() -> None:
    async with serving() as port:
        check_refused(await said(port, b"GET /" + b"a" * MAX_URL_BYTES + b" HTTP/1.1\r\n\r\n"), 414, "url_too_long")


async def test_what_is_no_http_is_a_400_in_the_apis_shape() -> None:
    async with serving() as port:
        check_refused(await said(port, b"NOT HTTP\r\n\r\n"), 400, "invalid_http")
        check_refused(await said(port, b"GET /\xff HTTP/1.1\r\nHost: a\r\n\r\n"), 400, "invalid_http")


# --- time ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_protocol, "HEAD_TIMEOUT_S", 0.2)
    monkeypatch.setattr(http_protocol, "LINGER_S", 0.2)


@pytest.mark.usefixtures("hurried")
@pytest.mark.parametrize("sent", [b"G", GET, GET + b"x-a: "])
async def test_unfinished_headers_are_a_408_when_their_time_is_over(sent: bytes) -> None:
    async with serving() as port:
        check_refused(await said(port, sent), 408, "request_timeout")


@pytest.mark.usefixtures("hurried")
async def test_a_connection_on_which_nothing_is_sent_is_closed_without_a_word() -> None:
    async with serving() as port:
        assert await said(port) == b""


@pytest.mark.usefixtures("hurried")
async def test_the_time_counts_for_every_request_of_a_connection() -> None:
    async with serving() as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(GET + b"\r\n")
        assert (await asyncio.wait_for(reader.readuntil(b"ok"), TIMEOUT_S)).startswith(b"HTTP/1.1 200")
        writer.write(GET)
        check_refused(await asyncio.wait_for(reader.read(), TIMEOUT_S), 408, "request_timeout")
        writer.close()


@pytest.mark.usefixtures("hurried")
async def test_the_time_counts_for_a_head_that_begins_in_the_read_of_the_request_before() -> None:
    """Such a head had unlimited time, with a byte now and then."""
    async with serving() as port:
        first, _, second = (await said(port, GET + b"\r\nG")).partition(b"ok")
        assert first.startswith(b"HTTP/1.1 200")
        check_refused(second, 408, "request_timeout")


@pytest.mark.usefixtures("hurried")
async def test_the_time_does_not_count_while_the_request_before_is_not_answered() -> None:
    """uvicorn may pause reading meanwhile. The 408 was sent as that request's answer."""
    may_go_on = asyncio.Event()
    async with serving(may_go_on) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /waits HTTP/1.1\r\nHost: a\r\n\r\nG")
        for _ in range(2):
            assert await said(port, b"G") != b"", "meanwhile the time of a head is over"
        may_go_on.set()
        first, _, second = (await asyncio.wait_for(reader.read(), TIMEOUT_S)).partition(b"ok")
        assert first.startswith(b"HTTP/1.1 200")
        check_refused(second, 408, "request_timeout")
        writer.close()


@pytest.mark.parametrize(
    ("request_", "then"),
    [(b"POST /unread HTTP/1.1\r\nHost: a\r\nContent-Length: 10\r\n\r\n", b"a" * 10), (GET + b"\r\n", b"\r\n")],
    ids=["a body behind its answer", "an empty line"],
)
async def test_an_answered_connection_is_closed_whatever_came_last(
    request_: bytes, then: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """uvicorn's keep-alive timer had been stopped, and the connection stayed open for ever."""
    async with serving() as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(request_)
        await asyncio.wait_for(reader.readuntil(b"ok"), TIMEOUT_S)
        monkeypatch.setattr(http_protocol, "LINGER_S", 0.2)
        writer.write(then)
        assert await asyncio.wait_for(reader.read(), TIMEOUT_S) == b""
        writer.close()


@pytest.mark.usefixtures("hurried")
async def test_the_time_ends_where_a_connection_becomes_a_websocket() -> None:
    may_go_on = asyncio.Event()
    upgrade = b"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
    async with serving(may_go_on) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(GET + b"\r\n")
        await asyncio.wait_for(reader.readuntil(b"ok"), TIMEOUT_S)
        writer.write(GET + upgrade + b"Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n")
        await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), TIMEOUT_S)
        for _ in range(2):
            assert await said(port, b"G") != b"", "meanwhile all limits are over"
        may_go_on.set()
        assert await asyncio.wait_for(reader.read(1), TIMEOUT_S) == b"\x88", "the frame that closes"
        writer.close()


@pytest.mark.usefixtures("hurried")
async def test_a_body_that_nobody_reads_does_not_hold_the_connection() -> None:
    async with serving() as port:
        answer = await said(port, b"POST /unread HTTP/1.1\r\nHost: a\r\nContent-Length: 1000000\r\n\r\na")
        assert answer.endswith(b"ok")


@pytest.mark.usefixtures("hurried")
async def test_a_body_has_the_time_that_the_app_gives_it(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving() as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"POST /x HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\nConnection: close\r\n\r\na")
        assert await said(port, b"G") != b"", "meanwhile the time of a head is over"
        writer.write(b"b")
        assert (await asyncio.wait_for(reader.read(), TIMEOUT_S)).endswith(b"ok")
        writer.close()


async def test_a_malformed_body_is_a_400_and_goes_never_into_the_middle_of_an_answer() -> None:
    head = b" HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"
    async with serving() as port:
        check_refused(await said(port, b"POST /x" + head + b"ZZ\r\n"), 400, "invalid_http")
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"POST /begins" + head)
        await asyncio.wait_for(reader.readuntil(b"begun"), TIMEOUT_S)
        writer.write(b"ZZ\r\n")
        assert await asyncio.wait_for(reader.read(), TIMEOUT_S) == b"\r\n", "the end of a chunk, and nothing else"
        writer.close()


def test_beside_others_applications_the_limits_are_the_same() -> None:
    (middleware,) = guard_shared()
    assert middleware.kwargs == {"speaks_for_ray": False, "cors": ()}
    assert auto.AutoHTTPProtocol is http_protocol.BoundedHttpProtocol


# --- what a web page may read -----------------------------------------------------------------------------------------


@pytest.fixture
def of_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, written([POLICY]))
    (middleware,) = guard_ours()
    assert middleware.kwargs["cors"] == (POLICY,)


def asking(line: str, *headers: str) -> bytes:
    return "\r\n".join([f"{line} HTTP/1.1", "Host: a", *headers, "", ""]).encode()


@pytest.mark.usefixtures("of_pages")
@pytest.mark.parametrize(
    ("line", "more", "status"),
    [("GET /x?a=1", "X-A: " + "a" * MAX_HEAD_BYTES, 431), ("GET /x/" + "a" * MAX_URL_BYTES, "X-A: a", 414)],
)
async def test_a_refusal_names_the_page_that_may_read_it(line: str, more: str, status: int) -> None:
    async with serving() as port:
        answer = (await said(port, asking(line, f"Origin: {PAGE}", more))).decode()
    assert answer.startswith(f"HTTP/1.1 {status} ")
    assert OWN in answer
    assert "vary: Origin" in answer


@pytest.mark.usefixtures("of_pages")
@pytest.mark.parametrize(
    ("path", "origin"), [("/x/", PAGE + ".evil.net"), ("/x/", "null"), ("/xx/", PAGE), ("/y/", PAGE)]
)
async def test_no_other_page_and_no_other_path_is_named(path: str, origin: str) -> None:
    async with serving() as port:
        answer = await said(port, asking(f"GET {path}" + "a" * MAX_URL_BYTES, f"Origin: {origin}"))
    assert answer.startswith(b"HTTP/1.1 414 ")
    assert b"access-control" not in answer


@pytest.mark.usefixtures("of_pages")
async def test_a_preflight_that_is_refused_succeeds_so_that_the_page_reads_the_refusal_itself() -> None:
    asked = [f"Origin: {PAGE}", "Access-Control-Request-Method: POST", "Access-Control-Request-Headers: a,b"]
    async with serving() as port:
        answer = (await said(port, asking("OPTIONS /x/" + "a" * MAX_URL_BYTES, *asked))).decode()
    assert answer.startswith("HTTP/1.1 200 OK\r\n")
    assert OWN in answer
    assert "access-control-allow-headers: a,b" in answer

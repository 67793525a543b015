"""Owns the contract of the outermost layer: what it makes of errors that Ray Serve reports, and of those it omits."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from ray.serve.exceptions import RequestCancelledError
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serve_app.api.http.asgi import RequestGuard
from serve_app.edge import guard
from serve_app.edge.cors import Policy
from serve_app.edge.guard import Guard
from tests.serve_app.harness import TIMEOUT_S, Answer, Exchange

JSON = ("content-type", "application/json")
pytestmark = pytest.mark.anyio


def says(status: int, body: bytes, content_type: bytes = b"text/plain; charset=utf-8", *more: bytes) -> ASGIApp:
    """Return an app with this answer. `more`: further parts of the body, which never ends unless the last is b""."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        headers = [(b"content-type", content_type), (b"x-request-id", b"i")]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        for part in (body, *more):
            await send({"type": "http.response.body", "body": part, "more_body": bool(more) and part != b""})

    return app


async def silent(scope: Scope, receive: Receive, send: Send) -> None:
    """Leave a request as Ray's proxy does if the replica ended before it answered."""


async def ask(app: ASGIApp, path: str = "/v1/completions", *headers: tuple[str, str], ours: bool = True) -> Answer:
    return await Exchange(Guard(app, speaks_for_ray=ours), "POST", path, headers=(JSON, *headers)).finish()


@pytest.mark.parametrize("app", [silent, says(500, b"Internal Server Error")])
async def test_a_lost_replica_is_a_503_with_a_retry_after_in_the_apis_shape(app: ASGIApp) -> None:
    """uvicorn said `Internal Server Error`, as plain text."""
    answer = await ask(app)
    assert (answer.status, answer.error["code"], answer.headers["retry-after"]) == (503, "replica_lost", "1")
    assert answer.headers["x-request-id"]


async def test_on_anthropics_routes_the_shape_is_theirs() -> None:
    answer = await ask(silent, "/prefix/v1/messages")
    assert (answer.status, answer.json["type"], answer.json["error"]["type"]) == (503, "error", "overloaded_error")


@pytest.mark.parametrize("error", [asyncio.CancelledError(), RequestCancelledError("r")])
async def test_a_request_that_ray_cancels_at_its_own_time_limit_is_a_408(error: BaseException) -> None:
    async def late(scope: Scope, receive: Receive, send: Send) -> None:
        raise error

    answer = await ask(late)
    assert (answer.status, answer.error["code"]) == (408, "request_timeout")


@pytest.mark.parametrize(
    ("status", "code"),
    [(404, "not_found"), (408, "request_timeout"), (429, "queue_full"), (503, "service_unavailable")],
)
async def test_rays_texts_are_put_in_the_apis_shape(status: int, code: str) -> None:
    answer = await ask(says(status, b"Path '/<script>' not found."))
    assert (answer.status, answer.error["code"]) == (status, code)
    assert "script" not in answer.error["message"]
    assert answer.headers["x-request-id"] == "i"


@pytest.mark.parametrize(
    ("path", "app"),
    [
        ("/v1/completions", says(404, b'{"error": {}}', b"application/json")),
        ("/metrics", says(200, b"a 1", b"text/plain; version=0.0.4")),
        ("/-/healthz", says(503, b"DRAINING")),
        ("/v1/completions", says(200, b"data: 1\n\n", b"text/event-stream", b"")),
    ],
)
async def test_everything_else_passes_as_it_is(path: str, app: ASGIApp) -> None:
    answer, plain = await ask(app, path), await Exchange(app, "POST", path).finish()
    assert (answer.status, answer.headers, answer.parts) == (plain.status, plain.headers, plain.parts)


async def test_an_exception_of_rays_is_a_500_that_shows_nothing_of_it(caplog: pytest.LogCaptureFixture) -> None:
    async def fails(scope: Scope, receive: Receive, send: Send) -> None:
        raise RuntimeError("actor 0af3 at 10.0.0.7")

    answer = await ask(fails)
    assert (answer.status, answer.error["code"]) == (500, "internal_error")
    assert "0af3" not in answer.error["message"]


# --- what a web page may read -----------------------------------------------------------------------------------------

PAGE, OWN = "https://chat.example.com", "access-control-allow-origin"
SOME, ALL = Policy("/", (PAGE,), max_age=7), Policy("/all", ("*",))


async def read_by(origin: str, app: ASGIApp, path: str, method: str = "POST", **headers: str) -> Answer:
    guarded = Guard(app, speaks_for_ray=True, cors=(ALL, SOME))
    named = [("origin", origin), *((name.replace("_", "-"), value) for name, value in headers.items())]
    return await Exchange(guarded, method, path, headers=[JSON, *named]).finish()


@pytest.mark.parametrize(
    ("path", "origin", "allowed", "vary"),
    [
        ("/v1/models", PAGE, PAGE, "Origin"),
        ("/v1/models", PAGE + ".evil.net", None, "Origin"),
        ("/all/v1/models", "https://elsewhere.example", "*", None),
    ],
)
@pytest.mark.parametrize("app", [silent, says(503, b"No capacity.")])
async def test_what_is_said_for_ray_names_the_page_that_may_read_it(
    app: ASGIApp, path: str, origin: str, allowed: str | None, vary: str | None
) -> None:
    """A browser showed a network error, not what was wrong."""
    answer = await read_by(origin, app, path)
    assert (answer.status, answer.headers.get(OWN), answer.headers.get("vary")) == (503, allowed, vary)


async def test_a_preflight_that_no_replica_answers_succeeds_so_that_the_page_reads_the_refusal_itself() -> None:
    asked = {"access_control_request_method": "POST", "access_control_request_headers": "authorization"}
    answer = await read_by(PAGE, says(503, b"No capacity."), "/v1/models", "OPTIONS", **asked)
    assert (answer.status, answer.headers[OWN], answer.headers["access-control-max-age"]) == (200, PAGE, "7")
    assert answer.headers["access-control-allow-headers"] == "authorization"


async def test_the_apps_own_preflight_and_rays_own_paths_stay_as_they_are() -> None:
    asked = {"access_control_request_method": "POST"}
    answer = await read_by(PAGE, says(400, b"{}", b"application/json"), "/v1/models", "OPTIONS", **asked)
    assert (answer.status, answer.headers.get(OWN)) == (400, None)
    assert OWN not in (await read_by(PAGE, silent, "/-/healthz")).headers


# --- streams that were cut -------------------------------------------------------------------------------------------


def cut(part: bytes, content_type: bytes = b"text/event-stream; charset=utf-8") -> ASGIApp:
    return says(200, part, content_type, b"x")


async def test_a_stream_that_was_cut_ends_with_an_error_frame() -> None:
    answer = await ask(cut(b'data: {"choices": []}\n\n'))
    told, end = answer.parts[-1].decode().split("\n\n")[:2]
    assert json.loads(told.removeprefix("data: "))["error"]["code"] == "replica_lost"
    assert end == "data: [DONE]"


async def test_a_stream_that_ray_ends_at_its_own_time_limit_ends_with_an_error_frame() -> None:
    async def late(scope: Scope, receive: Receive, send: Send) -> None:
        await cut(b"data: 1\n\n")(scope, receive, send)
        raise RequestCancelledError("r")

    assert b'"request_timeout"' in (await ask(late)).parts[-1]


async def test_a_cut_stream_of_anthropics_ends_with_their_error_event() -> None:
    event, data = (await ask(cut(b"event: ping\n\n"), "/v1/messages")).parts[-1].decode().splitlines()[:2]
    assert event == "event: error"
    assert json.loads(data.removeprefix("data: "))["error"]["type"] == "overloaded_error"


async def test_a_cut_response_ends_with_an_error_event_that_has_the_next_number() -> None:
    before = b'event: a\ndata: {"type":"a","sequence_number":7}\n\n'
    app = says(200, before, b"text/event-stream", b'event: b\ndata: {"sequence_number":8}\n\n')
    event, data = (await ask(app, "/v1/responses")).parts[-1].decode().splitlines()[:2]
    told: dict[str, Any] = json.loads(data.removeprefix("data: "))
    assert (event, told["type"], told["sequence_number"], told["code"]) == ("event: error", "error", 9, "replica_lost")


async def test_a_whole_answer_that_was_cut_is_left_unfinished() -> None:
    """The server then closes the connection. JSON followed by an error would be neither."""
    assert (await ask(cut(b'{"id": ', b"application/json"))).parts == [b'{"id": ', b"x"]


def stalling(app: ASGIApp) -> tuple[ASGIApp, list[Message]]:
    """Return the app on a server whose client takes the start and one part of an answer, and what the client took."""
    taken: list[Message] = []

    async def on_a_full_socket(scope: Scope, receive: Receive, send: Send) -> None:
        async def drain(message: Message) -> None:
            taken.append(message)
            if len(taken) > 2:
                await asyncio.Event().wait()

        await app(scope, receive, drain)

    return on_a_full_socket, taken


@pytest.mark.parametrize("copied", [False, True])
async def test_a_client_that_the_ingress_gave_up_is_told_nothing(copied: bool) -> None:
    """It was told of a lost replica, by a send that waited for it without limit."""
    ingress = RequestGuard(says(200, b"data: 1\n\n", b"text/event-stream", b"data: 2\n\n", b""), stall_timeout_s=0.02)

    async def ray(scope: Scope, receive: Receive, send: Send) -> None:
        await ingress({**scope} if copied else scope, receive, send)

    app, taken = stalling(Guard(ray, speaks_for_ray=True))
    await asyncio.wait_for(Exchange(app, "POST", "/v1/completions").task, TIMEOUT_S)
    assert [message.get("body") for message in taken] == [None, b"data: 1\n\n", b"data: 2\n\n"]


@pytest.mark.parametrize("failure", [None, RuntimeError("r"), RequestCancelledError("r")])
async def test_the_last_frame_waits_for_its_client_with_a_limit(
    failure: Exception | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guard, "LAST_WORD_S", 0.02)

    async def breaks_off(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]})
        await send({"type": "http.response.body", "body": b"data: 1\n\n", "more_body": True})
        if failure is not None:
            raise failure

    app, taken = stalling(Guard(breaks_off, speaks_for_ray=True))
    await asyncio.wait_for(Exchange(app, "POST", "/v1/completions").task, TIMEOUT_S)
    assert b"[DONE]" in taken[2]["body"], "it was tried"


async def test_a_task_that_is_cancelled_from_outside_stays_cancelled() -> None:
    begun = asyncio.Event()

    async def waits(scope: Scope, receive: Receive, send: Send) -> None:
        begun.set()
        await asyncio.Event().wait()

    exchange = Exchange(Guard(waits, speaks_for_ray=True), "GET", "/health")
    await begun.wait()
    exchange.task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await exchange.task


async def test_beside_others_applications_their_texts_and_silences_stay() -> None:
    answer = await ask(says(404, b"nothing here"), ours=False)
    assert answer.parts == [b"nothing here"]
    exchange = Exchange(Guard(silent, speaks_for_ray=False), "GET", "/x")
    await exchange.task
    assert exchange.silent


# --- headers that Ray reads ------------------------------------------------------------------------------------------


async def seen_by_ray(*headers: tuple[str, str]) -> list[tuple[bytes, bytes]]:
    seen: list[tuple[bytes, bytes]] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        seen.extend(scope["headers"])
        await says(200, b"")(scope, receive, send)

    await ask(app, "/health", *headers)
    return [(name, value) for name, value in seen if name != b"content-type"]


@pytest.mark.parametrize("given", ["a b<script>", "x" * 5000, "", "a\tb", "é"])
async def test_a_request_id_that_is_not_well_formed_never_reaches_ray(given: str) -> None:
    assert await seen_by_ray(("X-Request-Id", given), ("X-A", "1")) == [(b"x-a", b"1")]


async def test_of_two_request_ids_none_is_believed() -> None:
    assert await seen_by_ray(("X-Request-Id", "a"), ("X-Request-Id", "b")) == []


async def test_a_well_formed_request_id_is_kept() -> None:
    assert await seen_by_ray(("X-Request-Id", "a.b:c-1_" * 16)) == [(b"x-request-id", b"a.b:c-1_" * 16)]


@pytest.mark.parametrize("name", ["X-Session-ID", "X_Session_ID", "X-Request-Timeout-Seconds", "traceparent"])
async def test_a_header_that_ray_would_fail_to_decode_is_a_400_that_names_it(name: str) -> None:
    """Ray decodes these as UTF-8, and its exception became a plain-text 500."""

    async def send_latin(scope: Scope, receive: Receive, send: Send) -> None:
        headers = [(name.lower().encode(), b"\xff")]
        await Guard(silent, speaks_for_ray=True)({**scope, "headers": headers}, receive, send)

    answer = await Exchange(send_latin, "GET", "/health").finish()
    assert (answer.status, answer.error["param"]) == (400, name.lower())


async def test_what_is_no_http_request_passes() -> None:
    passed: list[Message] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        passed.append(dict(scope))

    async def never(*_: Any) -> Any:
        raise AssertionError

    await Guard(app, speaks_for_ray=True)({"type": "lifespan"}, never, never)
    assert passed == [{"type": "lifespan"}]

"""Owns the promise that a web page that may use the API can read HAProxy's own refusals, and no other page can.
Never fakes HAProxy: a real one runs with the configuration that Ray Serve writes."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from serve_app.edge.cors import EXPOSED, VARIABLE, Policy, written
from serve_app.edge.limits import MAX_HEAD_BYTES, MAX_URL_BYTES
from tests.serve_app.edge.test_haproxy import PREFIX, launched, whole, written_by_ray

PAGE, LOCAL, OTHER = "https://chat.example.com", "http://localhost:3000", "https://chat.example.com.evil.net"
ORIGIN = "access-control-allow-origin"
SEVERAL = Policy(PREFIX, (PAGE,), r"http://(localhost|127\.0\.0\.1)(:[0-9]{1,5})?|https://it's \"quoted\"", 7)
LARGE, LONG = {"x-a": "a" * (MAX_HEAD_BYTES + 1)}, "a" * MAX_URL_BYTES


@pytest.fixture(scope="module")
def front(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """Run HAProxy for two applications: one that some pages may use, and one without a replica, which all may use."""
    policies = written([SEVERAL, Policy("/gone", ("*",))])
    with (
        written_by_ray(tmp_path_factory.mktemp("hap")) as (config, port),
        launched(config, port, **{VARIABLE: policies}),
    ):
        yield port


def ask(
    port: int, path: str, origin: str | None, method: str = "GET", headers: dict[str, str] | None = None
) -> httpx.Response:
    named = (headers or {}) | ({} if origin is None else {"origin": origin})
    return httpx.request(method, f"http://127.0.0.1:{port}{path}", headers=named, timeout=20)


@pytest.mark.parametrize(
    ("path", "headers", "status"),
    [
        (f"{PREFIX}/x", LARGE, 431),
        (f"{PREFIX}/{LONG}", {}, 414),
        (f"{PREFIX}/dies", {}, 503),
    ],
)
def test_a_refusal_names_the_page_that_may_read_it(front: int, path: str, headers: dict[str, str], status: int) -> None:
    """A browser showed a network error, not what was wrong."""
    answer = ask(front, path, PAGE, headers=headers)
    assert (answer.status_code, answer.headers[ORIGIN], answer.headers["vary"]) == (status, PAGE, "Origin")
    assert answer.headers["access-control-expose-headers"] == ", ".join(EXPOSED)
    assert answer.json()["error"]["code"]


def test_a_body_that_stalls_is_a_408_for_the_page(front: int) -> None:
    with socket.create_connection(("127.0.0.1", front), timeout=60) as client:
        head = f"POST {PREFIX}/x HTTP/1.1\r\nHost: a\r\nOrigin: {PAGE}\r\nContent-Length: 20000\r\n\r\na"
        client.sendall(head.encode())
        told, _, body = whole(client).partition(b"\r\n\r\n")
    assert told.startswith(b"HTTP/1.1 408 ")
    assert f"{ORIGIN}: {PAGE}".encode() in told
    assert json.loads(body)["error"]["code"] == "request_timeout"


@pytest.mark.parametrize(
    ("path", "origin", "allowed"),
    [
        (f"{PREFIX}/dies", LOCAL, LOCAL),
        (f"{PREFIX}/dies", OTHER, None),
        (f"{PREFIX}/dies", LOCAL + ".evil.net", None),
        (f"{PREFIX}/dies", "null", None),
        (f"{PREFIX}/dies", "*", None),
        (f"{PREFIX}/dies", None, None),
        ("/gone", OTHER, "*"),
        ("/gone/v1/models", OTHER, "*"),
        ("/gone", None, None),
        ("/gonewest", PAGE, None),
        ("/elsewhere", PAGE, None),
        ("/-/routes", PAGE, None),
    ],
)
def test_the_policy_is_that_of_the_application_at_the_path(
    front: int, path: str, origin: str | None, allowed: str | None
) -> None:
    assert ask(front, path, origin).headers.get(ORIGIN) == allowed


@pytest.mark.parametrize("origin", [PAGE, OTHER, None])
def test_a_refusal_that_differs_by_page_says_so_to_caches(front: int, origin: str | None) -> None:
    assert ask(front, f"{PREFIX}/dies", origin).headers["vary"] == "Origin"


def test_what_a_replica_answers_stays_as_it_is(front: int) -> None:
    answer = ask(front, f"{PREFIX}/x", PAGE)
    assert answer.text == "ok"
    assert not {ORIGIN, "vary", "access-control-expose-headers"} & set(answer.headers)


def test_a_preflight_that_is_refused_succeeds_so_that_the_page_reads_the_refusal_itself(front: int) -> None:
    """A browser sends no request after a preflight that fails."""
    asked = {
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization,content-type",
        "access-control-request-private-network": "true",
    }
    answer = ask(front, f"{PREFIX}/{LONG}", PAGE, "OPTIONS", asked)
    assert (answer.status_code, answer.headers[ORIGIN]) == (200, PAGE)
    assert "POST" in answer.headers["access-control-allow-methods"]
    assert answer.headers["access-control-allow-headers"] == "authorization,content-type"
    assert answer.headers["access-control-allow-private-network"] == "true"
    assert answer.headers["access-control-max-age"] == "7"
    assert {name.strip() for name in answer.headers["vary"].split(",")} >= {"Origin", "Access-Control-Request-Headers"}


@pytest.mark.parametrize(
    ("path", "origin", "headers", "status"),
    [
        (f"{PREFIX}/{LONG}", OTHER, {"access-control-request-method": "POST"}, 414),
        (f"{PREFIX}/{LONG}", PAGE, {}, 414),
        ("/elsewhere", PAGE, {"access-control-request-method": "POST"}, 404),
        (f"{PREFIX}/x", PAGE, {"access-control-request-method": "POST"}, 200),
    ],
    ids=["another page", "no preflight", "no application", "a replica answers"],
)
def test_no_other_request_is_granted(front: int, path: str, origin: str, headers: dict[str, str], status: int) -> None:
    answer = ask(front, path, origin, "OPTIONS", headers)
    assert answer.status_code == status
    assert "access-control-allow-methods" not in answer.headers


def test_without_policies_the_rules_are_left_out(tmp_path: Path) -> None:
    from serve_app.edge.haproxy_cors import cors_rules

    assert cors_rules((), tmp_path) == []

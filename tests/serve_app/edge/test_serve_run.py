"""Owns the contract of a real `serve run` under clients that hold connections, and of request ids as they reach it."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import httpx
import pytest

from loadtest.server import Server
from serve_app.auth.keys import digest
from serve_app.edge.limits import BODY_STALL_S, HEAD_TIMEOUT_S
from tests.support.serve_process import PYTHON_PROXY, serve_run

pytestmark = [pytest.mark.server, pytest.mark.slow]

MODEL = "smollm2-135m-instruct"
ADMIN = "sk-admin"
NUM_HELD = 4200
AGAIN_S = 20
LINE_BYTES_PER_S = 30_000
STALL_S = 2 * max(HEAD_TIMEOUT_S, BODY_STALL_S)
UPLOAD_BYTES = round(1.25 * STALL_S * LINE_BYTES_PER_S)
"""So many that the upload takes longer than any limit of a connection that does not move."""
ARGS = {
    "client_stall_timeout_s": STALL_S,
    "engine": {"executor": "fake", "fake": {"step_delay_ms": 20}},
    "auth": {"admin_sha256": digest(ADMIN.encode())},
}


@pytest.fixture(scope="module", params=[{}, PYTHON_PROXY], ids=["HAProxy", "Python proxy"])
def front(request: pytest.FixtureRequest) -> Iterator[Server]:
    with serve_run(ARGS, env=request.param) as server:
        yield server


def upload(server: Server) -> bytes:
    """Send a long request at 30 kB/s, and read the answer."""
    body = json.dumps({"model": MODEL, "prompt": "a", "max_tokens": 2, "ignore_eos": True}).encode()
    body += b" " * (UPLOAD_BYTES - len(body))
    head = "POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nConnection: close\r\n"
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as line:
        line.sendall(head.encode() + f"Content-Length: {len(body)}\r\n\r\n".encode())
        step = LINE_BYTES_PER_S // 10
        for at in range(0, len(body), step):
            line.sendall(body[at : at + step])
            time.sleep(0.1)  # the line's rate, which is under test
        return b"".join(iter(lambda: line.recv(4096), b""))


def hold(held: ExitStack, server: Server) -> None:
    """Open connections from one source, each with headers that never end. Some may be refused."""
    for _ in range(NUM_HELD):
        try:
            sock = held.enter_context(socket.create_connection(("127.0.0.1", server.port), timeout=5))
            sock.sendall(b"GET / HTTP/1.1\r\nX-A")
        except OSError:
            continue


def answers_again(server: Server) -> bool:
    deadline = time.monotonic() + AGAIN_S
    while time.monotonic() < deadline:
        try:
            if httpx.get(f"{server.url}/health", timeout=2).status_code == 200:
                return True
        except httpx.TransportError:
            time.sleep(0.1)
    return False


def test_unfinished_headers_do_not_keep_others_out_and_a_slow_upload_goes_on(front: Server) -> None:
    """One client without a key made the server unreachable for an hour."""
    with ThreadPoolExecutor(1) as pool, ExitStack() as held:
        slow = pool.submit(upload, front)
        hold(held, front)
        assert answers_again(front)
        answer = slow.result()
    assert answer.startswith(b"HTTP/1.1 200"), answer[:500]
    assert b'"completion_tokens":2' in answer


def test_another_source_is_answered_meanwhile(front: Server) -> None:
    with ExitStack() as held:
        hold(held, front)
        transport = httpx.HTTPTransport(local_address="127.0.0.2")
        with httpx.Client(transport=transport, timeout=5) as other:
            assert other.get(f"{front.url}/health").status_code == 200


@pytest.mark.parametrize(
    "headers",
    [{"x-a": "a" * 20_000}, {f"x-{i}": "a" for i in range(250)}],
    ids=["bytes", "count"],
)
def test_headers_beyond_the_limits_are_a_431(front: Server, headers: dict[str, str]) -> None:
    answer = httpx.get(f"{front.url}/health", headers=headers)
    assert (answer.status_code, answer.json()["error"]["code"]) == (431, "headers_too_large")


@pytest.mark.parametrize("given", ["a b<script>", "x" * 5000])
def test_a_request_id_that_is_not_well_formed_is_replaced_and_the_one_that_counts_can_be_aborted(
    front: Server, given: str
) -> None:
    """Ray echoed and logged it, and /admin/abort did not know it."""
    body = {"model": MODEL, "prompt": "a", "max_tokens": 2000, "ignore_eos": True, "stream": True}
    url = f"{front.url}/v1/completions"
    with httpx.stream("POST", url, json=body, headers={"X-Request-Id": given}, timeout=60) as answer:
        named = answer.headers["x-request-id"]
        assert named != given
        assert len(named) <= 128
        aborted = httpx.post(
            f"{front.url}/admin/abort", json={"request_id": named}, headers={"Authorization": f"Bearer {ADMIN}"}
        )
        assert aborted.json() == {"request_id": named, "aborted": True}
        frames = [line for line in answer.iter_lines() if line]
    assert '"aborted"' in frames[-2]


def test_a_well_formed_request_id_is_the_answers_own(front: Server) -> None:
    assert httpx.get(f"{front.url}/health", headers={"X-Request-Id": "mine-1"}).headers["x-request-id"] == "mine-1"

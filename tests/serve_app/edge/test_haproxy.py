"""Owns the contract of HAProxy under the configuration that Ray Serve writes and the launcher edits.
Never fakes HAProxy: a real one runs in front of a replica of a few lines."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from socketserver import StreamRequestHandler, ThreadingTCPServer
from typing import Any

import httpx
import pytest

from loadtest.server import free_port
from serve_app.edge.haproxy_config import PAGES, PER_SOURCE, EdgeError, edited, per_source_limit
from serve_app.edge.launcher import BINARY, haproxy_binary
from serve_app.edge.limits import BODY_STALL_S, MAX_HEAD_BYTES, MAX_HEADERS, MAX_URL_BYTES, MIN_BODY_BYTES_PER_S
from serve_app.errors.api_error import ApiError
from serve_app.front.proxy_env import ALL_OURS

PREFIX = "/app"
LIMIT = 40
STALL = {"RAY_SERVE_HAPROXY_TIMEOUT_CLIENT_S": "2"}
_START_S = 20

_RENDER = """
import sys
from ray.serve._private.haproxy import BackendConfig, HAProxyApi, HAProxyConfig, ServerConfig
from ray.serve.config import HTTPOptions

directory, port, replica, lost = sys.argv[1], *map(int, sys.argv[2:])
config = HAProxyConfig(
    http_options=HTTPOptions(host="127.0.0.1", port=port),
    socket_path=f"{directory}/admin.sock", server_state_base=directory, server_state_file=f"{directory}/state",
    metrics_socket_path=f"{directory}/metrics.sock", has_received_routes=True, has_received_servers=True, is_head=True,
)
backends = {
    name: BackendConfig(
        name=name, path_prefix=f"/{name}", app_name=name,
        servers=[ServerConfig(name="replica", host="127.0.0.1", port=at, replica_id="r")],
    )
    for name, at in (("app", replica), ("gone", lost))
}
HAProxyApi(config, backends, f"{directory}/haproxy.cfg")._generate_config_file_internal()
"""
"""In a process of its own: Ray Serve reads the environment when it is imported."""


class _Server(ThreadingTCPServer):
    daemon_threads = True

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.has_lost = threading.Event()


class _Replica(StreamRequestHandler):
    """Answers `ok`. At `/dies` it leaves like a replica that is killed before it has answered, and at the
    first `/lost` like one of several."""

    server: _Server

    def handle(self) -> None:
        while request := self.rfile.readline():
            fields = list(iter(self.rfile.readline, b"\r\n"))
            if b"/unread" in request:
                self.wfile.write(b"HTTP/1.1 405 No\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
                return
            length = [int(field.split()[1]) for field in fields if field.lower().startswith(b"content-length:")]
            self.rfile.read(sum(length))
            if b"/dies" in request:
                return
            if b"/lost" in request and not self.server.has_lost.is_set():
                self.server.has_lost.set()
                return
            self.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")


@contextmanager
def replica() -> Iterator[int]:
    server = _Server(("127.0.0.1", 0), _Replica)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@contextmanager
def written_by_ray(directory: Path) -> Iterator[tuple[Path, int]]:
    """Yield a configuration that Ray's own code wrote, and its port."""
    with replica() as at:
        port = free_port()
        arguments = [str(directory), str(port), str(at), str(free_port())]
        env = {**os.environ, **ALL_OURS, **STALL}
        subprocess.run([sys.executable, "-c", _RENDER, *arguments], check=True, timeout=120, env=env)
        yield directory / "haproxy.cfg", port


@contextmanager
def launched(config: Path, port: int, **environ: str) -> Iterator[None]:
    """Run an HAProxy that the launcher starts, as Ray would."""
    command = [sys.executable, "-m", "serve_app.edge.launcher", "-db", "-f", str(config)]
    # As Ray sets it: the launcher ran itself again and again, because this variable told it that it was HAProxy.
    env = {**os.environ, "RAY_SERVE_HAPROXY_BINARY_PATH": sys.executable, **environ}
    with subprocess.Popen(command, stderr=subprocess.DEVNULL, env=env) as process:
        try:
            wait_until_open(port)
            yield
        finally:
            process.kill()


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, int]]:
    with written_by_ray(tmp_path_factory.mktemp("hap")) as (config, port):
        yield config, port


@pytest.fixture(scope="module")
def front(written: tuple[Path, int]) -> Iterator[int]:
    config, port = written
    with launched(config, port, **{PER_SOURCE: str(LIMIT)}):
        yield port


def wait_until_open(port: int) -> None:
    transport = httpx.HTTPTransport(retries=40)  # with a back-off, while the connection is refused
    with httpx.Client(transport=transport, timeout=_START_S) as client:
        assert client.get(f"http://127.0.0.1:{port}/-/healthz").status_code in (200, 503)


def ask(port: int, path: str = f"{PREFIX}/x", headers: dict[str, str] | None = None) -> httpx.Response:
    return httpx.get(f"http://127.0.0.1:{port}{path}", headers=headers, timeout=_START_S)


def check_refused(response: httpx.Response, status: int, code: str) -> None:
    assert response.status_code == status
    assert response.headers["content-type"] == "application/json"
    error = response.json()["error"]
    assert error["code"] == code
    assert error.keys() == ApiError(400, "m").body()["error"].keys(), "the API's shape"


def test_requests_within_the_limits_reach_the_replica(front: int) -> None:
    assert ask(front).text == "ok"
    assert ask(front, headers={"x-a": "a" * (MAX_HEAD_BYTES - 500)}).text == "ok"
    assert ask(front, headers={f"x-{i}": "a" for i in range(MAX_HEADERS - 10)}).text == "ok"
    assert ask(front, headers={"x-a": "a," * (2 * MAX_HEADERS)}).text == "ok", "a header of many values is one header"


@pytest.mark.parametrize(
    "headers",
    [
        {"x-a": "a" * (MAX_HEAD_BYTES + 1)},
        {"x-a": "a" * 100_000},
        {f"x-{i}": "a" for i in range(MAX_HEADERS + 1)},
        {f"x-{i}": "a" for i in range(2000)},
    ],
    ids=["bytes", "100 kB", "count", "2000"],
)
def test_headers_beyond_the_limits_are_a_431_in_the_apis_shape(front: int, headers: dict[str, str]) -> None:
    """HAProxy's own answer was an HTML 400, whose text no configuration changes."""
    check_refused(ask(front, headers=headers), 431, "headers_too_large")


def test_a_url_beyond_the_limit_is_a_414_in_the_apis_shape(front: int) -> None:
    check_refused(ask(front, f"{PREFIX}/" + "a" * MAX_URL_BYTES), 414, "url_too_long")


def test_a_replica_that_ends_before_it_answers_is_a_503_with_a_retry_after(front: int) -> None:
    """It was a plain-text 500, and with our pages a 502."""
    lost = ask(front, f"{PREFIX}/dies")
    check_refused(lost, 503, "replica_lost")
    assert lost.headers["retry-after"] == "1"


def test_a_request_that_got_no_answer_from_a_lost_replica_goes_to_another(front: int) -> None:
    """The client's connection was closed silently."""
    assert ask(front).text == "ok", "there is a connection to the replica that is used again"
    with socket.create_connection(("127.0.0.1", front), timeout=_START_S) as client:
        client.sendall(
            f"POST {PREFIX}/lost HTTP/1.1\r\nHost: a\r\nContent-Length: 4\r\nConnection: close\r\n\r\n".encode()
        )
        client.sendall(b"body")  # after its head, as most clients send it
        assert whole(client).endswith(b"ok")


def whole(sock: socket.socket) -> bytes:
    return b"".join(iter(lambda: sock.recv(4096), b""))


def test_a_body_that_nobody_waits_for_does_not_hold_the_connection(front: int) -> None:
    """HAProxy keeps reading as long as a client may pause: by Ray's default an hour, after the replica has closed."""
    with socket.create_connection(("127.0.0.1", front), timeout=30) as client:
        client.sendall(f"POST {PREFIX}/unread HTTP/1.1\r\nHost: a\r\nContent-Length: 100000\r\n\r\na".encode())
        assert whole(client).startswith(b"HTTP/1.1 405")


def test_an_application_without_a_replica_is_a_503_with_a_retry_after(front: int) -> None:
    none = ask(front, "/gone/x")
    check_refused(none, 503, "service_unavailable")
    assert none.headers["retry-after"] == "1"


def test_a_path_of_no_application_is_a_404_that_does_not_repeat_it(front: int) -> None:
    missing = ask(front, "/elsewhere/<script>")
    check_refused(missing, 404, "not_found")
    assert "script" not in missing.text


def test_one_source_has_a_share_of_the_connections_and_another_is_served_beside_it(front: int) -> None:
    with ExitStack() as held:
        taken = [held.enter_context(socket.create_connection(("127.0.0.1", front))) for _ in range(LIMIT)]
        beyond = held.enter_context(socket.create_connection(("127.0.0.1", front)))
        beyond.settimeout(_START_S)
        assert ended(beyond), "closed at once, and not when it has been silent for long"
        other = httpx.HTTPTransport(local_address="127.0.0.2")
        with httpx.Client(transport=other, timeout=_START_S) as client:
            assert client.get(f"http://127.0.0.1:{front}{PREFIX}/x").text == "ok"
        taken[0].sendall(f"GET {PREFIX}/x HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n".encode())
        taken[0].settimeout(_START_S)
        while not ended(taken[0]):  # its place is free again
            pass
        assert ask(front).text == "ok"


def ended(sock: socket.socket) -> bool:
    try:
        return sock.recv(4096) == b""
    except ConnectionResetError:
        return True


def test_unfinished_headers_have_ten_seconds(front: int) -> None:
    with socket.create_connection(("127.0.0.1", front), timeout=30) as half:
        half.sendall(b"GET / HTTP/1.1\r\nX-A")
        assert half.recv(4096).startswith(b"HTTP/1.1 408 ")


def test_a_small_body_that_stalls_is_a_408_in_the_apis_shape(front: int) -> None:
    """It was HAProxy's HTML page."""
    with socket.create_connection(("127.0.0.1", front), timeout=60) as client:
        client.sendall(f"POST {PREFIX}/x HTTP/1.1\r\nHost: a\r\nContent-Length: 20000\r\n\r\na".encode())
        head, _, body = whole(client).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 408 ")
    assert b"content-type: application/json" in head
    assert json.loads(body)["error"]["code"] == "request_timeout"


# --- the configuration ----------------------------------------------------------------------------------------------


def test_a_configuration_is_edited_once(written: tuple[Path, int], front: int) -> None:
    """Ray starts HAProxy again with the same file after a crash."""
    config = written[0].read_text()
    assert edited(config, written[0].parent, {}) == config
    assert config.count("tcp-request connection reject") == 1


@pytest.mark.usefixtures("front")
def test_a_small_body_has_the_time_that_the_app_gives_it(written: tuple[Path, int]) -> None:
    """One of 20 kB at 1,250 bytes/s was cut off after 10 s."""
    rule = re.search(r"wait-for-body time (\d+)s if .* 1:(\d+) ", written[0].read_text())
    assert rule is not None
    assert int(rule[1]) >= BODY_STALL_S + int(rule[2]) / MIN_BODY_BYTES_PER_S


@pytest.mark.parametrize("missing", ["global\n", "global\n maxconn 4\n", "global\n maxconn 4\n tune.bufsize 16384\n"])
def test_a_configuration_of_another_shape_is_refused_and_not_run_without_limits(missing: str, tmp_path: Path) -> None:
    with pytest.raises(EdgeError, match="as Ray writes it, has nothing like"):
        edited(missing, tmp_path, {})


def test_the_launcher_says_what_is_wrong_and_starts_nothing(tmp_path: Path) -> None:
    (tmp_path / "haproxy.cfg").write_text("global\n")
    command = [sys.executable, "-m", "serve_app.edge.launcher", "-f", str(tmp_path / "haproxy.cfg")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stderr.startswith("chunkserve-haproxy: HAProxy's configuration")


@pytest.mark.parametrize(("given", "limit"), [("", 2048), ("0", 0), ("100", 100)])
def test_the_share_of_a_source_is_half_unless_it_is_set(given: str, limit: int) -> None:
    assert per_source_limit({PER_SOURCE: given}, 4096) == limit


@pytest.mark.parametrize("given", ["-1", "many", "1.5", "٣"])
def test_a_share_that_is_no_number_is_refused_by_name_and_value(given: str) -> None:
    with pytest.raises(EdgeError, match=f"{PER_SOURCE} must be a whole number .* it is '{given}'"):
        per_source_limit({PER_SOURCE: given}, 4096)


def test_without_a_share_there_is_no_table(written: tuple[Path, int], tmp_path: Path) -> None:
    fresh = written[0].read_text().partition("\n")[2]
    lines = [line for line in fresh.splitlines() if "stick-table" not in line and "tcp-request" not in line]
    assert "stick-table" not in edited("\n".join(lines) + "\n", tmp_path, {PER_SOURCE: "0"})


def test_every_page_is_a_whole_response_whose_body_is_json() -> None:
    for refusal in PAGES.values():
        head, _, body = refusal.response().partition(b"\r\n\r\n")
        assert f"content-length: {len(body)}".encode() in head
        assert json.loads(body)["error"]["message"] == refusal.message
        assert "'" not in refusal.message, "HAProxy's configuration quotes it"


def test_the_user_may_name_another_haproxy() -> None:
    assert haproxy_binary({BINARY: "/their/haproxy"}) == "/their/haproxy"

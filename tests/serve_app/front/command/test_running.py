"""`chunkserve status` and `chunkserve chat` say what a server says, and one line where none answers."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from loadtest.server import free_port
from serve_app.front.servers import RunningServer, noted
from serve_app.metrics.activity import EngineActivity, FleetActivity, IngressActivity
from tests.support.chunkserve import COMMAND, chunkserve, environment, refusal

WAIT_S = 30


def engine(name: str, running: int, held: int) -> EngineActivity:
    return EngineActivity(
        engine=name,
        num_running=running,
        num_waiting=5,
        num_blocks=200,
        num_held_blocks=held,
        max_num_seqs=64,
        max_num_batched_tokens=512,
        tpot_ms=None,
        window_s=10,
        prompt_tokens_per_s=120.4,
        generated_tokens_per_s=33.0,
        gap_p50_ms=None,
        gap_p99_ms=None,
        steps=(),
    )


FLEET = FleetActivity([engine("e1", 3, 50), engine("e2", 12, 0)], [IngressActivity("i1", 20, 2)])


@dataclass
class Scripted:
    """A server that answers as it is told. `said`: the messages of each chat. `events`: the answer's."""

    url: str
    answers: dict[str, tuple[int, Any]] = field(default_factory=dict)
    events: list[Any] = field(default_factory=list)
    endless: bool = False
    said: list[list[dict[str, str]]] = field(default_factory=list)
    temperatures: list[float | None] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)
    left: threading.Event = field(default_factory=threading.Event)
    """Set when a client left in the middle of an answer."""


def text_event(text: str, name: str = "content") -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": {name: text}}]}


@pytest.fixture
def server() -> Iterator[Scripted]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            script.keys.append(self.headers["Authorization"])
            status, body = script.answers.get(self.path, (404, {"error": {"message": f"no {self.path}"}}))
            self.answer(status, b"" if body is None else json.dumps(body).encode())

        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            assert (self.path, asked["model"], asked["stream"]) == ("/v1/chat/completions", "m", True)
            script.said.append(asked["messages"])
            script.temperatures.append(asked.get("temperature"))
            self.send_response(200)
            self.end_headers()
            try:
                for event in script.events:
                    self.send(json.dumps(event))
                while script.endless:
                    time.sleep(0.02)
                    self.wfile.write(b": still there\n\n")
            except OSError:
                script.left.set()
                return
            self.send("[DONE]")

        def send(self, data: str) -> None:
            self.wfile.write(f"data: {data}\n\n".encode())

        def answer(self, status: int, body: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Print nothing."""

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    script = Scripted(f"http://127.0.0.1:{http.server_port}")
    script.answers = {
        "/health": (200, None),
        "/activity": (200, {"model": "m", **asdict(FLEET)}),
        "/v1/models": (200, {"data": [{"id": "m"}, {"id": "law"}]}),
    }
    thread = threading.Thread(target=http.serve_forever, args=(0.05,))
    thread.start()
    yield script
    script.endless = False
    http.shutdown()
    thread.join()
    http.server_close()


# --- status -----------------------------------------------------------------------------------------------------------


def test_status_is_a_table_of_engines_and_a_line_of_the_ingress(server: Scripted) -> None:
    done = chunkserve("status", "--url", server.url)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == [
        f"{server.url} is healthy",
        "models: m, law",
        "engine  running  queued  KV use  prompt tok/s  tok/s",
        "e1            3       5     25%           120     33",
        "e2           12       5      0%           120     33",
        "ingress replicas: 1, with 20 requests, of which 2 wait for a place with an engine",
    ]


def test_status_says_what_is_wrong_with_a_server_that_is_not_healthy(server: Scripted) -> None:
    server.answers["/health"] = (503, {"error": {"message": "No engine answers."}})
    server.answers["/activity"] = (200, {"model": "m", **asdict(FleetActivity(num_missing=2))})
    done = chunkserve("status", "--url", server.url)
    assert done.returncode == 1
    assert f"{server.url} is not healthy (503): No engine answers." in done.stdout
    assert "no engine runs" in done.stdout
    assert "2 replicas did not answer" in done.stdout


def test_status_needs_no_key_and_sends_the_one_it_has(server: Scripted) -> None:
    server.answers["/v1/models"] = (401, {"error": {"message": "This needs a valid API key."}})
    assert "models: m\n" in chunkserve("status", "--url", server.url).stdout
    assert set(server.keys) == {None}
    chunkserve("status", "--url", server.url, env={"CHUNKSERVE_API_KEY": "sk-1"})
    assert server.keys[-1] == "Bearer sk-1"


def test_status_finds_the_server_that_this_user_runs(server: Scripted, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with noted(RunningServer(server.url, "", "")):
        assert chunkserve("status", env={"TMPDIR": str(tmp_path)}).stdout.startswith(f"{server.url} is healthy")
        with noted(RunningServer("http://127.0.0.1:1", "", "")):
            line = refusal("status", env={"TMPDIR": str(tmp_path)})
    assert "2 servers run here; choose one with --url: " in line
    assert server.url in line


@pytest.mark.parametrize("command", ["status", "chat"])
def test_a_server_that_does_not_answer_is_named_in_a_line(command: str) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    done = chunkserve(command, "--url", url)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == f"chunkserve {command}: no server answers at {url}: [Errno 111] Connection refused\n"


@pytest.mark.parametrize("command", ["status", "chat"])
def test_what_is_no_url_is_refused(command: str) -> None:
    assert "argument --url: expected http:// or https://" in refusal(command, "--url", "localhost:8000")


def test_another_kind_of_server_is_said_to_be_one(server: Scripted) -> None:
    server.answers["/activity"] = (404, {"detail": "Not Found"})
    done = chunkserve("status", "--url", server.url)
    assert (done.returncode, done.stderr) == (1, "chunkserve status: Not Found\n")


# --- chat -------------------------------------------------------------------------------------------------------------


def chat(server: Scripted, *said: str, options: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    return chunkserve("chat", "--url", server.url, *options, said="".join(f"{line}\n" for line in said))


def test_a_chat_prints_answers_and_remembers_them(server: Scripted) -> None:
    server.events = [text_event("Hel"), {"choices": []}, text_event("lo")]
    done = chat(server, "one", "", "two")
    assert (done.returncode, done.stdout, done.stderr) == (0, "Hello\nHello\n", "")
    one, two = server.said
    assert one == [{"role": "user", "content": "one"}]
    assert two == [*one, {"role": "assistant", "content": "Hello"}, {"role": "user", "content": "two"}]


def test_reset_forgets_what_was_said_but_not_the_system_text(server: Scripted) -> None:
    server.events = [text_event("x")]
    chat(server, "one", "/reset", "two", "/exit", "three", options=("--system", "Be brief."))
    system = {"role": "system", "content": "Be brief."}
    assert server.said == [[system, {"role": "user", "content": text}] for text in ("one", "two")]


def test_a_temperature_is_sent_only_if_it_is_given(server: Scripted) -> None:
    server.events = [text_event("x")]
    chat(server, "one")
    chat(server, "two", options=("--temperature", "0"))
    assert server.temperatures == [None, 0]


def test_thoughts_are_shown_apart_and_not_sent_back(server: Scripted) -> None:
    server.events = [text_event("Hmm", "reasoning"), text_event(".", "reasoning"), text_event("Yes")]
    assert chat(server, "one", "two").stdout == "Hmm.\n\nYes\n" * 2
    assert server.said[1][1] == {"role": "assistant", "content": "Yes"}


def test_an_error_is_a_line_and_its_question_is_forgotten(server: Scripted) -> None:
    server.events = [{"error": {"message": "The engine is full."}}]
    done = chat(server, "one", "two")
    assert (done.returncode, done.stderr) == (0, "The engine is full.\nThe engine is full.\n")
    assert server.said[1] == [{"role": "user", "content": "two"}]


def test_ctrl_c_stops_an_answer_and_not_the_chat(server: Scripted) -> None:
    server.events, server.endless = [text_event("Once upon")], True
    process = subprocess.Popen(
        [*COMMAND, "chat", "--url", server.url],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(),
    )
    try:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(b"tell\n")
        process.stdin.flush()
        shown = b""
        while b"upon" not in shown:
            shown += os.read(process.stdout.fileno(), 100)
        process.send_signal(signal.SIGINT)
        assert server.left.wait(WAIT_S), "the answer goes on"
        server.endless = False
        rest, errors = process.communicate(b"go on\n", WAIT_S)
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        process.wait()
    assert (process.returncode, errors) == (0, b"")
    assert rest == b" [stopped]\nOnce upon\n"
    assert server.said[1] == [
        {"role": "user", "content": "tell"},
        {"role": "assistant", "content": "Once upon"},
        {"role": "user", "content": "go on"},
    ]

"""`chunkserve status` and `chunkserve chat` say what a server says, and one line where none answers. Long: one scripted
server for both."""

from __future__ import annotations

import json
import os
import signal
import socket
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
from serve_app.front.command.api import harmless
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
    breaks_off: bool = False
    missing_bytes: int = 0
    moved_to: str = ""
    said: list[list[dict[str, str]]] = field(default_factory=list)
    temperatures: list[float | None] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)
    left: threading.Event = field(default_factory=threading.Event)
    """Set when a client left in the middle of an answer."""


def text_event(text: Any, name: str = "content") -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": {name: text}}]}


@pytest.fixture
def server() -> Iterator[Scripted]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            script.keys.append(self.headers["Authorization"])
            status, body = script.answers.get(self.path, (404, {"error": {"message": f"no {self.path}"}}))
            if not isinstance(body, bytes):
                body = b"" if body is None else json.dumps(body).encode()
            self.answer(status, body)

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
            if not script.breaks_off:
                self.send("[DONE]")

        def send(self, data: str) -> None:
            self.wfile.write(f"data: {data}\n\n".encode())

        def answer(self, status: int, body: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body) + script.missing_bytes))
            if status // 100 == 3:
                self.send_header("Location", script.moved_to)
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


def test_of_several_models_status_says_whose_each_engine_is_and_which_has_none(server: Scripted) -> None:
    models = [{"model": "a", "engines": ["e1"]}, {"model": "b", "engines": ["e2"]}, {"model": "c", "engines": []}]
    server.answers["/activity"] = (200, {"model": "a", **asdict(FLEET), "models": models})
    lines = chunkserve("status", "--url", server.url).stdout.splitlines()
    assert [line.partition("  ")[0] for line in lines[3:5]] == ["e1 of a", "e2 of b"]
    assert "no engine of c runs" in lines


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
    with (
        noted(RunningServer(server.url, "", "")),
        noted(RunningServer("", "", "")),
    ):  # only its handle reaches the second
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
@pytest.mark.parametrize(
    "url",
    [
        "localhost:8000",
        "http://",
        "http://[::1",
        "http://127.0.0.1:x",
        "http://127.0.0.1:99999",
        "http://two words",
        "http://127.0.0.1/é",
        "http://ann:secret@127.0.0.1",
        "http://127.0.0.1/?model=m",
    ],
)
def test_what_is_no_url_is_refused(url: str, command: str) -> None:
    line = refusal(command, "--url", url)
    assert "argument --url: expected http://" in line
    assert repr(url) in line


@pytest.mark.parametrize("key", ["sk-secret\r", "sk-\u201csecret", "sk secret"])
@pytest.mark.parametrize("command", ["status", "chat"])
def test_a_key_that_no_header_can_carry_is_refused_and_not_shown(command: str, key: str, server: Scripted) -> None:
    """Python's own message about a header has the header in it."""
    line = refusal(command, "--url", server.url, env={"CHUNKSERVE_API_KEY": key})
    assert "CHUNKSERVE_API_KEY: expected printable ASCII characters" in line
    assert "secret" not in line
    assert server.keys == []


def test_another_kind_of_server_is_said_to_be_one(server: Scripted) -> None:
    server.answers["/activity"] = (404, {"detail": "Not Found"})
    done = chunkserve("status", "--url", server.url)
    assert (done.returncode, done.stderr) == (1, f"chunkserve status: {server.url}/activity answers 404 Not Found\n")


@pytest.mark.parametrize("body", [b"<html>", b"[1]", b"null", b"3", b"{}", b'{"data": []}', b"", b"[" * 100_000])
@pytest.mark.parametrize("command", ["status", "chat"])
def test_an_answer_of_another_form_is_a_line_about_the_server(command: str, body: bytes, server: Scripted) -> None:
    server.answers = dict.fromkeys(server.answers, (200, body))
    done = chunkserve(command, "--url", server.url)
    assert (done.returncode, done.stdout) == (1, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"chunkserve {command}: what answers at {server.url} is no chunkserve: ")
    assert len(line) < 200


@pytest.mark.parametrize("command", ["status", "chat"])
def test_an_answer_that_ends_too_early_is_a_line(command: str, server: Scripted) -> None:
    server.missing_bytes = 10
    done = chunkserve(command, "--url", server.url)
    assert (done.returncode, done.stdout) == (1, "")
    (line,) = done.stderr.splitlines()
    assert f"the answer from {server.url} broke off" in line


@pytest.mark.parametrize("command", ["status", "chat"])
def test_a_redirect_is_told_and_not_followed_with_the_key(command: str, server: Scripted) -> None:
    server.moved_to = f"{server.url}/elsewhere"
    server.answers = dict.fromkeys(server.answers, (302, None)) | {"/elsewhere": (200, {})}
    done = chunkserve(command, "--url", server.url, env={"CHUNKSERVE_API_KEY": "sk-1"})
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.endswith(f"/v1/models answers 302 Found ({server.moved_to})")
    assert len(server.keys) == {"status": 2, "chat": 1}[command], "it was followed"


@pytest.mark.parametrize("command", ["status", "chat"])
def test_ctrl_c_while_a_server_is_silent_ends_without_a_traceback(command: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        words = [*COMMAND, command, "--url", f"http://127.0.0.1:{silent.getsockname()[1]}"]
        process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment())
        try:
            silent.settimeout(WAIT_S)
            connection, _ = silent.accept()  # now it waits for the answer
            process.send_signal(signal.SIGINT)
            assert process.communicate(timeout=WAIT_S) == (b"", b"")
        finally:
            process.kill()
            process.wait()
            connection.close()
    assert process.returncode == 128 + signal.SIGINT


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
    assert (done.returncode, done.stderr) == (1, "The engine is full.\nThe engine is full.\n")
    assert server.said[1] == [{"role": "user", "content": "two"}]


def test_an_answer_that_breaks_off_is_a_line_after_what_came(server: Scripted) -> None:
    server.events, server.breaks_off = [text_event("Once upon")], True
    done = chat(server, "one", "two")
    assert (done.returncode, done.stdout) == (1, "Once upon\n" * 2)
    assert done.stderr == f"the answer from {server.url} broke off before its end\n" * 2
    assert server.said[1][1] == {"role": "assistant", "content": "Once upon"}


@pytest.mark.parametrize(
    "event", [3, [1], {"x": 1}, {"choices": None}, {"choices": [{"delta": None}]}, text_event(3)]
)  # fmt: skip
def test_an_event_of_another_form_is_a_line_about_the_server(event: Any, server: Scripted) -> None:
    server.events = [event]
    done = chat(server, "one")
    assert (done.returncode, done.stdout) == (1, "\n")
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"what answers at {server.url} is no chunkserve: it sent b'")


def test_neither_a_model_nor_an_error_controls_the_terminal(server: Scripted) -> None:
    server.events = [text_event("a\x1b[2J\tb\n"), {"error": {"message": "no\x1b[2J\nroom"}}]
    done = chat(server, "one")
    assert (done.stdout, done.stderr) == ("a\ufffd[2J\tb\n\n", "no\ufffd[2J room\n")


@pytest.mark.parametrize(
    "text",
    [
        "« oui\u00a0» 5\u202f000",  # spaces of French
        "\u3000你好",
        "\U0001f468\u200d\U0001f469\u200d\U0001f467",  # a family, joined
        "می\u200cخواهم क्\u200dष \u200f",
    ],
)
def test_spaces_and_joiners_of_scripts_and_emojis_are_shown(text: str) -> None:
    assert harmless(text) == text


def test_what_reverses_the_order_of_letters_is_not_shown() -> None:
    assert harmless("a\u202eb\u2066\u2028\x85\r") == "a\ufffdb\ufffd\ufffd\ufffd\ufffd"


def test_bytes_that_are_no_text_and_a_very_long_line_are_sent_as_text(server: Scripted) -> None:
    server.events = [text_event("x")]
    words, said = [*COMMAND, "chat", "--url", server.url], b"a\xff" + b"b" * 1_000_000 + b"\n"
    done = subprocess.run(words, input=said, capture_output=True, timeout=WAIT_S, env=environment(), check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"x\n", b"")
    assert server.said == [[{"role": "user", "content": "a\ufffd" + "b" * 1_000_000}]]


def test_an_answer_is_shown_where_the_terminal_lacks_a_letter(server: Scripted) -> None:
    server.events = [text_event("wörld")]
    words = [*COMMAND, "chat", "--url", server.url]
    done = subprocess.run(
        words,
        input=b"one\n",
        capture_output=True,
        timeout=WAIT_S,
        env=environment({"PYTHONIOENCODING": "ascii"}),
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, b"w\\xf6rld\n", b"")


def test_without_any_input_a_chat_ends(server: Scripted) -> None:
    shell = ["sh", "-c", '"$@" <&-', "sh", *COMMAND, "chat", "--url", server.url]
    done = subprocess.run(shell, capture_output=True, timeout=WAIT_S, env=environment(), check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


def test_a_temperature_is_a_finite_number(server: Scripted) -> None:
    assert "--temperature: expected a finite number, not 'nan'" in refusal("chat", "--temperature", "nan")


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

"""A start that fails ends with a line; one that works is announced when this server, and no other, answers."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from engine.build.engine import check_engine
from engine.config import KvTiersConfig
from serve_app.front.config_file import read_config
from serve_app.front.preflight import Application, read_applications
from serve_app.front.start import (
    StartFailed,
    engine_lines,
    ready_lines,
    url_of,
    wait_until_answering,
    wait_until_running,
)
from serve_app.settings.instance import HEADER, VARIABLE

TRACEBACK = """The deployment failed to start 1 times in a row. Retrying 2 more time(s). Error:
ray::ServeReplica.initialize_and_get_metadata() (pid=7)
  File "/engine/kv_cache.py", line 36, in blocks_in
engine.config.ConfigError: kv_cache_memory_gib is 1, but one block of this model takes 9.
"""


def deployment(message: str = "") -> Any:
    return SimpleNamespace(message=message)


def application(status: str, message: str = "", **deployments: Any) -> Any:
    return SimpleNamespace(status=status, message=message, deployments=deployments)


def statuses(*each: dict[str, Any]) -> Any:
    left = iter(each)
    return lambda: SimpleNamespace(applications=next(left))


def test_it_waits_until_all_applications_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("serve_app.front.start._POLL_S", 0)
    running, deploying = application("RUNNING"), application("DEPLOYING")
    said: list[str] = []
    wait_until_running(
        ["a", "b"],
        statuses({}, {"a": running}, {"a": running, "b": deploying}, {"a": running, "b": running}),
        said.append,
    )
    assert said == []


@pytest.mark.parametrize(
    ("found", "line"),
    [
        (
            application("DEPLOYING", Engine=deployment(TRACEBACK)),
            "application a failed to start: Engine: kv_cache_memory_gib is 1, but one block of this model takes 9.",
        ),
        (
            application(
                "DEPLOYING", Engine=deployment("engine.step.AdapterError: adapter_config.json cannot be read.\n")
            ),
            "application a failed to start: Engine: adapter_config.json cannot be read.",
        ),
        (
            application("DEPLOY_FAILED", "Traceback (most recent call last):\nAttributeError: no attribute y\n"),
            "application a failed to start: AttributeError: no attribute y",
        ),
        (application("DEPLOY_FAILED", "it was\n not to be"), "application a failed to start: it was not to be"),
    ],
)
def test_a_start_that_fails_is_one_line(found: Any, line: str) -> None:
    with pytest.raises(StartFailed) as caught:
        wait_until_running(["a"], statuses({"a": found}), pytest.fail)
    assert str(caught.value) == line


def test_an_error_that_another_try_may_cure_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("serve_app.front.start._POLL_S", 0)
    dying = application("DEPLOYING", Engine=deployment("ray.exceptions.ActorDiedError: the actor died\n"))
    wait_until_running(["a"], statuses({"a": dying}, {"a": application("RUNNING")}), pytest.fail)


def test_what_a_deployment_waits_for_is_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("serve_app.front.start._POLL_S", 0)
    message = "Deployment 'Engine' has 1 replicas that have taken more than 30s to be scheduled.\nmore"
    waiting, said = application("DEPLOYING", Engine=deployment(message)), []
    wait_until_running(["a"], statuses({"a": waiting}, {"a": waiting}, {"a": application("RUNNING")}), said.append)
    assert said == [f"a: Engine waits: {message.splitlines()[0]}"]


# --- announcing ------------------------------------------------------------------------------------------------------


@contextmanager
def answering(*answers: tuple[int, dict[str, str]]) -> Iterator[str]:
    """Run a server that gives these answers, the last one for ever."""
    left = list(answers)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, headers = left.pop(0) if len(left) > 1 else left[0]
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            """Print nothing: nobody reads it."""

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def test_a_server_is_announced_once_it_answers_by_its_own_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "ours")
    monkeypatch.setattr("serve_app.front.start._POLL_S", 0)
    with answering((404, {}), (503, {}), (200, {HEADER: "ours"})) as url:
        wait_until_answering(url)


@pytest.mark.parametrize("headers", [{}, {HEADER: "theirs"}])
def test_another_server_is_not_announced(monkeypatch: pytest.MonkeyPatch, headers: dict[str, str]) -> None:
    monkeypatch.setenv(VARIABLE, "ours")
    with answering((200, headers)) as url, pytest.raises(StartFailed, match=f"another server answers at {url}"):
        wait_until_answering(url)


def test_a_server_that_never_answers_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("serve_app.front.start._ANSWER_TIMEOUT_S", 0.05)
    monkeypatch.setattr("serve_app.front.start._POLL_S", 0)
    with (
        answering((503, {})) as url,
        pytest.raises(StartFailed, match="is not answered by this server"),
    ):
        wait_until_answering(url)


def test_a_proxy_of_the_environment_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    with answering((200, {})) as url:
        wait_until_answering(url)


def written(tmp_path: Path, args: dict[str, Any], **http: Any) -> Application:
    path = tmp_path / "c.yaml"
    app = {"name": "a", "import_path": "serve_app.app:build", "route_prefix": "/llm", "args": args}
    path.write_text(yaml.safe_dump({"http_options": http, "applications": [app]}))
    (found,) = read_applications(read_config(path))
    return found


def test_the_url_is_one_that_this_machine_reaches(tmp_path: Path) -> None:
    for http, url in (
        ({}, "http://127.0.0.1:8000/llm"),
        ({"host": "::1", "port": 81}, "http://[::1]:81/llm"),
        ({"host": "example.org", "ssl_certfile": "c"}, "https://example.org:8000/llm"),
    ):
        app = written(tmp_path, {}, **http)
        assert url_of(app.config, app.route_prefix) == url


def test_the_lines_say_what_the_engine_chose_and_what_it_holds(tmp_path: Path) -> None:
    engine = {"executor": "fake", "num_kv_blocks": 96, "max_model_len": 1024}
    app = written(tmp_path, {"model": "m", "engine": engine, "engine_replicas": 2})
    lines = engine_lines(app, check_engine("m", app.settings.engine))
    assert lines == [
        "model    m: 1,024 tokens of context, 2 engines",
        "device   none, none (executor is fake)",
        "kernels  executor is fake: tokens are scripted, no model is loaded.",
        "KV cache 96 blocks hold 1,536 tokens, 1.5 full contexts (num_kv_blocks)",
    ]


def test_the_lines_count_the_kv_of_all_ranks_that_have_their_own(tmp_path: Path) -> None:
    app = written(tmp_path, {"engine": {"executor": "fake", "num_kv_blocks": 96, "max_model_len": 1024}})
    resolved = replace(check_engine("m", app.settings.engine), expert_parallel_size=2)
    assert "KV cache 2 x 96 blocks hold 3,072 tokens, 3.0 full contexts (num_kv_blocks)" in engine_lines(app, resolved)


def test_the_lines_say_where_kv_is_kept_besides_the_cache_and_how_much(tmp_path: Path) -> None:
    tiers = {"host_memory_gib": 0.5, "disk_path": "/cache/kv", "disk_gib": 2, "disk_key_file": "/run/secrets/key"}
    app = written(tmp_path, {"engine": {"executor": "fake", "kv_tiers": tiers}})
    resolved = replace(check_engine("m", app.settings.engine), tier_block_bytes=2**20, block_size=16)
    assert engine_lines(app, resolved)[4:] == [
        "KV host  0.5 GiB of memory for each engine, 512 blocks or 8,192 tokens",
        "KV disk  /cache/kv: 2 GiB for all engines of a machine, 2,048 blocks or 32,768 tokens, encrypted by the key "
        "in /run/secrets/key",
    ]
    narrow = replace(resolved, kv_tiers=KvTiersConfig(host_memory_gib=0.5, dtype="int8"), tier_block_bytes=2**19)
    assert engine_lines(app, narrow)[4:] == [
        "KV host  0.5 GiB of memory for each engine, 1,024 blocks or 16,384 tokens in int8"
    ]
    app = written(tmp_path, {"engine": {"executor": "fake", "kv_tiers": {"disk_path": "/cache/kv"}}})
    assert engine_lines(app, check_engine("m", app.settings.engine))[4:] == [
        "KV disk  /cache/kv: 10 GiB for all engines of a machine, not encrypted"
    ]


def test_a_preset_of_the_scheduler_is_among_the_lines_and_the_default_schedule_is_not(tmp_path: Path) -> None:
    engine = {"executor": "fake", "scheduler": {"preset": "atom", "requeue": "back"}}
    app = written(tmp_path, {"engine": engine})
    *_, last = engine_lines(app, check_engine("m", app.settings.engine))
    assert last == "schedule preset atom, with requeue back instead"


def test_a_context_that_the_kv_cache_does_not_hold_is_a_warning(tmp_path: Path) -> None:
    app = written(tmp_path, {"engine": {"executor": "fake", "num_kv_blocks": 4, "max_model_len": 1024}})
    *_, last = engine_lines(app, check_engine("m", app.settings.engine))
    assert last.startswith("warning  a request may have 65 tokens, as many as the KV cache holds")


def test_the_call_has_a_place_for_a_key_where_keys_are_needed(tmp_path: Path) -> None:
    key = {"tenant": "t", "sha256": "0" * 64}
    assert "Bearer" not in ready_lines(written(tmp_path, {}), "http://x", 1)
    assert "-H 'Authorization: Bearer <your key>'" in ready_lines(written(tmp_path, {"auth": {"keys": [key]}}), "u", 1)

"""Wrong configs end `serve run` before Ray starts: status 1, and lines that name the setting instead of a traceback."""

from __future__ import annotations

import math
import os
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from loadtest.server import ROOT, SERVE, free_port

Change = Callable[[dict[str, Any]], object]

# What is wrong, and what names it. Mistakes below `engine` are found by a process that loads torch.
WRONG: dict[str, tuple[Change, str]] = {
    "a misspelt setting": (
        lambda c: args(c).update(modle="x"),
        "args.modle: no such setting here; did you mean model?",
    ),
    "a value out of bounds": (lambda c: engine(c).update(block_size=0), "args.engine.block_size: Input should be gre"),
    "no such model": (lambda c: args(c).update(model="/no/model"), "args.model: No model '/no/model': expected"),
    "a misspelt top-level key": (lambda c: c.update(aplications=c.pop("applications")), "unknown key aplications: did"),
    "no such module": (lambda c: app(c).update(import_path="serv_app.app:build"), "import_path: there is no module"),
    "a module instead of a builder": (
        lambda c: app(c).update(import_path="serve_app.app"),
        "import_path: serve_app has no app (given: 'serve_app.app'); this project's is serve_app.app:build",
    ),
    "an infinite time": (
        lambda c: args(c).update(drain_timeout_s=math.inf),
        "args.drain_timeout_s: Input should be a f",
    ),
    "infinite memory": (
        lambda c: engine(c).update(kv_cache_memory_gib=math.inf),
        "kv_cache_memory_gib must be a finite",
    ),
    "no number of GPUs": (
        lambda c: args(c).update(engine_num_gpus=math.inf),
        "args.engine_num_gpus: Input should be a ",
    ),
    "a prefix without a slash": (
        lambda c: app(c).update(route_prefix="x"),
        "applications.0.route_prefix: expected a pa",
    ),
    "an unknown deployment": (
        lambda c: app(c).update(deployments=[{"name": "Engines"}]),
        "deployments.0.name: expected one of Ingress, Engine (given: 'Engines')",
    ),
    "a host that is none": (
        lambda c: http(c).update(host="a..b"),
        "http_options.host: not a host name (given: 'a..b')",
    ),
    "an unknown host": (lambda c: http(c).update(host="no.such.host.invalid"), "http_options.host: "),
    "TLS": (
        lambda c: http(c).update(ssl_certfile="/no/file"),
        "http_options.ssl_certfile: HAProxy in front of this ser",
    ),
    "no such builder": (lambda c: app(c).update(import_path="serve_app.app:main"), "serve_app.app has no main"),
    "no such keys file": (lambda c: args(c).update(auth={"keys_file": "/no/keys"}), "args.auth.keys_file: /no/keys"),
    "too long a context": (lambda c: engine(c).update(max_model_len=100_000), "max_model_len is 100000, but the"),
    "too much memory": (lambda c: engine(c).update(kv_cache_memory_gib=1e5), "kv_cache_memory_gib is 100000.0, which"),
    "no native kernels": (
        lambda c: engine(c).update(quantize="int8", kernels="torch_cpu"),
        "quantize is int8, but kernels is torch_cpu: on a CPU, only the native kernels",
    ),
}


def app(config: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = config["applications"][0]
    return found


def http(config: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = config["http_options"]
    return found


def args(config: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = app(config)["args"]
    return found


def engine(config: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = args(config)["engine"]
    return found


def refused(path: Path, tmp_path: Path) -> list[str]:
    """Return the lines of a `serve run` that must not get as far as Ray."""
    environment = {**os.environ, "RAY_TMPDIR": str(tmp_path / "ray")}
    command = [SERVE, "run", "--address", "local", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment, check=False)
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    assert not (tmp_path / "ray" / "ray").exists(), "Ray was started"
    lines = (done.stdout + done.stderr).splitlines()
    assert len(lines) <= 10, lines
    return lines


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_config_ends_serve_run_with_lines_that_name_the_setting(wrong: str, tmp_path: Path) -> None:
    change, message = WRONG[wrong]
    config = yaml.safe_load((ROOT / "config.yaml").read_text())
    config["http_options"]["port"] = free_port()
    change(config)
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(config))
    lines = refused(tmp_path / "c.yaml", tmp_path)
    (line,) = (line for line in lines if message in line)
    assert line.startswith(f"{tmp_path}/c.yaml, line ")


@pytest.mark.parametrize(
    ("text", "message"),
    [(None, "c.yaml: No such file or directory: expected the YAML"), ("", "is empty"), ("a: [", ", line 1: not YAML")],
)
def test_a_file_that_is_no_config_ends_it_too(text: str | None, message: str, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "c.yaml").write_text(text)
    (line,) = refused(tmp_path / "c.yaml", tmp_path)
    assert message in line


@pytest.mark.parametrize("command", [["run", "config"], ["run", "no/file"], ["run", "c.json"], ["deploy", "c.yaml"]])
def test_a_missing_file_is_named_whatever_it_is_called(command: list[str], tmp_path: Path) -> None:
    """Ray's command takes a name without a suffix for an import path, and shows a traceback."""
    done = subprocess.run([SERVE, *command], capture_output=True, text=True, timeout=60, cwd=tmp_path, check=False)
    assert (done.returncode, "Traceback" in done.stderr) == (1, False), done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"{command[1]}: ")
    assert "o such file" in line


def test_a_port_in_use_ends_it_at_once(tmp_path: Path) -> None:
    config = yaml.safe_load((ROOT / "config.yaml").read_text())
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        config["http_options"]["port"] = port = taken.getsockname()[1]
        (tmp_path / "c.yaml").write_text(yaml.safe_dump(config))
        lines = refused(tmp_path / "c.yaml", tmp_path)
    assert f"http_options.port {port} on 127.0.0.1 is not free: Address already in use" in lines[-1]
    assert not any("chunkserve is ready" in line for line in lines)

"""The server as compose.yaml starts it, without a container: it answers, its health check passes, and Prometheus finds
what the dashboards ask for."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.error import URLError

import pytest
import yaml

from engine.checkpoints.model_cache import cache_root
from k8s import dashboards
from k8s.validate.compose import PROMETHEUS
from k8s.validate.metric_names import names_in
from kernels.cpu.native.library import cache_dir
from loadtest.server import ROOT, Server, free_port, launched
from serve_app.metrics.catalogue import BY_NAME
from tests.compose.project import mounts, services
from tests.k8s.image import DOCKERFILE

pytestmark = [pytest.mark.server, pytest.mark.slow]

SERVER = services()["chunkserve"]
NOT_HERE = re.compile(r"autoscaler_|ray_node_(gpus|gram)|ray_serve_autoscaling_(desired_replicas|\w+_delay_ms)")
"""What needs a GPU, autoscaling, or longer than the test takes."""


@dataclass(frozen=True)
class Running:
    server: Server
    temp: Path
    """What is /tmp in the container."""


def config_with_every_panel(path: Path) -> Path:
    """Write the service's configuration with what the panels need beyond it: only a tier that is set has series."""
    config = yaml.safe_load((ROOT / "config.yaml").read_text())
    config["applications"][0]["args"].setdefault("engine", {})["kv_tiers"] = {"host_memory_gib": 0.1}
    path.write_text(yaml.safe_dump(config))
    return path


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    """The command and environment of the service, with a free port of this machine and directories of its own."""
    temp = Path(tempfile.mkdtemp(prefix="cc", dir="/tmp"))
    here = {target: str(ROOT / source) for source, target, *_ in mounts(SERVER) if source.startswith(".")}
    here["/etc/chunkserve/config.yaml"] = str(config_with_every_panel(temp / "config.yaml"))
    port, command = free_port(), [here.get(word, word) for word in SERVER["entrypoint"]]
    command[0] = str(Path(sys.executable).with_name(command[0]))
    command[command.index("0.0.0.0")] = "127.0.0.1"
    (usage,) = re.findall(r"RAY_USAGE_STATS_ENABLED=\d", DOCKERFILE)
    (temp / "home").mkdir()  # empty, as a new volume is: Ray makes its token there
    places = {"RAY_TMPDIR": temp, "HOME": temp / "home", "CHUNKSERVE_CACHE": cache_root()}
    kernels = {"CHUNKSERVE_KERNELS_CACHE": cache_dir()}  # the image has them compiled
    own = {"CHUNKSERVE_VERBOSE": "1"} | {name: str(path) for name, path in (places | kernels).items()}
    environment = {**SERVER["environment"], **dict([usage.split("=")]), **own}
    try:
        with launched([*command, "--port", str(port)], port, environment, temp / "log") as server:
            server.wait_until_ready("/ready")
            yield Running(server, temp)
    finally:
        shutil.rmtree(temp, ignore_errors=True)


def get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=10) as response:
        text: str = response.read().decode()
        return text


def check(running: Running) -> int:
    """Run the health check of the service, with the server's port here."""
    kind, program, *words = SERVER["healthcheck"]["test"]
    assert (kind, program) == ("CMD", "python")
    words = [word.replace(":8000/", f":{running.server.port}/") for word in words]
    return subprocess.run([sys.executable, *words], capture_output=True, timeout=30, check=False).returncode


def test_the_health_check_passes_where_the_server_answers_and_fails_where_nobody_does(running: Running) -> None:
    assert check(running) == 0
    nobody = Running(Server(running.server.process, free_port(), running.temp), running.temp)
    assert check(nobody) != 0


def test_haproxy_is_in_front(running: Running) -> None:
    assert "Python proxy is in front" not in running.server.output


def test_a_chat_page_gets_an_answer_with_any_key(running: Running) -> None:
    (model,) = [entry["id"] for entry in json.loads(get(f"{running.server.url}/v1/models"))["data"]]
    body = {"model": model, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
    request = urllib.request.Request(
        f"{running.server.url}/v1/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json", "Authorization": "Bearer none"},
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        assert json.load(response)["choices"][0]["message"]["content"]


def series(text: str) -> set[str]:
    return set(re.findall(r"^([A-Za-z_:][\w:]*)", text, re.MULTILINE))


def listed(running: Running) -> list[str]:
    """Return Ray's addresses as Prometheus reads them, once Ray has written them."""
    jobs = yaml.safe_load(PROMETHEUS.read_text())["scrape_configs"]
    (path,) = [sd["files"][0] for job in jobs for sd in job.get("file_sd_configs", [])]
    file = running.temp / Path(path).relative_to("/tmp")
    deadline = time.monotonic() + 30
    while not file.exists() and time.monotonic() < deadline:
        time.sleep(0.2)
    (group,) = json.loads(file.read_text())
    assert file.stat().st_mode & 0o004, "Prometheus is another user"
    assert all(parent.stat().st_mode & 0o005 == 0o005 for parent in file.resolve().parents if parent > running.temp)
    return list(group["targets"])


def test_every_panel_has_its_series_in_what_prometheus_scrapes(running: Running) -> None:
    ours = {name for metric in BY_NAME.values() for name in (metric.name, f"{metric.name}_total")}
    asked = {
        name
        for dashboard in dashboards.DASHBOARDS
        for panel in dashboard.panels
        for query, _ in panel.queries
        for name in names_in(query)
        if re.match(r"(vllm|chunkserve):|ray_|autoscaler_", name) and ":ratio_" not in name
    }
    assert asked & ours
    deadline, missing = time.monotonic() + 30, asked
    while missing and time.monotonic() < deadline:  # Ray's agents report every few seconds
        found = series(get(f"{running.server.url}/metrics"))
        for address in listed(running):
            with suppress(URLError):  # listed before it listens; a series that never comes is missing below
                found |= series(get(f"http://{address}/metrics"))
        missing = {name for name in asked - found if not NOT_HERE.match(name)}
        time.sleep(0.5)
    assert not missing

"""What our `serve run` sets before Ray Serve is imported, when, and for whom; and HAProxy's launcher, run for real."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from loadtest.server import ROOT, free_port
from serve_app.edge.cors import VARIABLE, Policy, policies_in
from serve_app.edge.haproxy_config import PER_SOURCE, edited
from serve_app.front.haproxy import HAProxyMisconfigured, HAProxyUnusable, private_haproxy
from serve_app.front.proxy_env import ALL_OURS, ENABLE, GUARD, serving_environment
from serve_app.settings.cors import LOOPBACK

OURS = {"name": "a", "route_prefix": "/a", "import_path": "serve_app.app:build", "args": {}}
THEIRS = {"name": "b", "route_prefix": "/b", "import_path": "their.app:build"}
LOCAL = ["run", "--address", "local"]
HARD_STOP = "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S"
CONFIG_FILE = "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC"
BINARY = "RAY_SERVE_HAPROXY_BINARY_PATH"
FORCE_STOP = "RAY_SERVE_FORCE_STOP_UNHEALTHY_REPLICAS"
LOOP_INTERVAL = "RAY_SERVE_CONTROL_LOOP_INTERVAL_S"
NICENESS = "RAY_worker_niceness"
ONE_AT_A_TIME = "RAY_worker_killing_policy_by_group"
ONE_LOOP = {"RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD", "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP"}


def written(tmp_path: Path, *applications: dict[str, Any]) -> Path:
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump({"applications": list(applications)}))
    return path


def environment(*configs: Path, arguments: list[str] = LOCAL, **environ: str) -> dict[str, str]:
    """Return what is set while `serve run` runs."""
    with serving_environment(arguments, list(configs), environ):
        return dict(environ)


def test_haproxy_is_in_front_by_default(tmp_path: Path) -> None:
    chosen = environment(written(tmp_path, OURS))
    assert chosen[ENABLE] == "1"
    assert chosen.keys() >= {FORCE_STOP, LOOP_INTERVAL, NICENESS, ONE_AT_A_TIME, *ONE_LOOP}


def test_the_config_is_found_behind_another_yaml_file(tmp_path: Path) -> None:
    runtime_env = tmp_path / "runtime_env.yaml"
    runtime_env.write_text("env_vars: {}")
    assert environment(runtime_env, written(tmp_path, OURS))[ENABLE] == "1"


def test_what_the_user_set_stays(tmp_path: Path) -> None:
    users = {HARD_STOP: "7", CONFIG_FILE: "/their/haproxy.cfg", "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "1"}
    assert environment(written(tmp_path, OURS), **users).items() >= users.items()


def test_the_python_proxy_stays_when_the_user_asks_for_it(tmp_path: Path) -> None:
    chosen = environment(written(tmp_path, OURS), **{ENABLE: "0"})
    assert chosen.keys() == {ENABLE, VARIABLE, *ALL_OURS}
    assert chosen.keys() >= {FORCE_STOP, LOOP_INTERVAL, NICENESS, ONE_AT_A_TIME, *ONE_LOOP}


@pytest.mark.parametrize(
    ("arguments", "environ"),
    [
        (["run", "--address", "auto"], {}),
        (["run", "-a", "10.0.0.1:6379"], {}),
        (["run", "--address=10.0.0.1:6379"], {}),
        (["run"], {"RAY_ADDRESS": "10.0.0.1:6379"}),
    ],
)
def test_a_cluster_that_runs_already_keeps_its_own_environment(
    tmp_path: Path, arguments: list[str], environ: dict[str, str]
) -> None:
    assert environment(written(tmp_path, OURS), arguments=arguments, **environ) == environ


def test_a_cluster_that_ray_start_noted_is_left_alone_and_local_means_a_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = written(tmp_path, OURS)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    assert ENABLE in environment(config, arguments=["run"])
    (tmp_path / "ray").mkdir()
    (tmp_path / "ray" / "ray_current_cluster").write_text("10.0.0.1:6379")
    assert environment(config, arguments=["run"]) == {}
    assert ENABLE in environment(config)


def test_configs_without_our_application_and_other_commands_change_nothing(tmp_path: Path) -> None:
    assert environment(written(tmp_path, THEIRS)) == {}
    assert environment(arguments=["status"]) == {}


def test_beside_another_projects_application_handles_may_still_be_called_from_synchronous_code(tmp_path: Path) -> None:
    chosen = environment(written(tmp_path, OURS, THEIRS))
    assert chosen[ENABLE] == "1"
    assert not ONE_LOOP & chosen.keys()
    assert chosen[GUARD] == "serve_app.edge.http_server:guard_shared", "another application has error texts of its own"
    assert "RAY_SERVE_HAPROXY_RETRY_ON" not in chosen, "another application's requests may not be safe to repeat"


def test_each_applications_pages_are_those_of_its_settings(tmp_path: Path) -> None:
    keyed = OURS | {"args": {"auth": {"keys": [{"tenant": "a", "sha256": "0" * 64}]}}}
    chosen = {"allow_origins": ["https://a.example"], "max_age": 5}
    listed = OURS | {"route_prefix": "/b/c", "args": {"cors": chosen}}
    without_a_route = OURS | {"route_prefix": None}
    environ = environment(written(tmp_path, keyed, listed, without_a_route, THEIRS | {"route_prefix": "/"}))
    assert policies_in(environ) == (
        Policy("/b/c", ("https://a.example",), None, 5),
        Policy("/a", ("*",), LOOPBACK),
    )


@pytest.mark.parametrize(("content", "needed"), [("[]", False), (f"[{{tenant: a, sha256: {'a' * 64}}}]", True)])
def test_a_file_of_keys_counts_by_what_is_in_it(tmp_path: Path, content: str, needed: bool) -> None:
    keys = tmp_path / "keys.yaml"
    keys.write_text(content)
    (policy,) = policies_in(environment(written(tmp_path, OURS | {"args": {"auth": {"keys_file": str(keys)}}})))
    assert policy.allows_all is needed


def test_wrong_pages_that_the_user_set_end_the_command(tmp_path: Path) -> None:
    with pytest.raises(HAProxyUnusable, match=f"{VARIABLE} must be JSON such as"):
        environment(written(tmp_path, OURS), **{VARIABLE: "https://a.example"})


def test_an_expression_that_only_python_reads_ends_the_command_by_the_settings_name(tmp_path: Path) -> None:
    config = written(tmp_path, OURS | {"args": {"cors": {"allow_origin_regex": "(?a:x)"}}})
    with pytest.raises(HAProxyUnusable, match=r"args\.cors\.allow_origin_regex: HAProxy cannot read it.*\(\?a:x\)"):
        environment(config)


def test_haproxy_outlives_every_drain(tmp_path: Path) -> None:
    slow = OURS | {"args": {"drain_timeout_s": 10_000}}
    assert int(environment(written(tmp_path, OURS, slow))[HARD_STOP]) > 10_000


def test_haproxy_gives_up_a_client_that_stands_still_when_the_ingress_does(tmp_path: Path) -> None:
    patient = OURS | {"args": {"client_stall_timeout_s": 90.5}}
    assert environment(written(tmp_path, OURS, patient))["RAY_SERVE_HAPROXY_TIMEOUT_CLIENT_S"] == "91"


@pytest.mark.parametrize(("cores", "threads"), [(1, "1"), (2, "1"), (16, "4"), (384, "64")])
def test_haproxy_has_a_thread_for_every_four_cores_and_no_more_than_it_takes(
    cores: int, threads: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: cores)
    assert environment(written(tmp_path, OURS))["RAY_SERVE_HAPROXY_NBTHREAD"] == threads


def test_two_servers_share_no_file_and_no_port_and_leave_nothing(tmp_path: Path) -> None:
    config = written(tmp_path, OURS)
    first: dict[str, str] = {}
    second: dict[str, str] = {}
    with serving_environment(LOCAL, [config], first), serving_environment(LOCAL, [config], second):
        directories = [Path(environ[CONFIG_FILE]).parent for environ in (first, second)]
        assert [directory.stat().st_mode & 0o777 for directory in directories] == [0o700, 0o700]
        shared = first.items() & second.items()
    own = {name for name in first if name.endswith(("_PATH", "_LOC", "_BASE", "_FILE", "_PORT"))} - {GUARD}
    assert len(own) == 9
    assert not own & dict(shared).keys()
    assert not any(directory.exists() for directory in directories)


def test_paths_leave_room_for_what_ray_and_haproxy_add_to_them(tmp_path: Path) -> None:
    """The path of a Unix socket has 107 bytes. Ray adds its node's id, and HAProxy a process id while it binds."""
    directory = Path(environment(written(tmp_path, OURS))[CONFIG_FILE]).parent
    assert len(str(directory / ("n" * 56) / "metrics.sock.4194304.tmp")) <= 107


@pytest.mark.parametrize("binary", ["/no/such/haproxy", "/bin/false"])
def test_without_a_haproxy_that_runs_the_python_proxy_is_in_front_and_a_line_says_why(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], binary: str
) -> None:
    chosen = environment(written(tmp_path, OURS), **{BINARY: binary})
    assert ENABLE not in chosen
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("Ray Serve's Python proxy is in front, because HAProxy cannot run here: ")


def test_a_haproxy_that_was_asked_for_by_name_and_does_not_run_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(HAProxyUnusable, match="/no/such/haproxy"):
        environment(written(tmp_path, OURS), **{ENABLE: "1", BINARY: "/no/such/haproxy"})


def test_the_environment_is_set_before_ray_serve_is_imported() -> None:
    """Ray Serve reads the environment at import: set later, it would affect the daemons but not the command."""
    look = "import sys, serve_app.front.cli; sys.exit('ray.serve' in sys.modules)"
    subprocess.run([sys.executable, "-c", look], check=True, timeout=60, cwd=ROOT)


CONFIG = """
global
    maxconn 100
    tune.bufsize 16384
defaults
    mode http
    timeout client 5s
    timeout connect 1s
    timeout server 5s
    errorfile 503 /what/ray/wrote/500.http
frontend prometheus
    bind :{prometheus}
    http-request use-service prometheus-exporter if {{ path /metrics }}
frontend http_frontend
    bind 127.0.0.1:{port}
    default_backend nobody
backend nobody
    server gone 127.0.0.1:{nothing_there}
listen stats
  bind *:{stats}
  stats enable
  stats uri /stats
"""


def answer_of(url: str) -> httpx.Response:
    deadline = time.monotonic() + 10
    while True:
        try:
            return httpx.get(url)
        except httpx.TransportError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.02)


def test_a_failure_of_haproxys_own_has_openais_shape_and_its_pages_no_port(tmp_path: Path) -> None:
    port, prometheus, stats = free_port(), free_port(), free_port()
    config = tmp_path / "haproxy.cfg"
    config.write_text(CONFIG.format(port=port, prometheus=prometheus, stats=stats, nothing_there=free_port()))
    with ExitStack() as held:
        launcher = held.enter_context(private_haproxy({})).launcher
        process = held.enter_context(subprocess.Popen([launcher, "-db", "-f", config], stderr=subprocess.DEVNULL))
        held.callback(process.kill)
        refused = answer_of(f"http://127.0.0.1:{port}/v1/models")
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "service_unavailable"
        assert refused.headers["retry-after"] == "1"
        for closed in (prometheus, stats):
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection(("127.0.0.1", closed))
        pages = httpx.Client(transport=httpx.HTTPTransport(uds=str(tmp_path / "stats.sock")))
        with pages:
            assert "http_frontend" in pages.get("http://haproxy/stats;csv").text


def test_a_page_whose_port_the_user_chose_stays_on_it(tmp_path: Path) -> None:
    config = CONFIG.format(port=1, prometheus=2, stats=3, nothing_there=4)
    kept = edited(config, tmp_path, {"RAY_SERVE_HAPROXY_STATS_PORT": "3"})
    assert "bind *:3" in kept
    assert f"bind unix@{tmp_path}/prometheus.sock" in kept


@pytest.mark.parametrize("setting", [PER_SOURCE, "RAY_SERVE_HAPROXY_MAXCONN", "RAY_SERVE_HAPROXY_NBTHREAD"])
def test_a_wrong_setting_of_haproxy_ends_the_command_and_does_not_put_another_proxy_in_front(
    tmp_path: Path, setting: str
) -> None:
    with pytest.raises(HAProxyMisconfigured, match=f"{setting} must be a whole number"):
        environment(written(tmp_path, OURS), **{setting: "many"})


@pytest.mark.parametrize("given", ["/their/haproxy", "/venv/bin/chunkserve-haproxy"])
def test_the_launcher_becomes_the_binary_that_the_user_named_and_never_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str
) -> None:
    monkeypatch.setattr("serve_app.front.haproxy._check_runs", lambda *_: None)
    chosen = environment(written(tmp_path, OURS), **{BINARY: given})
    assert chosen[BINARY] != given
    assert chosen.get("CHUNKSERVE_HAPROXY_BINARY") == (given if "their" in given else None)

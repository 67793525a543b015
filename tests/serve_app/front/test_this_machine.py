"""Problems that only this machine can reveal are reported before Ray starts: by file, line, setting and value."""

from __future__ import annotations

import errno
import os
import socket
import stat
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import yaml

from engine.host.cores import usable_cores
from loadtest.server import free_port
from serve_app.front.arguments import Arguments
from serve_app.front.config_file import ConfigRefused, ServeConfig, read_config
from serve_app.front.modules import check_modules
from serve_app.front.preflight import preflight
from serve_app.front.this_machine import check_port, checking, why_missing

FAKE = {"engine": {"executor": "fake"}}


@pytest.fixture
def port() -> Iterator[int]:
    """Return a port that somebody listens on."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        yield taken.getsockname()[1]


def config(tmp_path: Path, args: Any = FAKE, port: int | None = None, **application: Any) -> ServeConfig:
    path = tmp_path / "c.yaml"
    http = {"host": "127.0.0.1", "port": port or free_port()}
    app = {"name": "a", "import_path": "serve_app.app:build", "args": args} | application
    path.write_text(yaml.safe_dump({"http_options": http, "applications": [app]}, sort_keys=False))
    return read_config(path)


def run(*arguments: str) -> Arguments:
    return Arguments.read(["run", *arguments, "c.yaml"], {})


def checked(of: ServeConfig) -> None:
    with checking(of, preflight(of), run()) as checks:
        for check in checks:
            check.finish()


def test_a_config_that_fits_passes(tmp_path: Path) -> None:
    checked(config(tmp_path))


def test_a_port_in_use_is_reported_at_once(tmp_path: Path, port: int) -> None:
    with pytest.raises(ConfigRefused, match=rf"c\.yaml, line 3: http_options.port {port} on 127.0.0.1 is not free"):
        check_port(config(tmp_path, port=port))


def test_without_a_proxy_no_port_need_be_free(tmp_path: Path, port: int) -> None:
    of = config(tmp_path, port=port)
    of.content["proxy_location"] = "Disabled"
    check_port(of)


def test_a_host_that_is_not_this_machines_is_reported(tmp_path: Path) -> None:
    of = config(tmp_path)
    of.content["http_options"]["host"] = "192.0.2.1"
    with pytest.raises(ConfigRefused, match=r"on 192.0.2.1 is not free: Cannot assign requested address"):
        check_port(of)


@pytest.mark.parametrize(
    ("import_path", "problem"),
    [
        ("serv_app.app:build", "there is no module 'serv_app.app'"),
        ("serve_app.ap:build", "there is no module 'serve_app.ap'"),
        ("serve_app.app.api.x:build", "there is no module"),
        ("serve_app.app:biuld", "serve_app.app has no biuld"),
    ],
)
def test_a_module_that_is_not_there_is_named(tmp_path: Path, import_path: str, problem: str) -> None:
    with pytest.raises(ConfigRefused) as caught:
        check_modules(config(tmp_path, import_path=import_path), run())
    assert f"line 6, application a: import_path: {problem}" in str(caught.value)
    assert str(caught.value).endswith("this project's is serve_app.app:build")


@pytest.mark.parametrize(
    "import_path", ["serve_app.app:build", "serve_app.app.build", "json:x", "serve_app.api.openai.sse:y"]
)
def test_a_module_that_is_there_passes_and_is_not_imported(tmp_path: Path, import_path: str) -> None:
    check_modules(config(tmp_path, import_path=import_path), run())


def test_a_module_may_come_with_the_runtime_env(tmp_path: Path) -> None:
    files = {"working_dir": "https://example.com/a.zip"}
    check_modules(config(tmp_path, import_path="theirs:app", runtime_env=files), run())


@pytest.mark.parametrize("option", ["--working-dir=there", "--runtime-env r.yaml", "--runtime-env-json {}"])
def test_a_module_may_come_with_what_the_command_names(tmp_path: Path, option: str) -> None:
    check_modules(config(tmp_path, import_path="theirs:app"), run(*option.split()))


@pytest.mark.parametrize("option", ["", "--app-dir {}", "--app-dir={}", "-d {}", "-d{}"])
def test_a_module_may_be_where_ray_looks(tmp_path: Path, option: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A console script has neither directory in its `sys.path`."""
    (tmp_path / "my_own_app.py").write_text("")
    monkeypatch.chdir(tmp_path if not option else "/")
    before = list(sys.path)
    check_modules(config(tmp_path, import_path="my_own_app:app"), run(*option.format(tmp_path).split()))
    assert sys.path == before


def test_a_module_in_no_directory_of_rays_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_own_app.py").write_text("")
    monkeypatch.chdir("/")
    with pytest.raises(ConfigRefused, match="there is no module 'my_own_app'"):
        check_modules(config(tmp_path, import_path="my_own_app:app"), run("--name", "--working-dir"))


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (FAKE | {"auth": {"keys_file": "/no/such/keys"}}, "args.auth.keys_file: /no/such/keys: No such file"),
        (
            {"engine": {"kv_tiers": {"disk_path": "/kv", "disk_key_file": "/no/key"}}},
            "args.engine.kv_tiers.disk_key_file: there is no file /no/key",
        ),
        (
            {"engine": {"max_loras": 1}, "lora_adapters": {"law": "/no/such/adapter"}},
            "args.lora_adapters.law: there is no directory /no/such/adapter",
        ),
    ],
)
def test_a_file_that_a_replica_would_not_find_is_named(tmp_path: Path, args: Any, message: str) -> None:
    with pytest.raises(ConfigRefused) as caught:
        checked(config(tmp_path, args))
    assert message in str(caught.value)


def test_of_a_file_that_this_user_may_not_look_for_it_is_said_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert (why_missing(str(tmp_path), stat.S_IFDIR), why_missing(str(tmp_path))) == (None, "")
    assert (why_missing(__file__), why_missing(f"{__file__}/x"), why_missing("\0")) == (None, "", "")
    assert why_missing(str(tmp_path / ("k" * 300))) == ": File name too long"
    monkeypatch.setattr(os, "stat", Mock(side_effect=PermissionError(errno.EACCES, "Permission denied")))
    assert why_missing("/etc/ssl/private/key.pem") == ": Permission denied"


@pytest.mark.parametrize(
    ("engine", "message"),
    [
        ({"executor": "fake", "device": "cuda"}, "device is cuda, but engine_num_gpus is 0"),
        (
            {"executor": "fake", "fake": {"recurrent_state": True}, "scheduler": {"chunk_owner": "engine"}},
            "args.engine: scheduler.chunk_owner is engine, but this model has a recurrent state",
        ),
        ({"num_threads": 1000}, "args.engine: num_threads is 1000: expected at most"),
        (
            {"kv_cache_memory_gib": 1e6},
            "args.engine: kv_cache_memory_gib is 1000000.0, which takes 1000000.00 GiB",
        ),
    ],
)
def test_what_an_engine_would_refuse_is_reported_by_its_setting(
    tmp_path: Path, engine: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigRefused) as caught:
        checked(config(tmp_path, {"engine": engine}))
    assert message in str(caught.value)


def test_ranks_that_may_be_on_several_machines_are_not_all_checked_by_this_one(tmp_path: Path) -> None:
    """Regression: `serve` refused an engine that several nodes could hold."""
    args = {"engine": {"tensor_parallel_size": 2, "num_threads": 2 * usable_cores()}}
    checked(config(tmp_path, args | {"tensor_parallel_placement": "spread"}))
    with pytest.raises(ConfigRefused, match=r"num_threads is \d+: expected at most"):
        checked(config(tmp_path, args))


def test_a_refusal_of_an_engine_has_its_settings_line(tmp_path: Path) -> None:
    of = config(tmp_path, {"engine": {"max_num_seqs": 8, "max_model_len": 100_000}})
    with pytest.raises(ConfigRefused, match="max_model_len is 100000, but the checkpoint") as caught:
        checked(of)
    line = int(str(caught.value).partition("line ")[2].partition(",")[0])
    assert "max_model_len" in of.path.read_text().splitlines()[line - 1]


def test_images_for_a_model_that_takes_none_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigRefused, match=r"args.images is set, but smollm2-135m-instruct takes text alone"):
        checked(config(tmp_path, FAKE | {"images": {"max_per_request": 2}}))


def test_a_check_that_nobody_waits_for_ends(tmp_path: Path) -> None:
    of = config(tmp_path)
    with checking(of, preflight(of), run()) as checks:
        (check,) = checks
    assert check.process.returncode is not None

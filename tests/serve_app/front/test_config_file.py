"""An invalid config file is reported by line, with what was expected; nobody sees a traceback."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from loadtest.server import ROOT
from serve_app.front.config_file import (
    ACTOR_KEYS,
    APPLICATION_KEYS,
    AUTOSCALING_KEYS,
    DEPLOYMENT_KEYS,
    GRPC_KEYS,
    HTTP_KEYS,
    PROXIES,
    TOP_KEYS,
    ConfigRefused,
    address_of,
    read_config,
)
from serve_app.front.config_kinds import APPLICATION_KINDS, HTTP_KINDS, TOP_KINDS
from tests.test_architecture import run_python

APPLICATION = "applications:\n  - name: a\n    import_path: serve_app.app:build\n"


def refusal(tmp_path: Path, text: str | bytes) -> str:
    path = tmp_path / "c.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConfigRefused) as caught:
        read_config(path)
    return str(caught.value).replace(str(path), "c.yaml")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "c.yaml is empty: expected a Serve config, a mapping with `applications:`"),
        ("# nothing\n", "c.yaml is empty: expected a Serve config"),
        ("- a\n", "c.yaml, line 1: expected a Serve config, a mapping"),
        (
            "applications:\n  - name: [a\n",
            "c.yaml, line 3: not YAML: while parsing a flow sequence, expected ',' or ']'",
        ),
        (
            "applications:\n\t- name: a\n",
            "c.yaml, line 2: not YAML: while scanning for the next token, found character",
        ),
        ("a: !!python/object:os.system x\n", "c.yaml, line 1: not YAML: could not determine a constructor"),
        (
            "http_options:\n  host: 5\n" + APPLICATION,
            "c.yaml, line 2: http_options.host: expected a name or address (given: 5)",
        ),
        (
            "http_options:\n  port: 8000\n  request_timeout_s: -1\n" + APPLICATION,
            "c.yaml, line 3: http_options.request_timeout_s: expected a number of seconds above 0 (given: -1)",
        ),
        (
            APPLICATION + "    route_prefix: 5\n",
            "c.yaml, line 4: applications.0.route_prefix: expected a path that beg",
        ),
        (
            APPLICATION + "    route_prefix: /a/\n",
            "c.yaml, line 4: applications.0.route_prefix: expected a path that b",
        ),
        (b"\xff\xfe\x00", "c.yaml is not text in UTF-8"),
        ("applications: &a\n- *a\n", "c.yaml: expected a Serve config, but it is nested too deeply, or a part of it"),
        ("[" * 100_000, "c.yaml: expected a Serve config, but it is nested too deeply"),
        ("aplications: []\n", "c.yaml, line 1: unknown key aplications: did you mean applications?"),
        ("http_options: {}\n", "c.yaml, line 1: applications: expected a list of at least one application"),
        (f"{APPLICATION}qqq: 1\n", "c.yaml, line 4: unknown key qqq: expected one of proxy_location, http_options,"),
        (f"{APPLICATION}auth: 1\n", "target_capacity; settings of an application stand under its `args`"),
        (f"{APPLICATION}    arg: 1\n", "c.yaml, line 4: unknown key applications.0.arg: did you mean args?"),
        (f"http_options:\n  prot: 1\n{APPLICATION}", "line 2: unknown key http_options.prot: did you mean port?"),
        (
            f"http_options:\n  port: 80000\n{APPLICATION}",
            "line 2: http_options.port: expected a number from 1 to",
        ),
        (f"http_options:\n  port: '80000'\n{APPLICATION}", "expected a number from 1 to 65535 (given: '80000')"),
        (f"http_options:\n  port: '-1'\n{APPLICATION}", "expected a number from 1 to 65535 (given: '-1')"),
        (f"http_options:\n  port:\n{APPLICATION}", "expected a number from 1 to 65535 (given: None)"),
        (f"http_options:\n  port: true\n{APPLICATION}", "expected a number from 1 to 65535 (given: True)"),
        (f"http_options:\n  x-a: 1\n{APPLICATION}", "line 2: unknown key http_options.x-a: expected one of host"),
        (f"http_options: 8000\n{APPLICATION}", "line 1: http_options: expected a mapping with `port:` (given: 8000)"),
        ("applications: []\n", "c.yaml, line 1: applications: expected a list of at least one application (given: [])"),
        ("applications:\n  - a\n", "c.yaml, line 2: applications.0: expected a mapping with `import_path:`"),
        ("applications:\n  - name: a\n", "c.yaml, line 2: applications.0.import_path: expected `module:attribute`"),
        (f"{APPLICATION}b: 2026-02-30\n", "c.yaml: not YAML: day is out of range for month. A value with special"),
        (
            f"proxy_location: All\n{APPLICATION}",
            "c.yaml, line 1: proxy_location: expected one of Disabled, HeadOnly, Ev",
        ),
        (f"logging_config: 3\n{APPLICATION}", "c.yaml, line 1: logging_config: expected a mapping (given: 3)"),
        (
            f"{APPLICATION}  - name: a\n    route_prefix: /b\n    import_path: b:c\n",
            "c.yaml, line 4: applications.1.name: application 0 has it already: expected another for each application",
        ),
        (
            f"{APPLICATION}  - name: b\n    import_path: b:c\n",
            "c.yaml, line 4: applications.1.route_prefix: application 0 has it already: expected another for each "
            "application (given: '/')",
        ),
        *(
            (
                f"applications:\n  - import_path: '{path}'\n",
                f"`module:attribute`, such as serve_app.app:build (given: '{path}')",
            )
            for path in ("", ":", "a", "a:", ".a", "a:b:c")
        ),
        (f"{APPLICATION}    args: 3\n", "c.yaml, line 4: applications.0.args: expected a mapping (given: 3)"),
        (f"{APPLICATION}    args:\n", "line 4: applications.0.args: expected a mapping, or no such key (given: None)"),
        (f"{APPLICATION}    runtime_env:\n", "line 4: applications.0.runtime_env: expected a mapping, or no such key"),
        (
            f"{APPLICATION}    deployments: {{}}\n",
            "line 4: applications.0.deployments: expected a list of mappings (gi",
        ),
        (
            f"{APPLICATION}    deployments: [a]\n",
            "applications.0.deployments: expected a list of mappings (given: ['a'])",
        ),
        (APPLICATION.replace("name: a", "name: ''"), "line 2: applications.0.name: expected a text that is not empty"),
        (
            f"{APPLICATION}    external_scaler_enabled: x\n",
            "line 4: applications.0.external_scaler_enabled: expected true or false (given: 'x')",
        ),
        (f"target_capacity: x\n{APPLICATION}", "line 1: target_capacity: expected a number from 0 to 100 (given: 'x')"),
        (
            f"http_options: {{ssl_keyfile_password: 1}}\n{APPLICATION}",
            "http_options.ssl_keyfile_password: expected a text, such as digits in quotes (given: …)",
        ),
        (f"{APPLICATION}    port: 8001\n", "line 4: applications.0.port: stands in http_options, for all applications"),
        (
            APPLICATION.replace("name: a", "name: 2024"),
            "applications.0.name: expected a text that is not empty (given: 2024)",
        ),
        (f"http_options:\n{APPLICATION}", "line 1: http_options: expected a mapping with `port:` (given: None)"),
        (f"proxy_location:\n{APPLICATION}", "line 1: proxy_location: expected one of Disabled, HeadOnly, EveryNode"),
        (
            f"http_options: {{keep_alive_timeout_s:}}\n{APPLICATION}",
            "http_options.keep_alive_timeout_s: expected a whole number of seconds, or no such key (given: None)",
        ),
        (
            f"{APPLICATION}    deployments:\n      - name: Engine\n        num_replica: 2\n",
            "c.yaml, line 6: unknown key applications.0.deployments.0.num_replica: did you mean num_replicas?",
        ),
        (
            f"{APPLICATION}    deployments:\n      - {{name: Engine, ray_actor_options: {{num_cpu: 2}}}}\n",
            "line 5: unknown key applications.0.deployments.0.ray_actor_options.num_cpu: did you mean num_cpus?",
        ),
        (
            f"{APPLICATION}    deployments:\n      - {{name: Engine, autoscaling_config: {{min_replica: 2}}}}\n",
            "unknown key applications.0.deployments.0.autoscaling_config.min_replica: did you mean min_replicas?",
        ),
        (f"grpc_options: {{prot: 1}}\n{APPLICATION}", "line 1: unknown key grpc_options.prot: did you mean port?"),
        (f"{APPLICATION}    name: b\n", "c.yaml, line 4: name stands on line 2 already: expected it once"),
    ],
)
def test_an_invalid_config_is_reported_by_line_with_what_was_expected(tmp_path: Path, text: str, message: str) -> None:
    assert message in refusal(tmp_path, text)


def test_one_misspelt_key_is_one_line(tmp_path: Path) -> None:
    assert refusal(tmp_path, "aplications: []\n").splitlines() == [
        "c.yaml, line 1: unknown key aplications: did you mean applications?"
    ]


def test_a_top_level_key_may_hold_what_the_rest_refers_to(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(f"x-common: &common {{ray_actor_options: {{}}}}\n{APPLICATION}    args: *common\n")
    assert read_config(path).applications[0]["args"] == {"ray_actor_options": {}}


@pytest.mark.parametrize("port", ["8123", "'8123'", "'08123'"])
def test_a_port_may_be_a_string_of_digits(tmp_path: Path, port: str) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(f"http_options: {{port: {port}}}\n{APPLICATION}")
    assert address_of(read_config(path)) == ("0.0.0.0", 8123)


def test_a_missing_file_and_a_directory_are_reported_by_name(tmp_path: Path) -> None:
    for path, why in ((tmp_path / "none.yaml", "No such file"), (tmp_path, "Is a directory")):
        with pytest.raises(ConfigRefused, match=f"{path}: {why}.*: expected the YAML file of a Serve config"):
            read_config(path)


def test_a_value_is_found_by_its_line_and_an_absent_one_by_what_it_would_be_in() -> None:
    config = read_config(ROOT / "config.yaml")
    lines = (ROOT / "config.yaml").read_text().splitlines()

    def line(*keys: str | int) -> str:
        return lines[int(config.where(*keys).rpartition(" ")[2]) - 1].strip()

    assert line("http_options", "port") == "port: 8000"
    assert line("applications", 0, "args", "engine", "max_num_seqs") == "max_num_seqs: 64"
    assert line("applications", 0, "args", "engine", "absent") == "engine:"


@pytest.mark.parametrize("name", ["config.yaml", "config.gpu.yaml"])
def test_the_configs_of_this_project_are_ones(name: str) -> None:
    assert read_config(ROOT / name).applications[0]["name"] == "chunkserve"


def test_applications_without_a_route_may_be_several(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    more = (f"  - {{name: {name}, route_prefix: null, import_path: b.c}}\n" for name in "bc")
    path.write_text(f"proxy_location: EveryNode\n{APPLICATION}{''.join(more)}")
    assert len(read_config(path).applications) == 3


def test_the_keys_of_deployments_and_of_grpc_are_those_of_ray_serve() -> None:
    """Ray ignores others: a misspelt number of replicas had no effect, and no check found it."""
    code = (
        "import json; from ray.serve.config import AutoscalingConfig as scaling; "
        "from ray.serve.schema import DeploymentSchema, RayActorOptionsSchema, gRPCOptionsSchema; "
        "of_ray = (DeploymentSchema, RayActorOptionsSchema, scaling, gRPCOptionsSchema); "
        "print(json.dumps([sorted(of.model_fields) for of in of_ray]))"
    )
    assert json.loads(run_python(code)) == [
        sorted(known) for known in (DEPLOYMENT_KEYS, ACTOR_KEYS, AUTOSCALING_KEYS, GRPC_KEYS)
    ]


_CHECKED_OTHERWISE = {
    *("proxy_location", "http_options", "applications", "host", "port", "import_path"),
    *("request_timeout_s", "route_prefix"),
}


def test_the_places_of_proxies_are_those_of_ray_serve() -> None:
    code = (
        "import json; from ray.serve.config import ProxyLocation; print(json.dumps([at.value for at in ProxyLocation]))"
    )
    assert set(json.loads(run_python(code))) == set(PROXIES)


def test_the_keys_and_the_kinds_of_their_values_are_those_of_ray_serve() -> None:
    """It runs in another process, because this one may not import ray.serve before a test has set its environment."""
    values = (
        None,
        3,
        "x",
        [],
        {},
        "",
        "5",
        "5.0",
        "5.5",
        "1e1",
        "yes",
        "nan",
        "٣",
        True,
        1.0,
        1.5,
        -1,
        101,
        1e300,
        ["a"],
    )
    code = f"""
import json
from typing import Annotated
from pydantic import TypeAdapter, ValidationError
from ray.serve.schema import HTTPOptionsSchema, ServeApplicationSchema, ServeDeploySchema
def takes(field, value):
    try:
        TypeAdapter(Annotated[field.annotation, field.title, *field.metadata]).validate_python(value)
    except (ValidationError, AttributeError):  # the latter from a deployment that is no mapping
        return False
    return True
print(json.dumps([
    {{key: [takes(field, value) for value in {values!r}] for key, field in of.model_fields.items()}}
    for of in (ServeDeploySchema, HTTPOptionsSchema, ServeApplicationSchema)
]))
"""
    for known, kinds, of_ray in zip(
        (TOP_KEYS, HTTP_KEYS, APPLICATION_KEYS),
        (TOP_KINDS, HTTP_KINDS, APPLICATION_KINDS),
        json.loads(run_python(code)),
        strict=True,
    ):
        assert sorted(known) == sorted(of_ray)
        for key, kind in kinds.items():
            for value, is_taken in zip(values, of_ray[key], strict=True):
                is_refused_elsewhere = (key, value) == ("name", "")  # by Ray's schema of the whole file
                assert kind.takes(value) == (is_taken and not is_refused_elsewhere), (key, value)
        assert {*of_ray} <= {*kinds, *_CHECKED_OTHERWISE}

"""compose.yaml: its services fit together, are open to this machine alone, and set what the pinned images know."""

from __future__ import annotations

import json
import re
import shlex
import signal
import tomllib
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import yaml
from ray._private.ray_constants import PROMETHEUS_SERVICE_DISCOVERY_FILE

from k8s import dashboards
from k8s.image.build import image_name
from k8s.validate import compose
from k8s.validate.compose import COMPOSE, DIRECTORY, OVERRIDES, PROMETHEUS
from k8s.validate.manifests import ROOT
from serve_app.auth.keys import digest
from serve_app.front import haproxy
from serve_app.front.command.serve import main as chunkserve_serve
from serve_app.settings.application import AppSettings
from tests.compose.images import IMAGES
from tests.compose.project import Doc, VariableMissing, interpolated, mounts, project, seconds, services, variables_of
from tests.k8s.image import DOCKERFILE

GPU, KEYS, DISK = OVERRIDES
SET = {"CHUNKSERVE_API_KEY": "k", "CHUNKSERVE_KV_DISK": "/mnt/kv"}
SERVICES = services()
SERVER = SERVICES["chunkserve"]
OTHERS = {name: service for name, service in SERVICES.items() if name != "chunkserve"}
PORTS = {"chunkserve": 8000} | {name: IMAGES[service["image"]].port for name, service in OTHERS.items()}
"""The port on which each service listens in its container."""
WRITES_ELSEWHERE = {"open-webui"}
"""Their images write into their own files when they start."""
PAGE = (ROOT / "docs" / "how-to" / "compose.md").read_text()


# --- who can reach it -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("added", [(), (GPU,), (KEYS,), (DISK,), OVERRIDES])
def test_every_port_is_published_on_this_machine_alone(added: tuple[Path, ...]) -> None:
    """A port without an address would be open to the network, past the host's firewall."""
    for name, service in services(*added, **SET).items():
        ((address, _, inside),) = [port.split(":") for port in service["ports"]]
        assert (address, int(inside)) == ("127.0.0.1", PORTS[name])
    published = [service["ports"][0].split(":")[1] for service in SERVICES.values()]
    assert len(set(published)) == len(published)


@pytest.mark.parametrize("name", SERVICES)
def test_a_service_has_no_more_rights_than_it_needs(name: str) -> None:
    service = SERVICES[name]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert not {"privileged", "cap_add", "network_mode", "pid", "devices"} & service.keys()
    assert service.get("read_only", False) is (name not in WRITES_ELSEWHERE)
    assert (service.get("cap_drop") == ["ALL"]) is (name not in WRITES_ELSEWHERE)


@pytest.mark.parametrize("name", SERVICES)
def test_a_service_comes_back_and_has_a_limit_of_memory_and_of_logs(name: str) -> None:
    service = SERVICES[name]
    assert service["restart"] == "unless-stopped"
    assert list(service["deploy"]["resources"]["limits"]) == ["memory"], "a limit of CPUs would stall streams"
    assert service["logging"]["options"].keys() == {"max-size", "max-file"}


@pytest.mark.parametrize("added", [(), (GPU,), (KEYS,)])
def test_what_a_service_mounts_is_there_and_it_cannot_change_it(added: tuple[Path, ...]) -> None:
    whole = project(*added, **SET)
    for service in whole["services"].values():
        for source, _, *mode in mounts(service):
            if source.startswith("."):
                assert (ROOT / source).exists(), source
                assert mode == ["ro"], source
            else:
                assert source in whole["volumes"]


def test_a_disk_for_kv_is_a_directory_of_the_machine_that_the_server_may_write() -> None:
    """A volume that Docker makes would belong to root, and the server runs as user 1000."""
    service = services(DISK, **SET)["chunkserve"]
    assert mounts(service)[-1] == ["/mnt/kv", "/var/cache/chunkserve"]
    assert service["secrets"] == ["kv-key"]
    page = (ROOT / "docs" / "how-to" / "keep-prefixes.md").read_text()
    assert "disk_path: /var/cache/chunkserve/kv" in page
    assert "disk_key_file: /run/secrets/kv-key" in page


def test_no_secret_is_in_the_files_and_git_takes_none_of_the_places_where_they_belong() -> None:
    secrets = project(KEYS, DISK, **SET)["secrets"].values()
    ignored = (ROOT / ".gitignore").read_text().splitlines()
    assert {"/.env", *(secret["file"].removeprefix(".") for secret in secrets)} <= set(ignored)
    for file, variable in ((KEYS, "CHUNKSERVE_API_KEY"), (DISK, "CHUNKSERVE_KV_DISK")):
        with pytest.raises(VariableMissing, match=rf"{variable}: set it in \.env"):
            services(file)


def test_the_example_of_the_environment_names_every_variable() -> None:
    named = set(re.findall(r"^(\w+)=", (DIRECTORY / "env.example").read_text(), re.MULTILINE))
    assert named == set().union(*(variables_of(path) for path in (COMPOSE, *OVERRIDES)))


# --- images -----------------------------------------------------------------------------------------------------------


def test_the_server_is_the_image_that_the_manifests_run_built_from_the_same_file() -> None:
    assert f"--tag {SERVER['image']} ." in DOCKERFILE
    assert SERVER["image"] == image_name(), "what is built without a daemon can be loaded in its place"
    for added in ((), (GPU,)):
        build = services(*added)["chunkserve"]["build"]
        assert (ROOT / build["context"] / build["dockerfile"]).is_file()
        assert build["args"].keys() <= set(re.findall(r"^ARG (\w+)", DOCKERFILE, re.MULTILINE))


def test_the_image_for_gpus_has_another_name_and_its_extras_are_the_projects() -> None:
    """Under one name, an image for the CPU that was built before would be taken for it."""
    on_gpu = services(GPU)["chunkserve"]
    assert on_gpu["image"] != SERVER["image"]
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    (default,) = re.findall(r"^ARG EXTRAS=(.+)$", DOCKERFILE, re.MULTILINE)
    asked = on_gpu["build"]["args"]["EXTRAS"]
    assert {*default.split(",")} < {*asked.split(",")} <= extras.keys()
    (device,) = on_gpu["deploy"]["resources"]["reservations"]["devices"]
    assert (device["driver"], device["count"], device["capabilities"]) == ("nvidia", 1, ["gpu"])


@pytest.mark.parametrize("name", OTHERS)
def test_another_projects_image_has_a_version_and_knows_what_is_set(name: str) -> None:
    service = OTHERS[name]
    image = IMAGES[service["image"]]
    assert re.fullmatch(r"[\w./-]+:v?\d+\.\d+\.\d+(-slim)?", service["image"])
    assert {flag.partition("=")[0] for flag in service.get("command", [])} <= image.flags
    assert service.get("environment", {}).keys() <= image.variables
    if image.own_check:
        assert "healthcheck" not in service
    else:
        assert service["healthcheck"]["test"][1] in image.programs
        assert urlsplit(service["healthcheck"]["test"][-1]).port == image.port


# --- the server -------------------------------------------------------------------------------------------------------


@pytest.fixture
def signals_as_before() -> Iterator[None]:
    """The command decides for its process what a signal does."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def served(service: Doc, scratch: Path, **configs: str) -> Doc:
    """Return the config that a service's command serves, checked as `chunkserve check` does. `configs`: other paths of
    files that are mounted, by their names without a suffix."""
    program, command, *words = [*service["entrypoint"], *service.get("command", [])]
    assert (program, command) == ("chunkserve", "serve")
    here = {target: str(ROOT / source) for source, target, *_ in mounts(service)}
    here["/run/secrets/api-keys"] = str(scratch / "api-keys.yaml")
    here |= {f"/etc/chunkserve/{name}.yaml": path for name, path in configs.items()}
    made = scratch / "made.yaml"
    words = [here.get(word, word) for word in words]
    assert chunkserve_serve([*words, "--write-config", str(made)], "chunkserve serve") == 0
    config: Doc = yaml.safe_load(made.read_text())
    return config


@pytest.mark.usefixtures("signals_as_before")
@pytest.mark.parametrize(("added", "config"), [((), "config.yaml"), ((GPU,), "config.gpu.yaml")])
def test_the_servers_command_serves_the_projects_own_config_to_the_other_services(
    added: tuple[Path, ...], config: str, tmp_path: Path
) -> None:
    made, shipped = served(services(*added)["chunkserve"], tmp_path), yaml.safe_load((ROOT / config).read_text())
    assert made["http_options"] == {"host": "0.0.0.0", "port": PORTS["chunkserve"]}
    (ours,), (theirs,) = made["applications"], shipped["applications"]
    assert ours["args"]["model"] == theirs["args"]["model"]
    assert ours["args"].get("engine_replicas", 1) == 1
    assert "autoscaling" not in ours["args"], "the machine has one GPU"


@pytest.mark.usefixtures("signals_as_before")
@pytest.mark.parametrize(("added", "name"), [((), "config"), ((GPU,), "config.gpu")])
def test_the_server_is_where_the_others_look_whatever_port_its_config_says(
    added: tuple[Path, ...], name: str, tmp_path: Path
) -> None:
    """The chat page waited for ever for a server that listened elsewhere in its container."""
    changed = yaml.safe_load((ROOT / f"{name}.yaml").read_text())
    changed["http_options"]["port"] = 9000
    path = tmp_path / "changed.yaml"
    path.write_text(yaml.safe_dump(changed))
    made = served(services(*added)["chunkserve"], tmp_path, **{name: str(path)})
    assert made["http_options"]["port"] == PORTS["chunkserve"]


@pytest.mark.usefixtures("signals_as_before")
@pytest.mark.parametrize("files", [(KEYS,), (GPU, KEYS), (KEYS, GPU)], ids=["keys", "gpu+keys", "keys+gpu"])
def test_with_keys_the_server_reads_the_mounted_file_of_keys(files: tuple[Path, ...], tmp_path: Path) -> None:
    """Each file once replaced the other's command: the GPU's image served the CPU's config, or the server was open."""
    (tmp_path / "api-keys.yaml").write_text(yaml.safe_dump([{"tenant": "ann", "sha256": digest(b"k")}]))
    added = project(*files, CHUNKSERVE_API_KEY="k")
    service = added["services"]["chunkserve"]
    (ours,) = served(service, tmp_path)["applications"]
    assert ours["args"]["auth"]["keys_file"] == str(tmp_path / "api-keys.yaml")
    assert service["command"][-1] == f"/run/secrets/{service['secrets'][0]}"
    del ours["args"]["auth"]
    (tmp_path / "open").mkdir()
    without = services(*(file for file in files if file != KEYS))["chunkserve"]
    assert served(without, tmp_path / "open")["applications"] == [ours], "the keys are the only difference"
    assert added["secrets"].keys() == set(service["secrets"])
    assert added["services"]["open-webui"]["environment"]["OPENAI_API_KEY"] == "k"


@pytest.mark.parametrize("config", ["config.yaml", "config.gpu.yaml"])
def test_the_server_has_a_minute_to_end_after_its_last_stream_had_its_time(config: str) -> None:
    """Docker kills it after the grace period, ten seconds by default, which would cut its streams."""
    args = yaml.safe_load((ROOT / config).read_text())["applications"][0]["args"]
    assert seconds(SERVER["stop_grace_period"]) == AppSettings.model_validate(args).drain_timeout_s + 60


def test_haproxy_can_start_in_a_container_that_is_read_only() -> None:
    """Docker's own defaults for a tmpfs forbid to execute the launcher; the server would go on without HAProxy."""
    (tmp,) = SERVER["tmpfs"]
    path, _, options = tmp.partition(":")
    assert path == "/tmp"
    assert {"exec", "mode=1777"} <= set(options.split(","))
    assert SERVER["ulimits"]["nofile"] >= haproxy.open_files()


def test_the_servers_home_is_the_images_user_s_so_that_a_new_volume_belongs_to_it() -> None:
    """Docker gives a new volume the owner of the directory that it covers."""
    homes = [target for source, target, *_ in mounts(SERVER) if source == "home"]
    assert homes == re.findall(r"^WORKDIR (/home/\w+)$", DOCKERFILE, re.MULTILINE)
    assert f"--create-home {Path(homes[0]).name}" in DOCKERFILE
    assert "uid=1000" in project()["volumes"]["ray"]["driver_opts"]["o"]


# --- how they find each other -----------------------------------------------------------------------------------------


def listens(url: str) -> bool:
    parts = urlsplit(url)
    return PORTS.get(parts.hostname or "") == parts.port


def test_the_chat_page_prometheus_and_grafana_ask_services_where_those_listen() -> None:
    assert listens(SERVICES["open-webui"]["environment"]["OPENAI_API_BASE_URL"])
    assert SERVICES["open-webui"]["environment"]["OPENAI_API_BASE_URL"].endswith("/v1")
    (source,) = yaml.safe_load((DIRECTORY / "grafana" / "datasources" / "prometheus.yaml").read_text())["datasources"]
    assert listens(source["url"])
    jobs = {job["job_name"]: job for job in yaml.safe_load(PROMETHEUS.read_text())["scrape_configs"]}
    ((target,),) = [static["targets"] for static in jobs["chunkserve"]["static_configs"]]
    assert listens(f"http://{target}")
    assert "metrics_path" not in jobs["chunkserve"], "the default, /metrics, is the server's"


def test_the_chat_page_waits_for_a_server_that_answers() -> None:
    assert SERVICES["open-webui"]["depends_on"] == {"chunkserve": {"condition": "service_healthy"}}
    assert f"http://127.0.0.1:{PORTS['chunkserve']}/ready" in SERVER["healthcheck"]["test"][-1]


def inside(service: Doc, path: str) -> Path:
    """Return the file of the repository that a service has at `path`."""
    for source, target, *_ in mounts(service):
        if source.startswith(".") and (path == target or path.startswith(f"{target}/")):
            return ROOT / source / path[len(target) :].lstrip("/") if path != target else ROOT / source
    raise AssertionError(f"{path} is not mounted")


def test_prometheus_finds_its_configuration_its_rules_and_rays_addresses() -> None:
    prometheus, config = SERVICES["prometheus"], yaml.safe_load(PROMETHEUS.read_text())
    (file,) = [flag.partition("=")[2] for flag in prometheus["command"] if flag.startswith("--config.file")]
    assert inside(prometheus, file) == PROMETHEUS
    assert [inside(prometheus, path) for path in config["rule_files"]] == [compose.RULES]
    (ray,) = [job for job in config["scrape_configs"] if job["job_name"] == "ray"]
    ((listed,),) = [sd["files"] for sd in ray["file_sd_configs"]]
    assert listed == f"/tmp/ray/{PROMETHEUS_SERVICE_DISCOVERY_FILE}"
    for service, mode in ((SERVER, []), (prometheus, ["ro"])):  # the list is a link to a path in the same volume
        assert ["ray", "/tmp/ray", *mode] in mounts(service)


def test_grafana_finds_its_data_source_and_every_dashboard() -> None:
    grafana = SERVICES["grafana"]
    assert inside(grafana, "/etc/grafana/provisioning/datasources/prometheus.yaml").is_file()
    (provider,) = yaml.safe_load(inside(grafana, "/etc/grafana/provisioning/dashboards/chunkserve.yaml").read_text())[
        "providers"
    ]
    assert inside(grafana, provider["options"]["path"]) == dashboards.DIRECTORY
    assert inside(grafana, grafana["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]).is_file()
    (source,) = yaml.safe_load((DIRECTORY / "grafana" / "datasources" / "prometheus.yaml").read_text())["datasources"]
    assert source["isDefault"] is True, "the dashboards' variable begins with the default of its kind"
    for path in dashboards.DIRECTORY.iterdir():
        (variable,) = json.loads(path.read_text())["templating"]["list"]
        assert (variable["type"], variable["query"]) == ("datasource", source["type"])


def test_the_rate_of_the_scrapes_is_the_one_that_grafana_is_told() -> None:
    """A `$__rate_interval` that is too short shows no points."""
    (source,) = yaml.safe_load((DIRECTORY / "grafana" / "datasources" / "prometheus.yaml").read_text())["datasources"]
    assert source["jsonData"]["timeInterval"] == yaml.safe_load(PROMETHEUS.read_text())["global"]["scrape_interval"]


def test_the_rules_are_those_of_the_manifests() -> None:
    assert compose.check_rules() == []


def test_changed_alerts_make_the_rules_out_of_date(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compose, "rules_text", lambda: "another")
    (found,) = compose.check_rules()
    assert str(found) == "compose/rules.yaml: is out of date: `make render-k8s`"


def test_the_job_names_are_those_that_alerts_and_dashboards_ask_for() -> None:
    asked = set(re.findall(r'job="([^"]+)"', compose.RULES.read_text() + dashboards.text(dashboards.SERVING)))
    jobs = {job["job_name"] for job in yaml.safe_load(PROMETHEUS.read_text())["scrape_configs"]}
    assert asked <= jobs, asked - jobs


# --- the page that describes it ---------------------------------------------------------------------------------------


def test_the_page_says_where_each_service_is() -> None:
    for name, service in SERVICES.items():
        address = service["ports"][0].rpartition(":")[0]
        assert re.search(rf"^\| {re.escape(name)} \| http://{address} \|", PAGE, re.MULTILINE), name


COMMANDS = re.findall(r"^docker compose .+$", PAGE, re.MULTILINE)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_of_the_page_names_files_and_services_that_there_are(command: str) -> None:
    words = shlex.split(command)[2:]
    files = [words[i + 1] for i, word in enumerate(words) if word == "-f"]
    assert all((ROOT / file).is_file() for file in files)
    rest = [word for word in words if word != "-f" and word not in files]
    assert rest[0] in ("up", "down", "logs", "build", "run")
    named = [word for word in rest[1:] if not word.startswith("-")]
    assert not named or named[0] in SERVICES


def test_variables_are_replaced_as_compose_does() -> None:
    assert interpolated("a${B:-c}${D}", {}) == "ac"
    assert interpolated("a${B:-c}${D}", {"B": "1", "D": "2"}) == "a12"

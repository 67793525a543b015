"""k8s/README.md is executed as far as that needs no cluster: a command that no test runs is a claim."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from k8s.validate.builds import rendered
from k8s.validate.manifests import K8S, ROOT, at, of_kind
from serve_app.settings.auth import ApiKey

README = (K8S / "README.md").read_text()
CHART = (K8S / "chart" / "README.md").read_text()
TUTORIAL = (ROOT / "docs" / "tutorials" / "first-cluster.md").read_text()
COMMANDS = [
    line for block in re.findall(r"```bash\n(.*?)```", README + CHART, re.DOTALL) for line in block.splitlines()
]
CLUSTER = ("kubectl ", "helm ", "docker ", "kind ")
RUN_HERE = (".venv/bin/python -m serve_app.auth ann", ".venv/bin/python -m k8s.drain --help")
MADE = ("make validate-k8s",)


def output(command: str) -> str:
    words = shlex.split(command.replace(".venv/bin/python", sys.executable))
    return subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True, timeout=60).stdout


def test_every_command_is_run_here_or_needs_a_cluster() -> None:
    others = [command for command in COMMANDS if not command.startswith(CLUSTER)]
    assert sorted(others) == sorted(RUN_HERE + MADE)


@pytest.mark.parametrize("page", [README, CHART, TUTORIAL], ids=["k8s", "chart", "tutorial"])
def test_what_a_command_needs_is_there_before_it(page: str) -> None:
    """Helm knows no repository by itself, and a cluster on a laptop has none of Docker's images."""
    lines = page.splitlines()
    installed = next(line for line in lines if re.match(r"helm install \S+ kuberay/", line))
    assert any(line.startswith("helm repo add kuberay ") for line in lines[: lines.index(installed)])
    (image,) = set(re.findall(r"--tag (\S+) \.", README))
    deployed = next(line for line in lines if "cpu-demo" in line and line.startswith(("kubectl apply", "helm install")))
    assert f"kind load docker-image {image}" in lines[: lines.index(deployed)]


def test_the_targets_that_are_named_are_in_the_makefile() -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"make ([\w-]+)", README)) <= targets


@pytest.mark.parametrize("command", [command for command in COMMANDS if command.startswith(CLUSTER)])
def test_the_files_that_a_command_for_a_cluster_names_are_there(command: str) -> None:
    named = re.findall(r"\bk8s/[\w./-]+", command)
    assert all((ROOT / path).exists() for path in named)
    if " -k " in command:
        assert (ROOT / named[0] / "kustomization.yaml").is_file()


def test_the_key_command_prints_an_entry_for_the_file_of_keys() -> None:
    entry = re.search(r"- .*", output(RUN_HERE[0]))
    assert entry is not None
    (read,) = yaml.safe_load(entry[0])
    assert ApiKey.model_validate(read).tenant == "ann"


def test_the_secrets_file_of_keys_is_where_the_overlay_looks_for_it() -> None:
    (service,) = of_kind(rendered("gpu"), "RayService")
    keys_file = yaml.safe_load(at(service, "spec.serveConfigV2"))["applications"][0]["args"]["auth"]["keys_file"]
    (create,) = [command for command in COMMANDS if "create secret generic chunkserve-api-keys" in command]
    assert f"--from-file={Path(keys_file).name}" in create
    mounts = at(service, "spec.rayClusterConfig.workerGroupSpecs[0].template.spec.containers[0].volumeMounts")
    assert str(Path(keys_file).parent) in [mount["mountPath"] for mount in mounts]


def test_the_hooks_help_names_its_options() -> None:
    assert {"--deadline-s", "--address", "--node-ip", "--log"} <= set(re.findall(r"--[\w-]+", output(RUN_HERE[1])))


def test_the_example_of_an_own_overlay_names_what_is_there() -> None:
    (example,) = re.findall(r"```yaml\n(.*?)```", README, re.DOTALL)
    kustomization = yaml.safe_load(example)
    for path in (*kustomization["resources"], *kustomization["components"]):
        assert (K8S / "overlays" / "own" / path).resolve().joinpath("kustomization.yaml").is_file(), path


def test_every_number_of_the_table_is_the_one_in_the_manifests() -> None:
    rows = dict(
        re.findall(r"^\| ([^|]+?)(?: of the preStop hook)? \| ([^|]+) \| ", README.replace("`", ""), re.MULTILINE)
    )
    (service,) = of_kind(rendered("gpu"), "RayService")
    worker = "spec.rayClusterConfig.workerGroupSpecs[0]"
    pod = f"{worker}.template.spec"
    probe = at(service, f"{pod}.containers[0].readinessProbe")
    env = {one["name"]: one.get("value") for one in at(service, f"{pod}.containers[0].env")}
    annotations = at(service, "metadata.annotations")
    args = yaml.safe_load(at(service, "spec.serveConfigV2"))["applications"][0]["args"]
    written = {
        "chunkserve/longest-stream-seconds": annotations["chunkserve/longest-stream-seconds"],
        "drain_timeout_s": args["drain_timeout_s"],
        "--deadline-s": at(service, f"{pod}.containers[0].lifecycle.preStop.exec.command[4]"),
        "terminationGracePeriodSeconds": at(service, f"{pod}.terminationGracePeriodSeconds"),
        "rayClusterDeletionDelaySeconds": at(service, "spec.rayClusterDeletionDelaySeconds"),
        "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S": env["RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S"],
        "RAY_SERVE_HAPROXY_MAXCONN": env["RAY_SERVE_HAPROXY_MAXCONN"],
        "readiness of workers": f"{probe['failureThreshold']} × {probe['periodSeconds']} s",
        "ray.io/initializing-timeout": annotations["ray.io/initializing-timeout"],
        "idleTimeoutSeconds": at(service, "spec.rayClusterConfig.autoscalerOptions.idleTimeoutSeconds"),
        "minReplicas of workers": at(service, f"{worker}.minReplicas"),
    }
    assert {name: rows.get(name) for name in written} == {name: str(value) for name, value in written.items()}

"""The Helm chart makes what kustomize makes, and objects that fit together whatever is turned on."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
import yaml

from k8s.validate import chart, tools
from k8s.validate.__main__ import check_build
from k8s.validate.builds import rendered
from k8s.validate.manifests import K8S, OVERLAYS, ROOT, Doc, at, groups, name_of, of_kind
from tests.k8s.support import MONITORING_DOCS, needs_helm

VALUES: Doc = yaml.safe_load((chart.CHART / "values.yaml").read_text())
README = (chart.CHART / "README.md").read_text()


# --- its objects ------------------------------------------------------------------------------------------------------


def wanted(overlay: str) -> list[Doc]:
    return [doc for doc in rendered(overlay) if name_of(doc) not in chart.NOT_MADE]


@needs_helm
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_the_chart_makes_an_overlays_objects(overlay: str) -> None:
    assert chart.differences(chart.template_with(chart.values_of(overlay)), wanted(overlay)) == []


@needs_helm
def test_the_chart_makes_the_monitoring_objects() -> None:
    made = chart.template_with([*chart.values_of("gpu"), chart.VALUES / "monitoring.yaml"])
    dashboards = list(of_kind(made, "ConfigMap"))
    others = [doc for doc in made if doc not in dashboards]
    assert chart.differences(others, [*wanted("gpu"), *MONITORING_DOCS]) == []
    contents = {file: text for doc in dashboards for file, text in doc["data"].items()}
    sources = (K8S / "monitoring" / "dashboards").iterdir()
    assert contents == {path.name: path.read_text() for path in sources}
    assert {doc["metadata"]["labels"]["grafana_dashboard"] for doc in dashboards} == {"1"}


@needs_helm
def test_in_another_namespace_the_alerts_ask_for_the_targets_that_are_scraped_there() -> None:
    """ChunkserveHeadDown asked for the job of the namespace chunkserve, and paged for ever in any other."""
    made = chart.template_with([chart.VALUES / "monitoring.yaml"], "--namespace", "elsewhere")
    (rules,), (scrape,) = of_kind(made, "PrometheusRule"), of_kind(made, "ScrapeConfig")
    text = " ".join(rule["expr"] for group in rules["spec"]["groups"] for rule in group["rules"])
    pods = {f"elsewhere/{doc['metadata']['name']}" for doc in of_kind(made, "PodMonitor")}
    jobs = set(re.findall(r'job="([^"]+)"', text))
    assert "elsewhere/chunkserve-head" in jobs
    assert jobs <= {*pods, scrape["spec"]["jobName"]}
    assert set(re.findall(r'namespace="([^"]+)"', text)) == {"elsewhere"}
    assert scrape["spec"]["staticConfigs"][0]["labels"] == {"namespace": "elsewhere"}


@needs_helm
def test_what_an_overlay_has_and_the_chart_has_not_is_found() -> None:
    made = chart.template_with(chart.values_of("gpu"))
    changed = wanted("gpu")
    (service,) = of_kind(changed, "RayService")
    service["spec"]["rayClusterConfig"]["workerGroupSpecs"][0]["priority"] = 11
    (budget,) = [doc for doc in changed if name_of(doc) == "PodDisruptionBudget/chunkserve-head"]
    changed.remove(budget)
    found = [str(one) for one in chart.differences(made, changed)]
    path = "spec.rayClusterConfig.workerGroupSpecs[0].priority"
    assert found == [
        f"RayService/chunkserve: {path}: the chart has 10, and the overlay 11",
        "PodDisruptionBudget/chunkserve-head: the chart makes it, and the overlay does not",
    ]


@needs_helm
def test_the_default_values_are_valid_and_fit_together() -> None:
    chart.lint([])
    made = chart.template()
    assert check_build(made) == []
    assert {at(doc, "metadata.namespace") for doc in made} == {chart.NAMESPACE}


@needs_helm
def test_everything_that_can_be_turned_on_is_valid_together(tmp_path: Path) -> None:
    alone = {"cpu-demo", "tensor-parallel"}  # lower tiers of KV have one rank
    files = [chart.values_of("gpu")[0], *(chart.VALUES / f"{name}.yaml" for name in OVERLAYS if name not in alone)]
    target = tmp_path / "target.yaml"
    target.write_text("monitoring: {target: 'gateway:80'}\n")
    files += [chart.VALUES / "monitoring.yaml", target]
    chart.lint(files)
    pulls = ("--set", "imagePullSecrets[0].name=registry", "--set", "modelCache.storageClassName=nfs")
    made = chart.template_with(files, *pulls)
    assert check_build(made) == []
    (scrape,) = of_kind(made, "ScrapeConfig")
    assert scrape["spec"]["staticConfigs"][0]["targets"] == ["gateway:80"]


@needs_helm
def test_values_without_an_overlay_reach_their_objects() -> None:
    made = chart.template(
        *("--set", "imagePullSecrets[0].name=registry", "--set", "modelCache.storageClassName=nfs"),
        *("--set", "head.nodeSelector.zone=a", "--set", "head.tolerations[0].key=t", "--set-string", "env.A=1"),
        *("--set", "engines.tolerations[0].key=u", "--set", "image.repository=r/c", "--set", "image.tag=t"),
        *("--set", "networkPolicy.operatorNamespace=o", "--set", "networkPolicy.monitoringNamespace=m"),
        *("--set-json", 'args.engine={"max_num_batched_tokens":1000000}', "--namespace", "elsewhere"),
    )
    text = json.dumps(made)
    (claim,) = of_kind(made, "PersistentVolumeClaim")
    assert claim["spec"]["storageClassName"] == "nfs"
    (service,) = of_kind(made, "RayService")
    cluster = service["spec"]["rayClusterConfig"]
    head, worker = cluster["headGroupSpec"]["template"]["spec"], cluster["workerGroupSpecs"][0]["template"]["spec"]
    (job,) = of_kind(made, "Job")
    for pod in (head, worker, job["spec"]["template"]["spec"]):
        assert pod["imagePullSecrets"] == [{"name": "registry"}]
        assert pod["containers"][0]["image"] == "r/c:t"
    assert head["nodeSelector"] == {"zone": "a"}
    assert (head["tolerations"][0]["key"], worker["tolerations"][0]["key"]) == ("t", "u")
    assert all({"name": "A", "value": "1"} in pod["containers"][0]["env"] for pod in (head, worker))
    assert '"kubernetes.io/metadata.name": "o"' in text
    assert '"kubernetes.io/metadata.name": "m"' in text
    assert {doc["metadata"]["namespace"] for doc in made} == {"elsewhere"}
    config = yaml.safe_load(service["spec"]["serveConfigV2"])
    batched = config["applications"][0]["args"]["engine"]["max_num_batched_tokens"]
    assert (batched, type(batched)) == (1_000_000, int)  # a float of this size becomes 1e+06


def environment(made: list[Doc]) -> dict[str, str]:
    """Return the variables of Ray's containers with a value of their own, which are the same on every node."""
    (service,) = of_kind(made, "RayService")
    head, *workers = groups(service)
    assert all(worker.env() == head.env() for worker in workers)
    return {name: value for name, value in head.env().items() if isinstance(value, str)}


@needs_helm
def test_env_replaces_a_variable_of_the_charts_own() -> None:
    """It was there twice, which Kubernetes refuses, so that no limit of HAProxy could be changed."""
    variables = {
        "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S": "7200",
        "CHUNKSERVE_MAX_CONNECTIONS_PER_SOURCE": "100",
        "RAY_SERVE_HAPROXY_MAXCONN": "512",
        "OWN": "1",
    }
    options = [option for name, value in variables.items() for option in ("--set-string", f"env.{name}={value}")]
    made = chart.template_with(chart.values_of("inference-gateway"), *options)
    assert check_build(made) == []
    assert environment(made).items() >= variables.items()


@needs_helm
def test_haproxy_waits_as_long_as_the_values_say() -> None:
    """Streams of more than an hour were cut by the reload of a scale-up, and slow clients after a minute."""
    long = {
        "args.drain_timeout_s": 7200,
        "args.client_stall_timeout_s": 299.5,
        "streams.longestSeconds": 7200,
        "streams.drainDeadlineSeconds": 7215,
        "streams.gracePeriodSeconds": 7300,
        "streams.clusterDeletionDelaySeconds": 7215,
    }
    made = chart.template(*(option for name, value in long.items() for option in ("--set-json", f"{name}={value}")))
    assert check_build(made) == []
    found = environment(made)
    assert found["RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S"] == "7215"
    assert found["RAY_SERVE_HAPROXY_TIMEOUT_CLIENT_S"] == "300"


@needs_helm
def test_null_removes_what_an_earlier_file_of_values_says(tmp_path: Path) -> None:
    """It was refused, so that gpu.yaml could not be used where nodes have other labels, or without autoscaling."""
    values = tmp_path / "own.yaml"
    own = {
        "engines": {"nodeSelector": {"nvidia.com/gpu.product": None, "example.com/gpu": "h200"}},
        "env": {"A": None},
        "args": {
            **dict.fromkeys(("autoscaling", "tool_parser", "served_model_name"), None),
            "engine": {"block_size": None, "kv_cache_memory_gib": None, "targets": None},
            "lora_adapters": {"a": None},
        },
    }
    values.write_text(json.dumps(own))
    made = chart.template_with([*chart.values_of("gpu"), values])
    assert check_build(made) == []
    (service,) = of_kind(made, "RayService")
    engines = groups(service)[1]
    assert engines.pod["nodeSelector"] == {"example.com/gpu": "h200"}
    assert "A" not in engines.env()
    args = yaml.safe_load(service["spec"]["serveConfigV2"])["applications"][0]["args"]
    assert args["engine"] == {
        "device": "cuda",
        "overlap": True,
        "max_model_len": 32768,
        "max_num_seqs": 256,
        "max_num_batched_tokens": 4096,
    }
    assert not {"autoscaling", "tool_parser", "served_model_name"} & set(args)
    assert args["lora_adapters"] == {}


@needs_helm
def test_names_that_yaml_reads_as_numbers_are_names(tmp_path: Path) -> None:
    """A namespace may be called after a ticket: `1234` became a number, which Kubernetes refuses."""
    names = {
        "apiKeys": {"secretName": "0x1f"},
        "kvDisk": {"enabled": True, "keySecretName": "5", "storageClassName": "1.5"},
        "modelCache": {"storageClassName": "2"},
        "networkPolicy": {"operatorNamespace": "3", "monitoringNamespace": "null"},
        "gcsFaultTolerance": {"secretName": "4"},
        "inferenceGateway": {"gateway": "true"},
        "monitoring": {"target": "gateway:80"},
    }
    values = tmp_path / "names.yaml"
    values.write_text(json.dumps(names))
    parts = ("gcs-fault-tolerance", "inference-gateway", "incremental-upgrade", "monitoring")
    files = [*chart.values_of("gpu"), *(chart.VALUES / f"{name}.yaml" for name in parts), values]
    made = chart.template_with(files, "--namespace", "1234")
    assert check_build(made) == []
    assert {at(doc, "metadata.namespace") for doc in made} == {"1234"}


EPHEMERAL = """
ephemeral:
  volumeClaimTemplate:
    spec:
      accessModes: [ReadWriteOnce]
      storageClassName: local-nvme
      resources: {requests: {storage: 50Gi}}
"""


@needs_helm
@pytest.mark.parametrize(
    ("values", "volume"),
    [
        ({}, "emptyDir: {sizeLimit: 50Gi}"),
        ({"kvDisk.storageClassName": "local-nvme"}, EPHEMERAL),
        ({"kvDisk.hostPath": "/mnt/kv"}, "hostPath: {path: /mnt/kv, type: Directory}"),
    ],
    ids=["emptyDir", "ephemeral", "hostPath"],
)
def test_a_disk_for_kv_is_of_the_kind_that_the_values_say(values: dict[str, str], volume: str) -> None:
    tiers = json.dumps({"disk_path": "/var/cache/chunkserve/kv", "disk_gib": 40})
    given = {"kvDisk.enabled": "true", "kvDisk.size": "50Gi", "kvDisk.keySecretName": "", **values}
    options = [option for name, value in given.items() for option in ("--set", f"{name}={value}")]
    made = chart.template("--set-json", f"args.engine.kv_tiers={tiers}", *options)
    assert check_build(made) == []
    (service,) = of_kind(made, "RayService")
    template = service["spec"]["rayClusterConfig"]["workerGroupSpecs"][0]["template"]
    found = [one for one in template["spec"]["volumes"] if one["name"].startswith("kv")]
    assert found == [{"name": "kv", **yaml.safe_load(volume)}]
    assert "annotations" not in template["metadata"], "without a key, there is no Secret to make by hand"
    asked = template["spec"]["containers"][0]["resources"]["requests"]
    assert ("ephemeral-storage" in asked) is ("emptyDir" in volume)


@needs_helm
def test_the_notes_of_an_install_name_what_is_made_by_hand_and_where_clients_go() -> None:
    def notes(*names: str) -> str:
        files = [option for name in names for option in ("--values", chart.VALUES / f"{name}.yaml")]
        command = ("install", "chunkserve", chart.CHART, "--namespace", "chunkserve", "--dry-run=client", *files)
        return tools.run("helm", *command).stdout.partition("\nNOTES:\n")[2]

    demo = notes("cpu-demo")
    assert "Then 1 to 1 workers start" in demo
    assert "service/chunkserve-serve-svc 8000:8000" in demo
    assert "args.auth has no keys" in demo
    assert "Secret" not in demo
    assert "Hub" not in demo
    assert "set modelCache.hubTokenSecretName, and delete job/model-cache-fill first" in notes("gpu")
    production = notes("gpu", "spot", "gcs-fault-tolerance", "inference-gateway")
    assert "Then 2 to 10 workers start" in production
    assert "Secret chunkserve-api-keys with" in production
    assert "Secret chunkserve-redis with" in production
    assert "Gateway inference-gateway in" in production
    assert "args.auth" not in production
    later = notes("gpu", "kv-disk", "incremental-upgrade")
    assert "Secret chunkserve-kv-key with" in later
    assert "chunkserve-serve-svc" not in later, "each cluster has a Service of its own"
    assert "kubectl -n chunkserve get gateway" in later


# --- its page ---------------------------------------------------------------------------------------------------------


IN_THE_JOB = {
    "image": "image.tag=other",
    "imagePullSecrets": "imagePullSecrets[0].name=registry",
    "model": "args.model=org/name",
    "quantize": "args.engine.quantize=none",
    "batch_invariant": "args.engine.batch_invariant=true",
    "modelCache.hubTokenSecretName": "modelCache.hubTokenSecretName=hub",
    "modelCache.fillMemory": "modelCache.fillMemory=9Gi",
}
"""What the Job model-cache-fill is made of, and how to change it."""


def test_the_page_names_every_value() -> None:
    named = set(re.findall(r"`(\w+)`", README))
    assert set(VALUES) <= named


@needs_helm
@pytest.mark.parametrize("value", IN_THE_JOB)
def test_the_page_names_what_changes_the_job(value: str) -> None:
    """Kubernetes refuses another template of a Job, and the upgrade with it."""
    (line,) = re.findall(r"- A Job cannot be changed.*?\n(?=- )", README, re.DOTALL)
    assert f"`{value}`" in line
    jobs = (*of_kind(chart.template(), "Job"), *of_kind(chart.template("--set", IN_THE_JOB[value]), "Job"))
    before, after = (at(job, "spec.template") for job in jobs)
    assert before != after


@needs_helm
@pytest.mark.parametrize("page", [README, (K8S / "README.md").read_text()], ids=["chart", "k8s"])
def test_an_install_that_a_page_shows_can_be_rendered(page: str) -> None:
    commands = [line for line in page.splitlines() if line.startswith("helm install chunkserve ")]
    assert len(commands) == 2
    for command in commands:
        _, _, name, path, *options = shlex.split(command)
        assert (name, ROOT / path) == ("chunkserve", chart.CHART)
        given = [ROOT / option if option.startswith("k8s/") else option for option in options]
        assert chart.template(*given)

"""The Helm chart makes what kustomize makes, and refuses values that it does not know with a line that names them."""

from __future__ import annotations

import copy
import json
import re
import shlex
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from k8s import chart_values
from k8s.validate import chart, tools
from k8s.validate.__main__ import check_build
from k8s.validate.builds import rendered
from k8s.validate.manifests import K8S, OVERLAYS, ROOT, Doc, at, groups, name_of, of_kind, quantity
from serve_app.settings.application import AppSettings
from serve_app.settings.model import ModelSettings
from tests.k8s.support import MONITORING_DOCS

VALUES: Doc = yaml.safe_load((chart.CHART / "values.yaml").read_text())
README = (chart.CHART / "README.md").read_text()


def _why_there_is_no_helm() -> str:
    try:
        tools.find("helm")
    except tools.ToolMissing as error:
        return str(error)
    return ""


needs_helm = pytest.mark.skipif(bool(_why_there_is_no_helm()), reason=_why_there_is_no_helm() or "it is there")
"""`make validate-k8s` fails without it; `make test` goes on with the rest."""


def merged(*files: Path) -> Doc:
    """Merge values as Helm does."""

    def merge(below: Any, above: Any) -> Any:
        if not (isinstance(below, dict) and isinstance(above, dict)):
            return above
        return {**below, **{name: merge(below.get(name), value) for name, value in above.items()}}

    values: Doc = copy.deepcopy(VALUES)
    for file in files:
        values = merge(values, yaml.safe_load(file.read_text()))
    return values


# --- its values -------------------------------------------------------------------------------------------------------


def test_the_schema_is_what_the_code_says() -> None:
    assert chart_values.SCHEMA.read_text() == chart_values.text(), "run `python -m k8s.chart_values`"


def test_there_is_a_file_of_values_for_every_overlay_and_for_monitoring() -> None:
    assert {path.stem for path in chart.VALUES.iterdir()} == {*OVERLAYS, "monitoring"}


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_the_schema_admits_the_values_of_an_overlay(overlay: str) -> None:
    jsonschema.validate(merged(*chart.values_of(overlay)), chart_values.schema())


def test_every_default_value_has_a_type_and_every_typed_value_a_default() -> None:
    whole = chart_values.schema()
    del whole["properties"]["global"]

    def names(values: Any, schema: Doc, path: str) -> set[str]:
        schema = whole["$defs"][schema["$ref"].split("/")[-1]] if "$ref" in schema else schema
        fields = schema.get("properties", {})
        if path == "args" or not fields:
            return {path}
        assert set(values) == set(fields), path
        return {name for key in fields for name in names(values[key], fields[key], f"{path}.{key}".lstrip("."))}

    assert "engines.gpus" in names(VALUES, whole, "")


@pytest.mark.parametrize("config", ["config.yaml", "config.gpu.yaml"])
def test_the_args_of_a_config_are_valid_values(config: str) -> None:
    args = yaml.safe_load((ROOT / config).read_text())["applications"][0]["args"]
    jsonschema.validate({**VALUES, "args": {"model": "m", **args}}, chart_values.schema())


@pytest.mark.parametrize("text", ["16Gi", "1.5Gi", "512M", "1073741824"])
def test_a_quantity_of_the_schema_is_one_of_kubernetes(text: str) -> None:
    assert quantity(text) > 0
    jsonschema.validate({**VALUES, "head": {**VALUES["head"], "memory": text}}, chart_values.schema())


def test_the_charts_versions_are_the_projects_and_the_images() -> None:
    about = yaml.safe_load((chart.CHART / "Chart.yaml").read_text())
    (tag,) = {image["newTag"] for image in yaml.safe_load((K8S / "base" / "kustomization.yaml").read_text())["images"]}
    assert about["appVersion"] == tag
    assert tag.startswith(f"{about['version']}-")


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
def test_each_of_several_models_is_downloaded_awaited_and_served(tmp_path: Path) -> None:
    values = tmp_path / "models.yaml"
    entries = [{"model": "org/one", "served_model_name": "one"}, {"model": "org/two"}, {"model": "org/two-b"}]
    values.write_text(yaml.safe_dump({"args": {"models": entries}}))
    made = chart.template_with([values])
    assert check_build(made) == []
    (service,), (job,) = of_kind(made, "RayService"), of_kind(made, "Job")
    args = yaml.safe_load(service["spec"]["serveConfigV2"])["applications"][0]["args"]
    assert "model" not in args
    assert args["models"] == entries
    names = ["org/one", "org/two", "org/two-b"]
    worker = service["spec"]["rayClusterConfig"]["workerGroupSpecs"][0]["template"]["spec"]
    for containers in (worker["initContainers"], job["spec"]["template"]["spec"]["containers"]):
        assert [one["command"][-1] for one in containers] == names
        assert len({one["name"] for one in containers}) == len(names)
    del job["spec"]["template"]["spec"]["containers"][1], worker["initContainers"][2]
    found = " ".join(map(str, check_build(made)))
    assert "nothing waits for org/two-b, which is served" in found
    assert "has org/two, which Job/model-cache-fill does not download" in found


@needs_helm
@pytest.mark.parametrize(
    ("args", "placed"),
    [
        ({}, ["Ingress"]),
        ({"ingress_replicas": 2}, ["Ingress", "ResponsesStore"]),
        ({"ingress_replicas": 2, "responses_store": {"max_mib": 0}}, ["Ingress"]),
        ({"ingress_num_cpus": 0}, ["Ingress"]),
    ],
    ids=["one ingress replica", "several", "several that keep nothing", "one without a CPU of its own"],
)
def test_with_spot_nodes_the_deployments_that_there_are_have_a_place(
    tmp_path: Path, args: Doc, placed: list[str]
) -> None:
    """A place for a store that was not there made Serve refuse the application, with the chart's own defaults."""
    values = tmp_path / "spot.yaml"
    values.write_text(yaml.safe_dump({"spot": {"enabled": True}, "args": args}))
    made = chart.template_with([values])
    assert check_build(made) == []
    (service,) = of_kind(made, "RayService")
    deployments = yaml.safe_load(service["spec"]["serveConfigV2"])["applications"][0]["deployments"]
    assert [one["name"] for one in deployments] == placed
    assert deployments[0]["ray_actor_options"]["num_cpus"] == AppSettings(**args).ingress_num_cpus


@needs_helm
@pytest.mark.parametrize(
    ("setting", "both"),
    [
        ("quantize=stored", True),
        ("quantize=none", True),
        ("batch_invariant=true", True),
        ("quantize=auto", False),
        ("block_size=32", False),
    ],
)
def test_a_gguf_file_is_there_in_the_form_that_engines_ask_for(setting: str, both: bool) -> None:
    """The Job prepared what suits its own processor, which engines that ask for the other form cannot read."""
    made = chart.template("--set", f"args.engine.{setting}")
    assert check_build(made) == []
    (service,), (job,) = of_kind(made, "RayService"), of_kind(made, "Job")
    fill = at(job, "spec.template.spec.containers[0].command")
    wait = at(groups(service)[1].pod, "initContainers[0].command")
    for command in (shlex.join(fill), wait[2]):
        assert ("engine.checkpoints.prepare --quantize both" in command) is both
    assert fill[-1] == wait[-1] == AppSettings().model


@needs_helm
def test_a_token_of_the_hub_is_for_the_job_alone() -> None:
    """It alone asks the Hub; without a token, no model that needs one could be served."""
    made = chart.template("--set", "modelCache.hubTokenSecretName=hub", "--set", "args.models[0].model=a/b")
    assert check_build(made) == []
    assert json.dumps(made).count("HF_TOKEN") == 1
    (job,) = of_kind(made, "Job")
    (container,) = at(job, "spec.template.spec.containers")
    assert container["env"][-1]["valueFrom"] == {"secretKeyRef": {"name": "hub", "key": "token"}}


@needs_helm
def test_an_engine_over_several_nodes_takes_of_each_what_one_rank_takes(tmp_path: Path) -> None:
    values = tmp_path / "ranks.yaml"
    ranks = {"tensor_parallel_placement": "pack", "engine": {"tensor_parallel_size": 4}, "engine_num_gpus": 4}
    scaling = {"autoscaling": {"max_replicas": 2}}
    values.write_text(
        yaml.safe_dump({"args": {**ranks, **scaling, "engine_num_cpus": 16}, "engines": {"minReplicas": 8}})
    )
    assert check_build(chart.template_with([*chart.values_of("gpu"), values])) == []
    found = check_build(chart.template_with([*chart.values_of("gpu"), values], "--set", "engines.minReplicas=7"))
    assert "the least number of workers holds 1 engines" in " ".join(map(str, found))


@needs_helm
def test_an_engine_that_reserves_nothing_fits_anywhere() -> None:
    assert check_build(chart.template("--set", "args.engine_num_cpus=0")) == []


def test_the_chart_knows_every_setting_that_is_each_models_own() -> None:
    text = (chart.CHART / "templates" / "_helpers.tpl").read_text()
    (names,) = re.findall(r"range list ((?:\"[a-z_]+\" ?)+)\}\}\n\{\{- if hasKey \$\.Values\.args", text)
    assert set(re.findall(r'"([a-z_]+)"', names)) == {*ModelSettings.model_fields} - {"model"}


@needs_helm
def test_a_draft_model_is_downloaded_and_awaited(tmp_path: Path) -> None:
    """Engines that start from the cache alone, without it, would never start."""
    values = tmp_path / "draft.yaml"
    engine = {"speculative": {"method": "draft_model", "model": "org/small"}}
    values.write_text(yaml.safe_dump({"args": {"model": "org/large", "engine": engine}}))
    made = chart.template_with([values])
    assert check_build(made) == []
    (service,), (job,) = of_kind(made, "RayService"), of_kind(made, "Job")
    worker = service["spec"]["rayClusterConfig"]["workerGroupSpecs"][0]["template"]["spec"]
    for containers in (worker["initContainers"], job["spec"]["template"]["spec"]["containers"]):
        assert [one["command"][-1] for one in containers] == ["org/large", "org/small"]
        del containers[1]
    found = " ".join(map(str, check_build(made)))
    assert "nothing waits for org/small, which is served" in found
    assert "has org/small, which Job/model-cache-fill does not download" in found


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


# --- bad input --------------------------------------------------------------------------------------------------------

REFUSED = {
    "a number as text": ("engines.gpus=two", "/engines/gpus': got string, want integer"),
    "a text as number": ("engines.memory=6", "/engines/memory': got number, want string"),
    "a truth as text": ("spot.enabled=yes please", "/spot/enabled': got string, want boolean"),
    "a map as text": ("engines.nodeSelector=gpu", "/engines/nodeSelector': got string, want object"),
    "an unknown name": ("engine.gpus=1", "additional properties 'engine' not allowed"),
    "an unknown name inside": ("engines.gpu=1", "/engines': additional properties 'gpu' not allowed"),
    "a number that is too small": ("engines.minReplicas=0", "/engines/minReplicas': minimum: got 0, want 1"),
    "a quantity that is none": ("engines.memory=6 GB", "/engines/memory': '6 GB' does not match pattern"),
    "a setting of a wrong type": (
        "args.drain_timeout_s=soon",
        "/args/drain_timeout_s': got string, want null or number",
    ),
    "an optional setting of a wrong type": (
        "args.engine.kv_cache_memory_gib=all",
        "/args/engine/kv_cache_memory_gib': got string, want null or number",
    ),
    "an unknown setting": ("args.drain_timeout=3", "/args': additional properties 'drain_timeout' not allowed"),
    "a drain that ends before the longest stream": (
        "args.drain_timeout_s=60",
        "args.drain_timeout_s must be >= streams.longestSeconds (120), but it is 60",
    ),
    "a hook that ends before the drain": (
        "streams.drainDeadlineSeconds=120",
        "streams.drainDeadlineSeconds must be >= args.drain_timeout_s + 15 (135), but it is 120",
    ),
    "a grace period that ends with the hook": (
        "streams.gracePeriodSeconds=150",
        "streams.gracePeriodSeconds must be > streams.drainDeadlineSeconds (150), but it is 150",
    ),
    "a cluster that is deleted with its streams": (
        "streams.clusterDeletionDelaySeconds=60",
        "streams.clusterDeletionDelaySeconds must be >= streams.drainDeadlineSeconds (150), but it is 60",
    ),
    "keys that nobody reads": (
        "apiKeys.secretName=some-keys",
        'args.auth.keys_file must be in /etc/chunkserve, where apiKeys.secretName (some-keys) is mounted, but it is ""',
    ),
    "a file of keys that is not there": (
        "args.auth.keys_file=/etc/chunkserve/keys.yaml",
        "args.auth.keys_file is /etc/chunkserve/keys.yaml, but apiKeys.secretName is empty",
    ),
    "a volume of weights that one pod has alone": (
        "modelCache.accessMode=ReadWriteOncePod",
        "/modelCache/accessMode': value must be one of 'ReadWriteMany', 'ReadWriteOnce'",
    ),
    "a start that may take no time": (
        "initializingTimeout=0m",
        "initializingTimeout must be above zero, but it is 0m",
    ),
    "a setting of one model beside several": (
        "args.models[0].model=a,args.engine.block_size=32",
        "args.engine must not stand beside args.models: it is each model's own",
    ),
    "an engine that no worker can hold": (
        "args.engine_num_cpus=3",
        "args.engine_num_cpus must be <= engines.cpus (2) on each node, but it is 3: no worker could hold an engine",
    ),
    "an engine of several models without its GPU": (
        "args.models[0].model=a,args.models[1].model=b,args.models[1].engine_num_gpus=1",
        "args.models.1.engine_num_gpus must be <= engines.gpus (0) on each node, but it is 1",
    ),
    "GPUs that no engine asks for": (
        "engines.gpus=1",
        "engines.gpus is 1, but no model has an engine_num_gpus: its engines would run on the CPU",
    ),
    "a target of metrics that an upgrade in steps does not have": (
        "monitoring.enabled=true,incrementalUpgrade.enabled=true",
        "monitoring.target must be the Gateway's host:port with incrementalUpgrade.enabled",
    ),
    "files of KV without a disk": (
        "args.engine.kv_tiers.disk_path=/kv",
        "args.engine.kv_tiers.disk_path is /kv, but kvDisk.enabled is false",
    ),
    "files of KV of one of several models without a disk": (
        "args.models[0].model=a,args.models[1].model=b,args.models[1].engine.kv_tiers.disk_path=/kv",
        "args.models.1.engine.kv_tiers.disk_path is /kv, but kvDisk.enabled is false",
    ),
    "files of KV beside the disk": (
        "kvDisk.enabled=true,args.engine.kv_tiers.disk_path=/var/cache/chunkserve",
        "args.engine.kv_tiers.disk_path must be a directory inside /var/cache/chunkserve, where kvDisk is mounted",
    ),
    "a key for files of KV that nothing reads": (
        "kvDisk.enabled=true,args.engine.kv_tiers.disk_path=/var/cache/chunkserve/kv",
        "disk_key_file must be in /etc/chunkserve-kv, where kvDisk.keySecretName (chunkserve-kv-key) is mounted",
    ),
    "files of KV whose key is not there": (
        "kvDisk.enabled=true,kvDisk.keySecretName=,args.engine.kv_tiers.disk_path=/var/cache/chunkserve/kv,"
        "args.engine.kv_tiers.disk_key_file=/etc/chunkserve-kv/key",
        "disk_key_file is /etc/chunkserve-kv/key, but kvDisk.keySecretName is empty",
    ),
    "a disk of two kinds": (
        "kvDisk.hostPath=/mnt/kv,kvDisk.storageClassName=local-nvme",
        "kvDisk.hostPath must be empty beside kvDisk.storageClassName (local-nvme), but it is /mnt/kv",
    ),
    "a directory of the node that is none": (
        "kvDisk.hostPath=kv",
        "/kvDisk/hostPath': 'kv' does not match pattern",
    ),
    "an HAProxy that ends before the hook": (
        "env.RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S=never",
        'env.RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S must be >= streams.drainDeadlineSeconds (150), but it is "never"',
    ),
    "weights somewhere else": ("env.CHUNKSERVE_CACHE=/tmp", "env.CHUNKSERVE_CACHE must not be set"),
    "fewer workers at most than at least": (
        "engines.minReplicas=3",
        "engines.maxReplicas must be >= engines.minReplicas (3), but it is 1",
    ),
    "a step that is larger than the surge": (
        "incrementalUpgrade.stepSizePercent=30",
        "incrementalUpgrade.stepSizePercent must be <= incrementalUpgrade.maxSurgePercent (20), but it is 30",
    ),
}


@needs_helm
@pytest.mark.parametrize(("setting", "message"), REFUSED.values(), ids=REFUSED)
def test_a_wrong_value_is_refused_with_a_line_that_names_it(setting: str, message: str) -> None:
    with pytest.raises(chart.ChartError) as refused:
        chart.template("--set", setting)
    assert len([line for line in str(refused.value).splitlines() if message in line]) == 1, str(refused.value)


# --- its page ---------------------------------------------------------------------------------------------------------


def test_the_page_names_every_value() -> None:
    named = set(re.findall(r"`(\w+)`", README))
    assert set(VALUES) <= named


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

"""The chart's values have a schema, and wrong ones are refused with a line that names them."""

from __future__ import annotations

import copy
import functools
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from k8s import chart_values
from k8s.validate import chart
from k8s.validate.manifests import K8S, OVERLAYS, ROOT, Doc, quantity
from serve_app.settings.application import AppSettings
from serve_app.settings.model import ModelSettings
from serve_app.settings.scaling import AutoscalingSettings
from tests.k8s.support import needs_helm

VALUES: Doc = yaml.safe_load((chart.CHART / "values.yaml").read_text())


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


def test_null_is_no_value_of_a_setting_that_has_no_default() -> None:
    """Without its value, the application would not start."""
    parts = chart_values.schema()["$defs"].values()
    required = [part["properties"][name] for part in parts for name in part.get("required", [])]
    assert required
    assert [one for one in required if "null" in one.get("type", "")] == []


@pytest.mark.parametrize("text", ["16Gi", "1.5Gi", "512M", "1073741824"])
def test_a_quantity_of_the_schema_is_one_of_kubernetes(text: str) -> None:
    assert quantity(text) > 0
    jsonschema.validate({**VALUES, "head": {**VALUES["head"], "memory": text}}, chart_values.schema())


def test_the_charts_versions_are_the_projects_and_the_images() -> None:
    about = yaml.safe_load((chart.CHART / "Chart.yaml").read_text())
    (tag,) = {image["newTag"] for image in yaml.safe_load((K8S / "base" / "kustomization.yaml").read_text())["images"]}
    assert about["appVersion"] == tag
    assert tag.startswith(f"{about['version']}-")


def test_where_a_value_is_not_given_the_chart_takes_the_settings_own_default() -> None:
    text = (chart.CHART / "templates" / "_helpers.tpl").read_text()
    found = re.findall(r'dig ((?:"\w+" )+)("\w+"|[\d.]+|false) [$.]', text)
    found += re.findall(r'("engine_num_[cg]pus" )\(list "[a-z.]+" [$.\w]+ ([\d.]+)\)', text)
    taken = {tuple(re.findall(r'"(\w+)"', path)): yaml.safe_load(default) for path, default in found}
    assert len(taken) > 8
    settings = AppSettings(autoscaling=AutoscalingSettings(max_replicas=1))
    for path, default in taken.items():
        assert default == functools.reduce(getattr, path, settings), path


def test_the_chart_knows_every_setting_that_is_each_models_own() -> None:
    text = (chart.CHART / "templates" / "_helpers.tpl").read_text()
    (names,) = re.findall(r"range list ((?:\"[a-z_]+\" ?)+)\}\}\n\{\{- if hasKey \$\.Values\.args", text)
    assert set(re.findall(r'"([a-z_]+)"', names)) == {*ModelSettings.model_fields} - {"model"}


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
    "null for what a setting cannot be without": (
        "args.autoscaling.max_replicas=null",
        "/args/autoscaling/max_replicas': got null, want integer",
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
    "more engines than the workers ever hold": (
        "args.engine_replicas=9,args.engine_num_cpus=1,engines.maxReplicas=4",
        "args.engine_replicas is 9, but 4 workers at most hold 8 engines: the start would not end",
    ),
    "more engines than all workers hold, spot nodes' included": (
        "args.engine_replicas=11,args.engine_num_cpus=2,engines.maxReplicas=4,spot.enabled=true,spot.maxReplicas=6",
        "args.engine_replicas is 11, but 10 workers at most hold 10 engines: the start would not end",
    ),
    "a first number of engines that the workers never hold": (
        "args.autoscaling.max_replicas=8,args.engine_replicas=8,args.engine_num_cpus=2,engines.maxReplicas=2",
        "args.engine_replicas is 8, but 2 workers at most hold 2 engines",
    ),
    "a least number of engines that the workers never hold": (
        "args.autoscaling.min_replicas=3,args.autoscaling.max_replicas=3,args.engine_num_cpus=2,engines.maxReplicas=2",
        "args.autoscaling.min_replicas is 3, but 2 workers at most hold 2 engines",
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


@needs_helm
def test_a_value_that_an_earlier_version_lacked_may_be_missing() -> None:
    """`helm upgrade --reuse-values` gives the chart the values of the release, without what the chart has since got."""
    new = ("modelCache.hubTokenSecretName", "monitoring.target")
    given = ("--set", "monitoring.enabled=true")
    without = [option for name in new for option in ("--set", f"{name}=null")]
    assert chart.template(*given, *without) == chart.template(*given)


@needs_helm
def test_a_part_of_a_second_of_the_drain_counts() -> None:
    limit = r"streams.drainDeadlineSeconds must be >= args.drain_timeout_s \+ 15 \(151\), but it is 150"
    with pytest.raises(chart.ChartError, match=limit):
        chart.template("--set-json", "args.drain_timeout_s=135.5")

"""Owns the form of the Helm chart's values: names, types and limits. k8s/chart/values.schema.json is written from it.
Never holds a default but "" for a value that earlier versions lacked: defaults are in k8s/chart/values.yaml."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from serve_app.settings.application import AppSettings

SCHEMA = Path(__file__).with_name("chart") / "values.schema.json"

Count = Annotated[int, Field(ge=1)]
Seconds = Annotated[int, Field(ge=1)]
Name = Annotated[str, Field(pattern="^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$")]
NameOrNone = Annotated[str, Field(pattern="^([a-z0-9]([-a-z0-9.]*[a-z0-9])?)?$")]
Bytes = Annotated[str, Field(pattern=r"^[0-9]+(\.[0-9]+)?([KMGT]i?)?$", description="A quantity, such as 16Gi.")]
Strings = dict[str, str | None]
"""With null, an entry of an earlier file of values is left out."""


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Reference(_Strict):
    name: Name


class Image(_Strict):
    repository: Annotated[str, Field(min_length=1)]
    tag: str = Field(description="Empty: the chart's appVersion.")


class Streams(_Strict):
    longestSeconds: Seconds = Field(description="The longest answer that is guaranteed to end undisturbed.")
    drainDeadlineSeconds: Seconds = Field(description="How long the preStop hook holds a worker for its streams.")
    gracePeriodSeconds: Seconds = Field(description="When the kubelet kills a worker.")
    clusterDeletionDelaySeconds: Seconds = Field(description="How long the old cluster of an upgrade stays.")


class Toleration(_Strict):
    key: str = ""
    operator: Literal["Exists", "Equal"] = "Equal"
    value: str = ""
    effect: Literal["", "NoSchedule", "PreferNoSchedule", "NoExecute"] = ""
    tolerationSeconds: int | None = None


class Head(_Strict):
    cpus: Count
    memory: Bytes
    nodeSelector: Strings
    tolerations: list[Toleration]


class Engines(_Strict):
    minReplicas: Count = Field(description="Workers. Also how many there are at first.")
    maxReplicas: Count
    cpus: Count = Field(description="Of each worker; args say how much of them an engine takes.")
    gpus: Annotated[int, Field(ge=0)] = Field(description="Of each worker. 0: none.")
    memory: Bytes
    nodeSelector: Strings
    tolerations: list[Toleration] = Field(description="Besides the one for GPUs.")


class Spot(_Strict):
    enabled: bool
    maxReplicas: Count
    nodeSelector: Strings = Field(description="Besides that of engines.")
    tolerations: list[Toleration]


class ModelCache(_Strict):
    size: Bytes
    accessMode: Literal["ReadWriteMany", "ReadWriteOnce"]  # the Job and the workers have it at the same time
    storageClassName: NameOrNone = Field(description="Empty: the cluster's default class.")
    fillMemory: Bytes = Field(description="Memory of the Job that downloads and converts the model.")
    hubTokenSecretName: NameOrNone = Field(
        default="",  # --reuse-values of an earlier version's release
        description="A Secret with a token of the Hugging Face Hub under `token`, for the Job. Empty: none.",
    )


class ApiKeys(_Strict):
    secretName: NameOrNone = Field(description="A Secret with keys.yaml, mounted in /etc/chunkserve. Empty: none.")


class KvDisk(_Strict):
    enabled: bool
    size: Bytes = Field(description="Of each worker's volume; above args.engine.kv_tiers.disk_gib.")
    ephemeralStorage: Bytes = Field(description="With an emptyDir: what a worker asks for of the node's disk.")
    storageClassName: NameOrNone = Field(
        description="A class for volumes that live as long as a pod. Empty: an emptyDir."
    )
    hostPath: Annotated[str, Field(pattern="^(/.*)?$")] = Field(
        description="A directory of the node that belongs to user 1000. The namespace must allow it. Empty: none."
    )
    keySecretName: NameOrNone = Field(
        description="A Secret with a key under `key`, mounted in /etc/chunkserve-kv. Empty: none."
    )


class NetworkPolicy(_Strict):
    operatorNamespace: Name
    monitoringNamespace: Name


class GcsFaultTolerance(_Strict):
    enabled: bool
    redisImage: Annotated[str, Field(min_length=1)]
    secretName: Name = Field(description="A Secret with Redis' password under `password`.")


class IncrementalUpgrade(_Strict):
    enabled: bool
    gatewayClassName: Name
    maxSurgePercent: Annotated[int, Field(ge=0, le=100)]
    stepSizePercent: Annotated[int, Field(ge=0, le=100)]
    intervalSeconds: Seconds


class EndpointPicker(_Strict):
    image: Annotated[str, Field(min_length=1)]
    cpus: Count
    memory: Bytes


class InferenceGateway(_Strict):
    enabled: bool
    gateway: Name = Field(description="The Gateway of this namespace that the route belongs to.")
    endpointPicker: EndpointPicker


class Switch(_Strict):
    enabled: bool


class Monitoring(_Strict):
    enabled: bool
    target: Annotated[str, Field(pattern=r"^([^/:\s]+:[0-9]+)?$")] = Field(
        default="",  # as ModelCache.hubTokenSecretName
        description="Address, host:port, at which /metrics is scraped. Empty: the Service.",
    )
    labels: Strings = Field(description="By which the Prometheus operator selects monitors and rules.")


class Values(_Strict):
    """All values of the chart."""

    image: Image
    imagePullSecrets: list[Reference]
    args: AppSettings = Field(description="The application's settings, as `args` of config.yaml.")
    streams: Streams
    initializingTimeout: Annotated[str, Field(pattern=r"^([0-9]+(\.[0-9]+)?(h|m|s|ms))+$")]
    env: Strings = Field(description="Variables for Ray's containers. One that the chart sets too is replaced.")
    head: Head
    engines: Engines
    spot: Spot
    modelCache: ModelCache
    apiKeys: ApiKeys
    kvDisk: KvDisk
    networkPolicy: NetworkPolicy
    gcsFaultTolerance: GcsFaultTolerance
    incrementalUpgrade: IncrementalUpgrade
    mtls: Switch
    inferenceGateway: InferenceGateway
    monitoring: Monitoring


def schema() -> dict[str, Any]:
    """Return the JSON schema of the values. Settings have no descriptions in it: the reference of settings has them."""
    made = Values.model_json_schema()
    definitions = made["$defs"]
    ours = {model.__name__ for model in _Strict.__subclasses__()}
    made["$defs"] = {name: _plain(part, described=name in ours) for name, part in sorted(definitions.items())}
    for name, one in made["$defs"].items():
        if name not in ours:
            _make_removable(one)
    for one in (made["$defs"]["AppSettings"], made["$defs"]["ModelEntry"]):
        one["properties"]["served_model_name"]["type"] = ["string", "array", "null"]  # one name, too
    # Helm adds this key when the chart is a part of another.
    made["properties"]["global"] = {"type": "object"}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **_plain(made, described=True)}


def text() -> str:
    return json.dumps(schema(), indent=1, ensure_ascii=False) + "\n"


def _make_removable(part: dict[str, Any]) -> None:
    """Let settings be null, which leaves out what an earlier file of values says: Helm itself only leaves out what the
    chart's own values have. Without a value, a setting has its default, which is what null means wherever it means
    something. A setting that is required has none."""
    if isinstance(part.get("type"), str):
        part["type"] = [part["type"], "null"]
    if "const" in part:
        part["enum"] = [part.pop("const")]
    if "enum" in part:
        part["enum"] = [*part["enum"], None]
    required = part.get("required", ())
    optional = [inner for name, inner in part.get("properties", {}).items() if name not in required]
    for inner in (*optional, *part.get("patternProperties", {}).values(), part.get("additionalProperties")):
        if isinstance(inner, dict):
            _make_removable(inner)


def _plain(part: Any, *, described: bool) -> Any:
    """Return a schema without titles and defaults, and with "an integer or nothing" as one type: for two alternatives,
    Helm prints three lines."""
    if isinstance(part, list):
        return [_plain(item, described=described) for item in part]
    if not isinstance(part, dict):
        return part
    options = [option for option in part.get("anyOf", []) if option != {"type": "null"}]
    if len(options) == 1 and len(part["anyOf"]) == 2:
        rest = {name: item for name, item in part.items() if name != "anyOf"}
        option = options[0]
        if isinstance(option.get("type"), str) and "enum" not in option and "const" not in option:
            option = {**option, "type": [option["type"], "null"]}
        part = {**rest, **option}
    left_out = {"title", "default"} | (set() if described else {"description"})
    return {
        name: {key: _plain(value, described=described) for key, value in item.items()}
        if name in ("properties", "$defs")
        else _plain(item, described=described)
        for name, item in part.items()
        if name not in left_out
    }


def main() -> None:
    """Write the schema."""
    SCHEMA.write_text(text())


if __name__ == "__main__":
    argparse.ArgumentParser(
        prog="python -m k8s.chart_values", description="Write the schema of the Helm chart's values."
    ).parse_args()
    main()

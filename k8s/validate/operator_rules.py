"""Owns the operator's rules that are not in its CRD. The API server accepts a RayService that breaks one, but it never
runs. Never repeats the schema. The rules follow the order of the object; they are those of KubeRay v1.7.0."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import chain

from k8s.validate.manifests import FEATURE_GATES, Doc, Finding, Group, at, groups, name_of

_MAX_NAME = 47
_DNS_1035 = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_LABEL_NAME = re.compile(r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?")
_LABEL_PREFIX = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")
_DURATION = re.compile(r"(\d+(\.\d+)?(h|m|s|ms))+|\d+")
_CLUSTER = "spec.rayClusterConfig"
_TIMEOUT = "ray.io/initializing-timeout"
_UPGRADES = ("None", "NewCluster", "NewClusterWithIncrementalUpgrade")
_OWN_RESOURCES = ("num-cpus", "num-gpus", "memory", "resources")
_TOKEN_AUTH_SINCE = (2, 52, 0)
_GATED = {
    f"{_CLUSTER}.networkPolicy": "RayClusterNetworkPolicy",
    f"{_CLUSTER}.tlsOptions": "RayClusterMTLS",
    f"{_CLUSTER}.historyServerOptions": "RayClusterHistoryServer",
    f"{_CLUSTER}.gcsFaultToleranceOptions.storage": "GCSFaultToleranceEmbeddedStorage",
}
"""Fields whose feature gate is off by default. Without the gate the operator refuses the whole RayService."""

_Problems = Iterator[tuple[str, str]]


def check(doc: Doc) -> list[Finding]:
    """Find what the operator would refuse in a RayService."""
    rules = (_metadata, _upgrade, _gates, _auth, _autoscaling, _fault_tolerance, _head, _group_fields, _replicas)
    return [Finding(name_of(doc), path, problem) for path, problem in chain.from_iterable(rule(doc) for rule in rules)]


def _metadata(doc: Doc) -> _Problems:
    name = str(at(doc, "metadata.name", ""))
    if len(name) > _MAX_NAME:
        yield "metadata.name", f"has at most {_MAX_NAME} characters, but {name!r} has {len(name)}"
    if not _DNS_1035.fullmatch(name):
        yield "metadata.name", f"must be a DNS-1035 label (lower case, a letter first), but it is {name!r}"
    timeout = at(doc, "metadata.annotations", {}).get(_TIMEOUT)
    if timeout is not None and (not _DURATION.fullmatch(timeout) or not re.search("[1-9]", timeout)):
        yield f"metadata.annotations.{_TIMEOUT}", f"must be a duration above zero, such as 45m, but it is {timeout!r}"


def _upgrade(doc: Doc) -> _Problems:
    path = "spec.upgradeStrategy"
    kind = at(doc, f"{path}.type", "NewCluster")
    if kind not in _UPGRADES:
        yield f"{path}.type", f"must be one of {', '.join(_UPGRADES)}, but it is {kind!r}"
    if kind == "NewClusterWithIncrementalUpgrade":
        yield from _incremental(doc, f"{path}.clusterUpgradeOptions")


def _incremental(doc: Doc, path: str) -> _Problems:
    if not at(doc, f"{_CLUSTER}.enableInTreeAutoscaling", False):
        yield f"{_CLUSTER}.enableInTreeAutoscaling", "must be true for NewClusterWithIncrementalUpgrade"
    options = at(doc, path)
    if options is None:
        yield path, "is required for NewClusterWithIncrementalUpgrade"
        return
    surge, step = options.get("maxSurgePercent", 100), options.get("stepSizePercent")
    if not 0 <= surge <= 100:
        yield f"{path}.maxSurgePercent", f"must be 0 to 100, but it is {surge}"
    if step is None or not 0 <= step <= 100:
        yield f"{path}.stepSizePercent", f"must be 0 to 100, but it is {step}"
    elif step > surge:
        yield f"{path}.stepSizePercent", f"must be <= maxSurgePercent ({surge}), but it is {step}"
    if (interval := options.get("intervalSeconds") or 0) <= 0:
        yield f"{path}.intervalSeconds", f"must be > 0, but it is {interval}"
    if not options.get("gatewayClassName"):
        yield f"{path}.gatewayClassName", "is required for NewClusterWithIncrementalUpgrade"


def _gates(doc: Doc) -> _Problems:
    declared = at(doc, "metadata.annotations", {}).get(FEATURE_GATES, "").split()
    needed = {path: gate for path, gate in _GATED.items() if at(doc, path) is not None}
    if at(doc, f"{_CLUSTER}.gcsFaultToleranceOptions.backend") == "rocksdb":
        needed[f"{_CLUSTER}.gcsFaultToleranceOptions.backend"] = "GCSFaultToleranceEmbeddedStorage"
    for path, gate in needed.items():
        if gate not in declared:
            yield path, f"needs the operator's feature gate {gate}, which is off by default: name it in {FEATURE_GATES}"


def _auth(doc: Doc) -> _Problems:
    path = f"{_CLUSTER}.authOptions"
    if at(doc, f"{path}.enableK8sTokenAuth"):
        yield f"{path}.enableK8sTokenAuth", "is refused for a RayService"
    if at(doc, f"{path}.mode") != "token":
        return
    version = str(at(doc, f"{_CLUSTER}.rayVersion", ""))
    numbers = re.match(r"(\d+)\.(\d+)\.(\d+)", version)
    if numbers is None or tuple(map(int, numbers.groups())) < _TOKEN_AUTH_SINCE:
        yield f"{_CLUSTER}.rayVersion", f"must be 2.52.0 or later for authOptions.mode token, but it is {version!r}"


def _autoscaling(doc: Doc) -> _Problems:
    every = groups(doc)
    variable = "RAY_enable_autoscaler_v2"
    requested = every[0].env().get(variable)
    is_on = bool(at(doc, f"{_CLUSTER}.enableInTreeAutoscaling", False))
    version = at(doc, f"{_CLUSTER}.autoscalerOptions.version")
    env_path = f"{every[0].path}.template.spec.containers[0].env"
    if not is_on and requested in ("1", "true"):
        yield env_path, f"{variable} needs enableInTreeAutoscaling"
    if is_on and version is not None and requested is not None:
        yield env_path, f"{variable} and autoscalerOptions.version exclude each other"
    for group in every:
        policy = group.pod.get("restartPolicy", "Never")
        if is_on and version != "v1" and policy != "Never":
            path = f"{group.path}.template.spec.restartPolicy"
            yield path, f"must be Never or unset with autoscaler v2, but it is {policy}"
        if is_on and group.spec.get("suspend"):
            yield f"{group.path}.suspend", "excludes enableInTreeAutoscaling"


def _fault_tolerance(doc: Doc) -> _Problems:
    head = groups(doc)[0]
    annotations, env = at(doc, "metadata.annotations", {}), head.env()
    env_path = f"{head.path}.template.spec.containers[0].env"
    options = at(doc, f"{_CLUSTER}.gcsFaultToleranceOptions")
    if "redis-username" in head.start_params or "REDIS_USERNAME" in env:
        yield f"{head.path}.rayStartParams", "redis-username belongs in gcsFaultToleranceOptions.redisUsername"
    if options is None:
        if "RAY_REDIS_ADDRESS" in env and annotations.get("ray.io/ft-enabled") != "true":
            yield env_path, "RAY_REDIS_ADDRESS needs gcsFaultToleranceOptions"
        return
    for variable, field in {"RAY_REDIS_ADDRESS": "redisAddress", "REDIS_PASSWORD": "redisPassword"}.items():
        if variable in env:
            yield env_path, f"{variable} belongs in gcsFaultToleranceOptions.{field}"
    if "redis-password" in head.start_params:
        yield f"{head.path}.rayStartParams.redis-password", "belongs in gcsFaultToleranceOptions.redisPassword"
    for annotation in ("ray.io/ft-enabled", "ray.io/external-storage-namespace"):
        if annotations.get(annotation):
            yield f"metadata.annotations.{annotation}", "excludes gcsFaultToleranceOptions"


def _head(doc: Doc) -> _Problems:
    head = groups(doc)[0]
    if at(head.spec, "headService.metadata.name"):
        yield f"{head.path}.headService.metadata.name", "must not be set in a RayService"
    ports = {port.get("name"): port.get("containerPort") for port in at(head.ray_container, "ports", [])}
    if "serve" not in ports and 8000 in ports.values():
        yield f"{head.path}.template.spec.containers[0].ports", "port 8000 must be named serve, or there is no Service"


def _group_fields(doc: Doc) -> _Problems:
    for group in groups(doc):
        if not group.ray_container:
            yield f"{group.path}.template.spec.containers", "needs a container, in which Ray is started"
        own = [name for name in _OWN_RESOURCES if name in group.start_params]
        if own and at(group.spec, "resources", {}):
            yield f"{group.path}.resources", f"excludes rayStartParams {', '.join(own)}"
        if "labels" in group.start_params:
            yield f"{group.path}.rayStartParams.labels", "belongs in the group's own `labels`"
        yield from _labels(group)


def _labels(group: Group) -> _Problems:
    for key, value in at(group.spec, "labels", {}).items():
        prefix, slash, name = key.rpartition("/")
        if not _LABEL_NAME.fullmatch(name) or (slash and not _LABEL_PREFIX.fullmatch(prefix)):
            yield f"{group.path}.labels.{key}", "is no label key"
        if value and not _LABEL_NAME.fullmatch(value):
            yield f"{group.path}.labels.{key}", f"is no label value: {value!r}"


def _replicas(doc: Doc) -> _Problems:
    """Check the numbers of replicas. The bounds must be given: the CRD's defaults, 0 and 2147483647, would hide that
    they were forgotten."""
    seen: set[str] = set()
    for group in groups(doc)[1:]:
        if group.name in seen:
            yield f"{group.path}.groupName", f"is taken: {group.name}"
        seen.add(group.name)
        bounds = [group.spec.get("minReplicas"), group.spec.get("replicas", 0), group.spec.get("maxReplicas")]
        for name, value in (("minReplicas", bounds[0]), ("maxReplicas", bounds[2])):
            if value is None:
                yield f"{group.path}.{name}", "must be written out"
        if None not in bounds and bounds != sorted(bounds):
            order = "minReplicas <= replicas <= maxReplicas"
            yield f"{group.path}.replicas", f"must keep {order}, but they are {', '.join(map(str, bounds))}"

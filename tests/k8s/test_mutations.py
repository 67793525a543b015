"""Long, because it is a table: every manifest is wrong in one place, and is refused with a message that names it."""

from __future__ import annotations

import copy
import functools
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import yaml

from k8s.validate import cross_checks
from k8s.validate.__main__ import check_objects
from k8s.validate.builds import rendered
from k8s.validate.manifests import Doc, name_of
from serve_app.settings.model import ModelSettings
from tests.k8s.support import MONITORING_DOCS

SERVICE = "RayService/chunkserve"
CLUSTER = "spec.rayClusterConfig"
HEAD = f"{CLUSTER}.headGroupSpec"
HEAD_POD = f"{HEAD}.template.spec"
WORKER = f"{CLUSTER}.workerGroupSpecs[0]"
WORKER_POD = f"{WORKER}.template.spec"
ANNOTATIONS = "metadata.annotations"
GONE = object()


@dataclass(frozen=True, slots=True)
class Mutant:
    """One wrong manifest: in this overlay and object, the value at a path is replaced (by GONE: removed; by a callable:
    made of the old one)."""

    field: str
    """The path that a finding must name; also the place of the change, unless `at` says another."""
    value: Any
    message: str
    overlay: str = "gpu"
    object: str = SERVICE
    at: str | None = None


def env(name: str, value: str) -> Callable[[Any], Any]:
    return lambda old: [*old, {"name": name, "value": value}]


def without_env(name: str) -> Callable[[Any], Any]:
    return lambda old: [entry for entry in old if entry["name"] != name]


def with_env(name: str, value: str) -> Callable[[Any], Any]:
    return lambda old: [*without_env(name)(old), {"name": name, "value": value}]


def with_both_envs(cluster: Doc, name: str, value: str) -> Doc:
    """Set the variable on the head and on the first workers."""
    for path in ("headGroupSpec", "workerGroupSpecs[0]"):
        put(cluster, f"{path}.template.spec.containers[0].env", with_env(name, value))
    return cluster


def without_autoscaling(cluster: Doc, name: str, value: str) -> Doc:
    put(cluster, "headGroupSpec.template.spec.containers[0].env", env(name, value))
    return {**cluster, "enableInTreeAutoscaling": False}


def twice(**bounds: int) -> Callable[[Any], Any]:
    """Return the Serve config with its model twice, the second time with other bounds of its autoscaling."""

    def change(args: Doc) -> Doc:
        own = {name: value for name, value in args.items() if name in ModelSettings.model_fields}
        shared = {name: value for name, value in args.items() if name not in own}
        first = own | {"served_model_name": "first"}
        second = own | {"served_model_name": "second", "autoscaling": own["autoscaling"] | bounds}
        return shared | {"models": [first, second]}

    return served(ARGS, change)


def served(path: str, value: Any) -> Callable[[Any], Any]:
    """Return the Serve config with another value at a path."""

    def change(text: str) -> str:
        config = yaml.safe_load(text)
        put(config, path, value)
        return yaml.safe_dump(config)

    return change


def put(value: Any, path: str, new: Any) -> None:
    *parents, last = [int(index) if index else name for name, index in re.findall(r"([^.\[\]]+)|\[(\d+)\]", path)]
    for part in parents:
        value = value.setdefault(part, {}) if isinstance(value, dict) else value[part]
    if new is GONE:
        del value[last]
    else:
        value[last] = new(value.get(last) if isinstance(value, dict) else value[last]) if callable(new) else new


def annotated(name: str, value: str, message: str, **more: Any) -> Mutant:
    """Set an annotation: its name has dots, which a path cannot express."""
    return Mutant(name, lambda old: {**old, name: value}, message, at=ANNOTATIONS, **more)


ARGS = "applications[0].args"
SERVE = "spec.serveConfigV2"
OPTIONS = "spec.upgradeStrategy.clusterUpgradeOptions"
FT = "gcs-fault-tolerance"
REDIS = f"{CLUSTER}.gcsFaultToleranceOptions"
TIERS = f"{ARGS}.engine.kv_tiers"
DISK: dict[str, Any] = {"overlay": "kv-disk"}
POOL: dict[str, Any] = {"overlay": "inference-gateway", "object": "InferencePool/chunkserve"}
ROUTE: dict[str, Any] = {"overlay": "inference-gateway", "object": "HTTPRoute/chunkserve"}
PICKER: dict[str, Any] = {"overlay": "inference-gateway", "object": "ConfigMap/chunkserve-endpoint-picker"}
MUTANTS = {
    # What KubeRay's CRD refuses, or drops silently.
    "a misspelt field": Mutant("spec.rayClusterDeletionDelay", 900, "is no field"),
    "a misspelt field deep inside": Mutant(f"{WORKER_POD}.terminationGracePeriod", 9, "is no field"),
    "a number where a text belongs": Mutant(f"{CLUSTER}.rayVersion", 2.6, "must be str"),
    "a text where a number belongs": Mutant("spec.rayClusterDeletionDelaySeconds", "960", "must be int"),
    "a truth where a number belongs": Mutant(f"{WORKER}.minReplicas", True, "must be int"),
    "a number of more than 32 bits": Mutant(f"{WORKER}.priority", 2**31, "must be of 32 bits"),
    "a negative delay": Mutant("spec.rayClusterDeletionDelaySeconds", -1, "must have minimum 0"),
    "an unknown mode": Mutant(f"{CLUSTER}.authOptions.mode", "tokens", "must be one of disabled, token"),
    "a quantity that is none": Mutant(f"{WORKER_POD}.containers[0].resources.requests.memory", "96 GB", "must match"),
    "a container without a name": Mutant(f"{HEAD_POD}.containers[0].name", GONE, "is required"),
    "a port that is there twice": Mutant(
        f"{HEAD_POD}.containers[0].ports[7]",
        lambda old: [*old, dict(old[0])],
        "has the same containerPort, protocol",
        at=f"{HEAD_POD}.containers[0].ports",
    ),
    "a manager that is none": Mutant("spec.managedBy", "somebody", "managedBy field value must be"),
    "start parameters that are no texts": Mutant(f"{HEAD}.rayStartParams.num-cpus", 0, "must be str"),
    "the old version of the API": Mutant("apiVersion", "ray.io/v1alpha1", "must be ray.io/v1"),
    # What the operator refuses.
    "a name that is too long": Mutant("metadata.name", "c" * 48, "has at most 47 characters"),
    "a name in capitals": Mutant("metadata.name", "Chunkserve", "must be a DNS-1035 label"),
    "a time-out that is none": annotated("ray.io/initializing-timeout", "45 minutes", "must be a duration"),
    "a time-out of nothing": annotated("ray.io/initializing-timeout", "0s", "must be a duration above zero"),
    "an upgrade that is none": Mutant("spec.upgradeStrategy.type", "RollingUpdate", "must be one of None, NewCluster"),
    "an upgrade in steps without its options": Mutant(OPTIONS, GONE, "is required", overlay="incremental-upgrade"),
    "an upgrade in steps without autoscaling": Mutant(
        f"{CLUSTER}.enableInTreeAutoscaling", False, "must be true for NewCluster", overlay="incremental-upgrade"
    ),
    "a step that is larger than the surge": Mutant(
        f"{OPTIONS}.stepSizePercent", 30, "must be <= maxSurgePercent (20)", overlay="incremental-upgrade"
    ),
    "a step of more than everything": Mutant(
        f"{OPTIONS}.stepSizePercent", 110, "must be 0 to 100", overlay="incremental-upgrade"
    ),
    "a surge of more than everything": Mutant(
        f"{OPTIONS}.maxSurgePercent", 101, "must be 0 to 100", overlay="incremental-upgrade"
    ),
    "steps without time between them": Mutant(
        f"{OPTIONS}.intervalSeconds", 0, "must be > 0", overlay="incremental-upgrade"
    ),
    "an upgrade in steps without a gateway": Mutant(
        f"{OPTIONS}.gatewayClassName", GONE, "is required", overlay="incremental-upgrade"
    ),
    "TLS without its gate": Mutant(f"{CLUSTER}.tlsOptions", {"enabled": True}, "feature gate RayClusterMTLS"),
    "the operator's network policy without its gate": Mutant(
        f"{CLUSTER}.networkPolicy", {"mode": "DenyAll"}, "feature gate RayClusterNetworkPolicy"
    ),
    "an embedded store without its gate": Mutant(
        f"{REDIS}.backend", "rocksdb", "feature gate GCSFaultToleranceEmbeddedStorage", overlay=FT
    ),
    "Kubernetes' tokens for Ray": Mutant(f"{CLUSTER}.authOptions.enableK8sTokenAuth", True, "is refused"),
    "tokens without a version": Mutant(f"{CLUSTER}.rayVersion", GONE, "must be 2.52.0 or later"),
    "tokens of a Ray without them": Mutant(f"{CLUSTER}.rayVersion", "2.51.1", "must be 2.52.0 or later"),
    "two words on the autoscaler's version": Mutant(
        f"{HEAD_POD}.containers[0].env", env("RAY_enable_autoscaler_v2", "1"), "exclude each other"
    ),
    "the second autoscaler where none is": Mutant(
        f"{HEAD_POD}.containers[0].env",
        lambda cluster: without_autoscaling(cluster, "RAY_enable_autoscaler_v2", "1"),
        "needs enableInTreeAutoscaling",
        at=CLUSTER,
    ),
    "a worker that restarts": Mutant(f"{WORKER_POD}.restartPolicy", "Always", "must be Never or unset"),
    "a head that restarts": Mutant(f"{HEAD_POD}.restartPolicy", "OnFailure", "must be Never or unset"),
    "a suspended group": Mutant(f"{WORKER}.suspend", True, "excludes enableInTreeAutoscaling"),
    "a group's CPUs said twice": Mutant(f"{WORKER}.resources", {"CPU": "16"}, "excludes rayStartParams num-cpus"),
    "labels as a start parameter": Mutant(f"{WORKER}.rayStartParams.labels", "a=b", "belongs in the group's own"),
    "a label that is none": Mutant(
        "ray.io/market type", lambda _: {"ray.io/market type": "x"}, "is no label key", at=f"{WORKER}.labels"
    ),
    "a label's value that is none": Mutant(
        "zone", lambda _: {"zone": "a b"}, "is no label value", at=f"{WORKER}.labels"
    ),
    "bounds that nobody wrote": Mutant(f"{WORKER}.maxReplicas", GONE, "must be written out"),
    "bounds in the wrong order": Mutant(f"{WORKER}.replicas", 1, "must keep minReplicas", at=f"{WORKER}.replicas"),
    "two groups of one name": Mutant(f"{CLUSTER}.workerGroupSpecs[1].groupName", "engine", "is taken", overlay="spot"),
    "a head without a container": Mutant(f"{HEAD_POD}.containers", [], "needs a container"),
    "a Service of the head with a name": Mutant(f"{HEAD}.headService.metadata.name", "head", "must not be set"),
    "a port for clients under another name": Mutant(
        f"{HEAD_POD}.containers[0].ports", [{"name": "http", "containerPort": 8000}], "must be named serve"
    ),
    "Redis without fault tolerance": Mutant(
        f"{HEAD_POD}.containers[0].env", env("RAY_REDIS_ADDRESS", "redis:6379"), "needs gcsFaultToleranceOptions"
    ),
    "Redis' address said twice": Mutant(
        f"{HEAD_POD}.containers[0].env", env("RAY_REDIS_ADDRESS", "redis:6379"), "belongs in", overlay=FT
    ),
    "Redis' password in the open": Mutant(
        f"{HEAD_POD}.containers[0].env", env("REDIS_PASSWORD", "x"), "redisPassword", overlay=FT
    ),
    "Redis' password as a start parameter": Mutant(
        f"{HEAD}.rayStartParams.redis-password", "x", "belongs in gcsFaultToleranceOptions", overlay=FT
    ),
    "Redis' user in the wrong place": Mutant(
        f"{HEAD}.rayStartParams", lambda old: {**old, "redis-username": "x"}, "redisUsername"
    ),
    "fault tolerance by annotation, too": annotated("ray.io/ft-enabled", "true", "excludes", overlay=FT),
    "a namespace in Redis by annotation": annotated("ray.io/external-storage-namespace", "x", "excludes", overlay=FT),
    # What Serve, or our application, refuses.
    "a config that is no YAML": Mutant(SERVE, "applications: [", "expected"),
    "a config without our application": Mutant(SERVE, "applications: []", "must have one application of ours"),
    "an unknown field of Serve's": Mutant(
        "proxy_locaton", served("proxy_locaton", "EveryNode"), "is no field", at=SERVE
    ),
    "an unknown field of Serve's HTTP": Mutant(
        "http_options.prot", served("http_options.prot", 8000), "is no field of Serve's, which ignores it", at=SERVE
    ),
    "an unknown field of an application": Mutant(
        "applications", served("applications[0].arg", {}), "is no field", at=SERVE
    ),
    "an unknown setting": Mutant(
        "args.engine.max_model_length", served(f"{ARGS}.engine.max_model_length", 1), "", at=SERVE
    ),
    "a setting out of its bounds": Mutant(
        "args.drain_timeout_s", served(f"{ARGS}.drain_timeout_s", 0), "greater", at=SERVE
    ),
    "scaling bounds in the wrong order": Mutant(
        "args.autoscaling", served(f"{ARGS}.autoscaling.min_replicas", 9), "is more than max_replicas", at=SERVE
    ),
    # What Kubernetes refuses in other objects.
    "a misspelt field of a budget": Mutant(
        "spec", lambda old: {**old, "minAvailble": 1}, "minAvailble", object="PodDisruptionBudget/chunkserve-engine"
    ),
    "a Job that restarts for ever": Mutant(
        "spec.template.spec.restartPolicy", 3, "3 is not of type", object="Job/model-cache-fill"
    ),
    "a port of a policy that is none": Mutant(
        "spec.ingress[1].ports[0]", {"port": 8000, "proto": "TCP"}, "proto", object="NetworkPolicy/chunkserve"
    ),
    "an object of a kind that nothing checks": Mutant(
        "kind", "FlinkCluster", "nothing here checks", object="PersistentVolumeClaim/model-cache"
    ),
    "a monitor with an unknown field": Mutant(
        "spec.podMetricsEndpoints[0].targetPorts", 1, "Extra inputs", object="PodMonitor/chunkserve-head"
    ),
    "a scrape without a unit": Mutant("spec.scrapeInterval", "15", "match pattern", object="ScrapeConfig/chunkserve"),
    # What we ask of every pod.
    "a pod as root": Mutant(f"{WORKER_POD}.securityContext.runAsNonRoot", GONE, "must be true"),
    "a pod without seccomp": Mutant(
        f"{HEAD_POD}.securityContext.seccompProfile",
        GONE,
        "RuntimeDefault",
        at=f"{HEAD_POD}.securityContext.seccompProfile",
    ),
    "a container that may become root": Mutant(
        f"{WORKER_POD}.containers[0].securityContext.allowPrivilegeEscalation", True, "must be false"
    ),
    "an init container with capabilities": Mutant(
        f"{WORKER_POD}.initContainers[0].securityContext.capabilities.drop", ["NET_RAW"], "must be [ALL]"
    ),
    "a Job as root": Mutant(
        "spec.template.spec.securityContext.runAsNonRoot", False, "must be true", object="Job/model-cache-fill"
    ),
    "Redis with capabilities": Mutant(
        "spec.template.spec.containers[0].securityContext.capabilities",
        {},
        "must be [ALL]",
        overlay=FT,
        object="StatefulSet/chunkserve-redis",
    ),
    "memory beyond the request": Mutant(
        f"{WORKER_POD}.containers[0].resources.limits.memory", "128Gi", "must be the request, 96Gi"
    ),
    "a limit of CPU": Mutant(f"{WORKER_POD}.containers[0].resources.limits.cpu", "16", "must not be set"),
    "a GPU that Ray is not told of": Mutant(f"{WORKER}.rayStartParams.num-gpus", "0", "requests 1 nvidia.com/gpu"),
    "more CPUs than there are": Mutant(f"{WORKER}.rayStartParams.num-cpus", "17", "requests 16 cpu"),
    "replicas on the head": Mutant(f"{HEAD}.rayStartParams.num-cpus", "4", 'must be "0"'),
    "a worker with a token of Kubernetes": Mutant(f"{WORKER_POD}.automountServiceAccountToken", GONE, "must be false"),
    "KubeRay's own readiness": Mutant(f"{WORKER_POD}.containers[0].readinessProbe", GONE, "must be /-/healthz"),
    "readiness of the whole deployment": Mutant(
        f"{WORKER_POD}.containers[0].readinessProbe.httpGet.path", "/ready", "must be /-/healthz"
    ),
    "a probe of a port that is not there": Mutant(
        f"{WORKER_POD}.containers[0].readinessProbe.httpGet.port", "http", "no port of this container is named http"
    ),
    "a worker that just ends": Mutant(f"{WORKER_POD}.containers[0].lifecycle", GONE, "must be python -m k8s.drain"),
    "a hook that only sleeps": Mutant(
        f"{WORKER_POD}.containers[0].lifecycle.preStop.exec.command", ["sleep", "960"], "must be python -m k8s.drain"
    ),
    "a worker without HAProxy": Mutant(
        f"{WORKER_POD}.containers[0].env", without_env("RAY_SERVE_ENABLE_HA_PROXY"), "RAY_SERVE_ENABLE_HA_PROXY is"
    ),
    "a worker that differs from the head": Mutant(
        f"{WORKER_POD}.containers[0].env", with_env("RAY_SERVE_HAPROXY_MAXCONN", "100"), "'8192' on the head"
    ),
    # What contradicts other parts.
    "proxies on the head alone": Mutant("proxy_location", served("proxy_location", "HeadOnly"), "EveryNode", at=SERVE),
    "clients at the head": Mutant("spec.excludeHeadPodFromServeSvc", False, "must be true"),
    "scaling engines on nodes that do not": Mutant(
        f"{CLUSTER}.enableInTreeAutoscaling", False, "must be true where the engines scale"
    ),
    "more engines than GPUs": Mutant(
        "args.autoscaling.max_replicas",
        served(f"{ARGS}.autoscaling.max_replicas", 9),
        "workers hold 8 engines",
        at=SERVE,
    ),
    "more engines than the fewest GPUs": Mutant(
        "args.autoscaling.min_replicas", served(f"{ARGS}.autoscaling.min_replicas", 3), "holds 2 engines", at=SERVE
    ),
    "a model among several with more engines than GPUs": Mutant(
        "args.models.1.autoscaling.max_replicas", twice(max_replicas=9), "workers hold 8 engines", at=SERVE
    ),
    "several models that only fit one by one": Mutant(
        "args.models", twice(min_replicas=2), "with the fewest engines need 4 GPUs, the workers have 2", at=SERVE
    ),
    "a draft model that nobody downloads": Mutant(
        f"{WORKER_POD}.initContainers",
        served(f"{ARGS}.engine.speculative", {"method": "draft_model", "model": "org/small"}),
        "nothing waits for org/small",
        overlay="cpu-demo",
        at=SERVE,
    ),
    "an engine that fits no node": Mutant(
        "args.autoscaling.max_replicas", served(f"{ARGS}.engine_num_cpus", 20), "hold 0 engines", at=SERVE
    ),
    "two GPUs for one engine": Mutant(
        "args.",
        served(f"{ARGS}.engine_num_gpus", 2),
        "engine_num_gpus is 2, but engine.tensor_parallel_size is 1",
        at=SERVE,
    ),
    "ingress replicas without a place": Mutant(
        "args.ingress_replicas", served(f"{ARGS}.ingress_replicas", 9), "needs 34 CPUs", at=SERVE
    ),
    "ingress replicas on nodes that nobody has": Mutant(
        "label_selector",
        served("applications[0].deployments[0].ray_actor_options.label_selector", {"zone": "moon"}),
        "no group has the labels",
        at=SERVE,
        overlay="spot",
    ),
    "a place for a store that a single ingress replica does not have": Mutant(
        "deployments.1.name",
        served(f"{ARGS}.ingress_replicas", 1),
        "must be one of Ingress, Engine, but it is ResponsesStore",
        at=SERVE,
        overlay="spot",
    ),
    "a drain that ends before the longest stream": Mutant(
        "args.drain_timeout_s", served(f"{ARGS}.drain_timeout_s", 600), "must be >= chunkserve/longest-stream", at=SERVE
    ),
    "a longest stream that nobody wrote": Mutant(
        "args.drain_timeout_s",
        lambda old: {name: value for name, value in old.items() if name != "chunkserve/longest-stream-seconds"},
        "longest-stream-seconds (nan)",
        at=ANNOTATIONS,
    ),
    "a hook that ends before Serve's drain": Mutant(
        f"{WORKER_POD}.containers[0].lifecycle.preStop.exec.command",
        lambda old: [*old[:4], "900", *old[5:]],
        "must give Serve its 915 s",
    ),
    "a grace period that ends with the hook": Mutant(
        f"{WORKER_POD}.terminationGracePeriodSeconds", 960, "must be > the hook's 960"
    ),
    "Kubernetes' own grace period": Mutant(f"{WORKER_POD}.terminationGracePeriodSeconds", GONE, "but it is 30"),
    "KubeRay's own delay after an upgrade": Mutant("spec.rayClusterDeletionDelaySeconds", GONE, "but it is 60"),
    "HAProxy's old process ended early": Mutant(
        f"{WORKER_POD}.containers[0].env",
        lambda cluster: with_both_envs(cluster, "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S", "120"),
        "must be >= the hook's 960, but it is 120",
        at=CLUSTER,
    ),
    "HAProxy less patient with clients than the server": Mutant(
        f"{WORKER_POD}.containers[0].env",
        served(f"{ARGS}.client_stall_timeout_s", 300),
        "RAY_SERVE_HAPROXY_TIMEOUT_CLIENT_S must be >= args.client_stall_timeout_s (300), but it is 60",
        at=SERVE,
    ),
    "another Ray than the project's": Mutant(f"{CLUSTER}.rayVersion", "2.59.0", "must be 2.60.0, as pyproject.toml"),
    "an image of another Ray": Mutant(
        f"{WORKER_POD}.containers[0].image", "chunkserve:0.1.0-ray2.59.0", "must have the tag 0.1.0-ray2.60.0"
    ),
    "two images": Mutant(f"{WORKER_POD}.containers[0].image", "other:0.1.0-ray2.60.0", "must have one image"),
    "an engine that waits for another model": Mutant(
        f"{WORKER_POD}.initContainers[0].command", lambda old: [*old[:-1], "org/other"], "waits for org/other"
    ),
    "another model in the cache": Mutant(
        "args.model",
        lambda old: [*old[:-1], "org/other"],
        "downloads org/other",
        at="spec.template.spec.containers[0].command",
        object="Job/model-cache-fill",
    ),
    "engines that may write weights": Mutant(
        f"{WORKER_POD}.containers[0].volumeMounts[0].readOnly", False, "must be true"
    ),
    "engines that ask a hub": Mutant(
        f"{WORKER_POD}.containers[0].env", without_env("HF_HUB_OFFLINE"), "HF_HUB_OFFLINE must be 1"
    ),
    "an object in whatever namespace its user is in": Mutant(
        "metadata.namespace", GONE, "must be chunkserve", overlay=FT, object="StatefulSet/chunkserve-redis"
    ),
    "a disk for KV that engines do not have": Mutant(
        "args.engine.kv_tiers.disk_path",
        served(f"{TIERS}.disk_path", "/data/kv"),
        "is /data/kv, below no volume of engine",
        at=SERVE,
        **DISK,
    ),
    "a disk for KV whose directory is the volume's own": Mutant(
        "args.engine.kv_tiers.disk_path",
        served(f"{TIERS}.disk_path", "/var/cache/chunkserve"),
        "below no volume of engine",
        at=SERVE,
        **DISK,
    ),
    "a key for KV that engines do not have": Mutant(
        "args.engine.kv_tiers.disk_key_file",
        served(f"{TIERS}.disk_key_file", "/etc/key"),
        "is /etc/key, below no volume of engine",
        at=SERVE,
        **DISK,
    ),
    "a disk for KV that is full before its files are": Mutant(
        f"{WORKER_POD}.volumes[3].emptyDir.sizeLimit", "100Gi", "must be >= 110Gi", **DISK
    ),
    "a disk for KV that is only read": Mutant(
        f"{WORKER_POD}.containers[0].volumeMounts",
        lambda old: [{**mount, "readOnly": True} if mount["name"] == "kv" else mount for mount in old],
        "kv must not be read-only",
        **DISK,
    ),
    "more host memory for KV than the pod has": Mutant(
        f"{WORKER_POD}.containers[0].resources.limits.memory",
        served(f"{TIERS}.host_memory_gib", 96),
        "must be > engine.kv_tiers.host_memory_gib (96)",
        at=SERVE,
        **DISK,
    ),
    "a Secret of a pod that nobody told of": Mutant(
        f"{WORKER_POD}.volumes[4].secret.secretName",
        GONE,
        "secret/chunkserve-kv-key is neither",
        at=f"{WORKER}.template.metadata.annotations",
        **DISK,
    ),
    "a claim that nobody makes": Mutant(
        f"{WORKER_POD}.volumes[0].persistentVolumeClaim.claimName", "models", "is neither in this build"
    ),
    "a Secret that nobody told of": Mutant(
        f"{WORKER_POD}.volumes[2].secret.secretName", "keys", "secret/keys is neither"
    ),
    "a password of Redis that nobody told of": Mutant(
        f"{REDIS}.redisPassword.valueFrom.secretKeyRef.name", "redis", "secret/redis is neither", overlay=FT
    ),
    "a Redis that is nowhere": Mutant(
        f"{REDIS}.redisAddress", "redis://redis:6379", "no Service of this build", overlay=FT
    ),
    "a budget in percent": Mutant(
        "spec.minAvailable", "50%", "must be an integer", object="PodDisruptionBudget/chunkserve-engine"
    ),
    "a budget of the absent": Mutant(
        "spec.minAvailable",
        lambda old: {**{k: v for k, v in old.items() if k != "minAvailable"}, "maxUnavailable": 1},
        "must be an integer",
        at="spec",
        object="PodDisruptionBudget/chunkserve-engine",
    ),
    "a budget that keeps every node": Mutant(
        "spec.minAvailable", 2, "must be < the fewest workers (2)", object="PodDisruptionBudget/chunkserve-engine"
    ),
    "a budget of nobody": Mutant(
        "spec.selector.matchLabels",
        {"chunkserve/role": "engines"},
        "selects no pod",
        object="PodDisruptionBudget/chunkserve-engine",
    ),
    "a budget by the operator's labels": Mutant(
        "spec.selector.matchLabels.ray.io/group",
        lambda _: {"ray.io/group": "engine"},
        "is not ours",
        at="spec.selector.matchLabels",
        object="PodDisruptionBudget/chunkserve-engine",
    ),
    "a policy of nobody": Mutant(
        "spec.podSelector.matchLabels", {"chunkserve/app": "other"}, "selects no pod", object="NetworkPolicy/chunkserve"
    ),
    "a monitor of a port that is not there": Mutant(
        "spec.podMetricsEndpoints[0].port",
        "http",
        "no selected pod has a port named http",
        object="PodMonitor/chunkserve-head",
    ),
    # What a pool, its route and its picker are for each other.
    "a pool of another version": Mutant(
        "apiVersion", "inference.networking.x-k8s.io/v1alpha2", "must be inference.networking.k8s.io/v1", **POOL
    ),
    "a pool with a misspelt field": Mutant("spec.targetPort", 8000, "is no field of this CRD", **POOL),
    "a pool of the head, too": Mutant(
        "spec.selector.matchLabels", {"chunkserve/app": "chunkserve"}, "selects pods that take no clients: head", **POOL
    ),
    "a pool of nobody": Mutant("spec.selector.matchLabels", {"chunkserve/role": "x"}, "selects no pod", **POOL),
    "a pool of a port that is not there": Mutant("spec.targetPorts[0].number", 8001, "engine has no port 8001", **POOL),
    "a picker that is nowhere": Mutant("spec.endpointPickerRef.name", "picker", "no Service of this build", **POOL),
    "a picker at another port": Mutant("spec.endpointPickerRef.port.number", 9003, "has no port 9003", **POOL),
    "a picker of another pool": Mutant(
        "spec.endpointPickerRef.name",
        lambda _: ["--pool-name=other"],
        "is not started with --pool-name=chunkserve",
        overlay="inference-gateway",
        object="Deployment/chunkserve-endpoint-picker",
        at="spec.template.spec.containers[0].args",
    ),
    "a route to nowhere": Mutant("spec.rules[0].backendRefs[0].name", "pool", "InferencePool/pool is not in", **ROUTE),
    "a route of a gateway that nobody told of": Mutant(
        "spec.parentRefs[0].name", "other", "gateway/other is neither in this build nor named in", **ROUTE
    ),
    "a route that ends streams": Mutant("spec.rules[0].timeouts.request", "5m", "must be 0s (none) or >=", **ROUTE),
    "a route with a gateway's own time-out": Mutant("spec.rules[0].timeouts.request", GONE, "written out", **ROUTE),
    "a path that is none": Mutant(
        "spec.rules[0].matches[0].path", {"value": "v1"}, "must be an absolute path", **ROUTE
    ),
    "a metric that nobody exports": Mutant(
        "queuedRequestsSpec",
        lambda old: {"config.yaml": old["config.yaml"].replace("waiting_per_engine", "queued_per_engine")},
        "nothing exports chunkserve:requests_queued_per_engine",
        at="data",
        **PICKER,
    ),
    "a parser that is not there": Mutant(
        "requestHandler.parsers",
        lambda old: {"config.yaml": old["config.yaml"].replace("pluginRef: passthrough-", "pluginRef: openai-")},
        "no plugin openai-parser",
        at="data",
        **PICKER,
    ),
    "a scorer that is not there": Mutant(
        "schedulingProfiles.default",
        lambda old: {"config.yaml": old["config.yaml"].replace("pluginRef: queue-", "pluginRef: length-")},
        "no plugin length-scorer",
        at="data",
        **PICKER,
    ),
}


_rendered = functools.cache(rendered)


def mutated(mutant: Mutant) -> tuple[Doc, list[Doc]]:
    """Return the object that is wrong, and the build that it is in."""
    docs = copy.deepcopy([*_rendered(mutant.overlay), *MONITORING_DOCS])
    (doc,) = [doc for doc in docs if name_of(doc) == mutant.object]
    put(doc, mutant.at or mutant.field, mutant.value)
    return doc, docs


@pytest.mark.parametrize("mutant", [pytest.param(m, id=name) for name, m in MUTANTS.items()])
def test_a_wrong_manifest_is_refused_by_the_name_of_its_field(mutant: Mutant) -> None:
    doc, docs = mutated(mutant)
    found = check_objects([doc]) or cross_checks.check(docs)
    named = [one for one in found if mutant.field in one.field]
    assert any(mutant.message in one.problem for one in named), "\n".join(map(str, found)) or "nothing was found"

"""Owns the rules for every pod of ours: rights, resources, probes, and what a worker does before it ends.
Never looks at two objects at once; `cross_checks` does."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from k8s.validate.manifests import Doc, Finding, Group, at, groups, name_of, quantity

REQUIRED_ENV = (
    "RAY_SERVE_ENABLE_HA_PROXY",
    "RAY_SERVE_HAPROXY_BINARY_PATH",
    "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S",
    "RAY_SERVE_HAPROXY_RETRY_ON",
    "RAY_SERVE_HAPROXY_TIMEOUT_CLIENT_S",
    "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH",
    "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S",
    "RAY_SERVE_FORCE_STOP_UNHEALTHY_REPLICAS",
    "RAY_SERVE_MAX_PER_REPLICA_RETRY_COUNT",
    "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD",
    "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP",
)
"""Variables that `serve run` sets. A cluster that it does not start must set them: docs/how-to/existing-cluster.md."""
GPU = "nvidia.com/gpu"
DRAIN = ["python", "-m", "k8s.drain", "--deadline-s"]

_Problems = Iterator[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class PodTemplate:
    """A pod that an object creates: the path of its spec in the object, the spec, the labels and annotations."""

    path: str
    spec: Doc
    labels: dict[str, str]
    annotations: dict[str, str]


def pod_templates(doc: Doc) -> list[PodTemplate]:
    """Return the pod templates of an object: those of the head and each worker group for a RayService, the single one
    for a Job, StatefulSet or Deployment."""
    if doc.get("kind") == "RayService":
        return [
            PodTemplate(f"{group.path}.template.spec", group.pod, group.labels, group.annotations)
            for group in groups(doc)
        ]
    if (spec := at(doc, "spec.template.spec")) is None:
        return []
    about = at(doc, "spec.template.metadata", {})
    return [PodTemplate("spec.template.spec", spec, about.get("labels") or {}, about.get("annotations") or {})]


def check(doc: Doc) -> list[Finding]:
    """Find what breaks our own rules in the pods that an object creates."""
    problems = [problem for pod in pod_templates(doc) for problem in (*_rights(pod), *_memory(pod))]
    if doc.get("kind") == "RayService":
        for group in groups(doc):
            problems += [*_environment(group, doc), *(_head(group) if group.is_head else _worker(group))]
    return [Finding(name_of(doc), path, problem) for path, problem in problems]


def containers(pod: PodTemplate) -> Iterator[tuple[str, Doc]]:
    for kind in ("initContainers", "containers"):
        for i, container in enumerate(pod.spec.get(kind, [])):
            yield f"{pod.path}.{kind}[{i}]", container


def _rights(pod: PodTemplate) -> _Problems:
    path = f"{pod.path}.securityContext"
    if at(pod.spec, "securityContext.runAsNonRoot") is not True:
        yield f"{path}.runAsNonRoot", "must be true"
    if at(pod.spec, "securityContext.seccompProfile.type") != "RuntimeDefault":
        yield f"{path}.seccompProfile.type", "must be RuntimeDefault"
    for where, container in containers(pod):
        if at(container, "securityContext.allowPrivilegeEscalation") is not False:
            yield f"{where}.securityContext.allowPrivilegeEscalation", "must be false"
        if at(container, "securityContext.capabilities.drop") != ["ALL"]:
            yield f"{where}.securityContext.capabilities.drop", "must be [ALL]"


def _memory(pod: PodTemplate) -> _Problems:
    """Check requests and limits. A pod that uses more memory than it requested is killed first when the node runs
    out."""
    for where, container in containers(pod):
        requests, limits = at(container, "resources.requests", {}), at(container, "resources.limits", {})
        for resource in ("memory", GPU):
            if requests.get(resource) != limits.get(resource) or (resource == "memory" and resource not in limits):
                request, limit = requests.get(resource), limits.get(resource)
                yield f"{where}.resources.limits.{resource}", f"must be the request, {request}, but it is {limit}"
        if "cpu" in limits:
            yield f"{where}.resources.limits.cpu", "must not be set: a step loop that is throttled stalls every stream"


def _environment(group: Group, doc: Doc) -> _Problems:
    path = f"{group.path}.template.spec.containers[0].env"
    env, head_env = group.env(), groups(doc)[0].env()
    for name in REQUIRED_ENV:
        if name not in env:
            yield path, f"{name} is missing"
    for name in sorted({*env, *head_env}):
        if name.startswith("RAY_SERVE_") and env.get(name) != head_env.get(name):
            yield path, f"{name} is {env.get(name)!r} here and {head_env.get(name)!r} on the head"


def _head(group: Group) -> _Problems:
    if (cpus := group.start_params.get("num-cpus")) != "0":
        yield (
            f"{group.path}.rayStartParams.num-cpus",
            f'must be "0", so that no replica is on the head, but it is {cpus!r}',
        )


def _worker(group: Group) -> _Problems:
    pod, container = group.pod, group.ray_container
    path = f"{group.path}.template.spec"
    if pod.get("automountServiceAccountToken") is not False:
        yield f"{path}.automountServiceAccountToken", "must be false: a worker has nothing to ask of Kubernetes"
    probe = at(container, "readinessProbe.httpGet", {})
    if probe.get("path") != "/-/healthz":
        where = f"{path}.containers[0].readinessProbe.httpGet.path"
        yield where, f"must be /-/healthz, of this node's proxy, but it is {probe.get('path')}"
    ports = {port.get("name") for port in container.get("ports", [])}
    if isinstance(probe.get("port"), str) and probe["port"] not in ports:
        yield f"{path}.containers[0].readinessProbe.httpGet.port", f"no port of this container is named {probe['port']}"
    if drain_deadline_s(group) is None:
        yield f"{path}.containers[0].lifecycle.preStop.exec.command", f"must be {' '.join(DRAIN)} and seconds"
    yield from _start_params(group)


def _start_params(group: Group) -> _Problems:
    """Check that Ray is told of no more resources than Kubernetes gives the pod."""
    requests = at(group.ray_container, "resources.requests", {})
    for name, resource in (("num-cpus", "cpu"), ("num-gpus", GPU)):
        declared, requested = float(group.start_params.get(name, "0")), quantity(requests.get(resource, "0"))
        if declared > requested or (name == "num-gpus" and declared != requested):
            yield (
                f"{group.path}.rayStartParams.{name}",
                f"says {declared:g}, but the container requests {requested:g} {resource}",
            )


def drain_deadline_s(group: Group) -> float | None:
    """Return the seconds that the preStop hook gives Serve to empty the node; None if the hook does something else."""
    command: list[Any] = at(group.ray_container, "lifecycle.preStop.exec.command", [])
    return float(command[len(DRAIN)]) if command[: len(DRAIN)] == DRAIN and len(command) > len(DRAIN) else None

"""Owns the checks that no schema can make: whether the places, times, names and labels of one build fit together.
Never checks an object by itself; that has been done before."""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Iterator

from k8s.validate import gateway, kv_disk
from k8s.validate.manifests import (
    LONGEST_STREAM,
    MADE_BY_HAND,
    OURS,
    ROOT,
    Doc,
    Finding,
    Group,
    at,
    groups,
    name_of,
    of_kind,
)
from k8s.validate.pods import PodTemplate, containers, drain_deadline_s, pod_templates
from k8s.validate.serve_config import FIELD, config_of, settings_of
from serve_app.settings.application import AppSettings
from serve_app.settings.ranks import ONE_NODE

_Problems = Iterator[tuple[str, str]]
_ANY_NUMBER = 2**31 - 1
_HARD_STOP = "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S"
_CLIENT_TIMEOUT = "RAY_SERVE_HAPROXY_TIMEOUT_CLIENT_S"


def check(docs: list[Doc]) -> list[Finding]:
    """Find what does not fit together in one build. Its RayService has passed its own checks."""
    found: list[Finding] = []
    for doc in of_kind(docs, "RayService"):
        settings = settings_of(doc)
        problems = (
            *_front(doc),
            *_capacity(doc, settings),
            *_placement(doc),
            *_times(doc, settings),
            *_images(doc),
            *_model(doc, docs, settings),
            *kv_disk.problems(doc, settings),
        )
        found += [Finding(name_of(doc), path, problem) for path, problem in problems]
    namespaces = {at(doc, "metadata.namespace") for doc in of_kind(docs, "RayService")}
    for doc in docs:
        problems = (*_namespace(doc, namespaces), *_check_references(doc, docs), *_check_selector(doc, docs))
        found += [Finding(name_of(doc), path, problem) for path, problem in problems]
    return found + gateway.check(docs)


def _namespace(doc: Doc, namespaces: set[str | None]) -> _Problems:
    """Check that an object is where its RayService is. Without a namespace, it is created in the user's current one."""
    own = at(doc, "metadata.namespace")
    if namespaces and doc.get("kind") != "Namespace" and own not in namespaces:
        yield "metadata.namespace", f"must be {' or '.join(sorted(map(str, namespaces)))}, but it is {own}"


def _front(doc: Doc) -> _Problems:
    if config_of(doc).get("proxy_location") != "EveryNode":
        yield f"{FIELD}: proxy_location", "must be EveryNode: a worker without a proxy is never Ready"
    if at(doc, "spec.excludeHeadPodFromServeSvc") is not True:
        yield "spec.excludeHeadPodFromServeSvc", "must be true: the head has no replica"


def _capacity(doc: Doc, settings: AppSettings) -> _Problems:
    """Check that the nodes can hold the replicas, at the minimum and at the maximum of both; each replica needs one
    node. Of several models, each has to fit by itself, and those that never sleep have to fit together."""
    workers = groups(doc)[1:]
    needed = settings.ingress_replicas * settings.ingress_num_cpus
    gpus_needed = 0.0
    for number, model in enumerate(settings.each_model()):
        place = f"{FIELD}: args.models.{number}" if settings.models else f"{FIELD}: args"
        if model.autoscaling is not None and not at(doc, "spec.rayClusterConfig.enableInTreeAutoscaling"):
            yield "spec.rayClusterConfig.enableInTreeAutoscaling", "must be true where the engines scale"
        most = _engines(workers, "maxReplicas", model)
        if most < model.most_engines:
            yield (
                f"{place}.autoscaling.max_replicas",
                f"is {model.most_engines}, but the workers hold {most} engines",
            )
        few = model.engine_replicas if model.autoscaling is None else model.autoscaling.min_replicas
        fewest = _engines(workers, "minReplicas", model)
        if few > fewest:
            yield (
                f"{place}.autoscaling.min_replicas",
                f"is {few}, but the least number of workers holds {fewest} engines",
            )
        needed += few * model.engine_num_cpus
        gpus_needed += few * model.engine_num_gpus
    gpus = _fewest(workers, "num-gpus")
    if settings.models and gpus_needed > gpus:
        yield f"{FIELD}: args.models", f"with the fewest engines need {gpus_needed:g} GPUs, the workers have {gpus:g}"
    cpus = _fewest(workers, "num-cpus")
    if needed > cpus:
        yield (
            f"{FIELD}: args.ingress_replicas",
            f"with the fewest engines needs {needed:g} CPUs, the fewest workers have {cpus:g}",
        )


def _fewest(workers: list[Group], resource: str) -> float:
    """Return how much of a resource the least number of workers has."""
    return sum((group.spec["minReplicas"] * float(group.start_params.get(resource, "0")) for group in workers), 0.0)


def _engines(workers: list[Group], bound: str, settings: AppSettings) -> int:
    """Return the number of engines that the workers can hold, at the `bound` of each group. An engine is on one node,
    unless its ranks may be on several."""
    parts = 1 if settings.tensor_parallel_placement == ONE_NODE else settings.num_ranks
    takes = {"num-cpus": settings.engine_num_cpus / parts, "num-gpus": settings.engine_num_gpus / parts}
    return sum(int(group.spec[bound]) * _parts_on(group, takes) for group in workers) // parts


def _parts_on(group: Group, takes: dict[str, float]) -> int:
    """Return how often one node of the group has what a part takes."""
    has = {name: float(group.start_params.get(name, "0")) for name in takes}
    return min((math.floor(has[name] / takes[name]) for name in has if takes[name] > 0), default=_ANY_NUMBER)


def _placement(doc: Doc) -> _Problems:
    labels = [at(group.spec, "labels", {}) for group in groups(doc)]
    for application in config_of(doc).get("applications", []):
        for deployment in application.get("deployments", []):
            wanted = at(deployment, "ray_actor_options.label_selector", {})
            if wanted and not any(wanted.items() <= has.items() for has in labels):
                yield f"{FIELD}: deployments.{deployment['name']}.label_selector", f"no group has the labels {wanted}"


def _times(doc: Doc, settings: AppSettings) -> _Problems:
    """Check that the longest stream <= Serve's drain < the hook's deadline < the kubelet's grace period, and that
    nothing else ends streams sooner."""
    # Serve kills a replica some seconds after its drain; app.py has the number.
    from serve_app.app import _DRAIN_MARGIN_S

    longest = float(at(doc, "metadata.annotations", {}).get(LONGEST_STREAM, "nan"))
    drain = settings.drain_timeout_s
    if not longest <= drain:
        yield f"{FIELD}: args.drain_timeout_s", f"must be >= {LONGEST_STREAM} ({longest:g}), but it is {drain:g}"
    deadlines = [0.0]
    for group in groups(doc)[1:]:
        deadline, grace = drain_deadline_s(group) or 0.0, at(group.pod, "terminationGracePeriodSeconds", 30)
        path = f"{group.path}.template.spec"
        if deadline < drain + _DRAIN_MARGIN_S:
            where = f"{path}.containers[0].lifecycle.preStop.exec.command"
            yield where, f"must give Serve its {drain + _DRAIN_MARGIN_S:g} s, but it gives {deadline:g}"
        if grace <= deadline:
            yield f"{path}.terminationGracePeriodSeconds", f"must be > the hook's {deadline:g}, but it is {grace}"
        hard_stop = float(group.env().get(_HARD_STOP, 0))
        if hard_stop < deadline:
            yield (
                f"{path}.containers[0].env",
                f"{_HARD_STOP} must be >= the hook's {deadline:g}, but it is {hard_stop:g}",
            )
        stall, client = settings.client_stall_timeout_s, float(group.env().get(_CLIENT_TIMEOUT, 0))
        if client < stall:
            yield (
                f"{path}.containers[0].env",
                f"{_CLIENT_TIMEOUT} must be >= args.client_stall_timeout_s ({stall:g}), but it is {client:g}",
            )
        deadlines.append(deadline)
    if (delay := at(doc, "spec.rayClusterDeletionDelaySeconds", 60)) < max(deadlines):
        path = "spec.rayClusterDeletionDelaySeconds"
        yield path, f"must be >= the hook's {max(deadlines):g}, or an upgrade cuts streams, but it is {delay}"


def _images(doc: Doc) -> _Problems:
    """Check that all pods have one image, with the Ray version that the manifest names and that the project pins."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (pin,) = [found[1] for line in project["dependencies"] if (found := re.match(r"ray\[serve\]==(\S+)", line))]
    version = at(doc, "spec.rayClusterConfig.rayVersion")
    if version != pin:
        yield "spec.rayClusterConfig.rayVersion", f"must be {pin}, as pyproject.toml pins it, but it is {version}"
    tag = f"{project['version']}-ray{pin}"
    images = {}
    for pod in pod_templates(doc):
        for where, container in containers(pod):
            images[where] = image = str(container.get("image"))
            if image.rpartition(":")[2] != tag:
                yield f"{where}.image", f"must have the tag {tag}, but it is {image}"
    if len(set(images.values())) > 1:
        yield (
            f"{list(images)[-1]}.image",
            f"all pods must have one image, but there are {', '.join(sorted(set(images.values())))}",
        )


def _model(doc: Doc, docs: list[Doc], settings: AppSettings) -> _Problems:
    """Check that the models that are awaited and downloaded are those that are served, drafts' models included, and
    that engines only read them."""
    each = [(model.model, model.engine.speculative.model) for model in settings.each_model()]
    models = [name for names in each for name in names if name is not None]
    served = ", ".join(models)
    for group in groups(doc)[1:]:
        path = f"{group.path}.template.spec"
        awaited = {}
        for i, container in enumerate(group.pod.get("initContainers", [])):
            if str(container.get("name")).startswith("await-model"):
                awaited[i] = at(container, "command", [""])[-1]
        for i, model in awaited.items():
            if model not in models:
                yield f"{path}.initContainers[{i}].command", f"waits for {model}, but {served} is served"
        if awaited and (missing := [model for model in models if model not in awaited.values()]):
            yield f"{path}.initContainers", f"nothing waits for {', '.join(missing)}, which is served"
        for i, mount in enumerate(at(group.ray_container, "volumeMounts", [])):
            if mount["name"] == "models" and mount.get("readOnly") is not True:
                yield f"{path}.containers[0].volumeMounts[{i}].readOnly", "must be true: engines only read the cache"
        if str(group.env().get("HF_HUB_OFFLINE")) != "1":
            yield f"{path}.containers[0].env", "HF_HUB_OFFLINE must be 1: engines start from the cache alone"
    for job in of_kind(docs, "Job"):
        filled = [at(one, "command", [""])[-1] for one in at(job, "spec.template.spec.containers", [])]
        for model in filled:
            if model not in models:
                yield f"{FIELD}: args.model", f"is {served}, but {name_of(job)} downloads {model}"
        if missing := [model for model in models if model not in filled]:
            yield f"{FIELD}: args.models", f"has {', '.join(missing)}, which {name_of(job)} does not download"


def _check_references(doc: Doc, docs: list[Doc]) -> _Problems:
    """Check that the Secrets, ConfigMaps and claims of a pod are in the build, or declared as made by hand."""
    in_build = {name_of(other).lower() for other in docs}
    by_hand = set(at(doc, "metadata.annotations", {}).get(MADE_BY_HAND, "").split())
    for pod in pod_templates(doc):
        of_pod = set(pod.annotations.get(MADE_BY_HAND, "").split())
        for path, reference in _references_in(pod):
            if reference not in in_build | by_hand | of_pod:
                yield path, f"{reference} is neither in this build nor named in {MADE_BY_HAND}"
    redis = at(doc, "spec.rayClusterConfig.gcsFaultToleranceOptions", {})
    secret = at(redis, "redisPassword.valueFrom.secretKeyRef.name")
    if secret is not None and f"secret/{secret}" not in in_build | by_hand:
        path = "spec.rayClusterConfig.gcsFaultToleranceOptions.redisPassword.valueFrom.secretKeyRef.name"
        yield path, f"secret/{secret} is neither in this build nor named in {MADE_BY_HAND}"
    host = re.fullmatch(r"rediss?://([^.:/]+):\d+", str(redis.get("redisAddress", "")))
    if host is not None and f"service/{host[1]}" not in in_build:
        path = "spec.rayClusterConfig.gcsFaultToleranceOptions.redisAddress"
        yield path, f"no Service of this build is named {host[1]}"


def _references_in(pod: PodTemplate) -> Iterator[tuple[str, str]]:
    claims = {"persistentVolumeClaim.claimName": "persistentvolumeclaim", "secret.secretName": "secret"}
    for i, volume in enumerate(pod.spec.get("volumes", [])):
        for path, kind in (claims | {"configMap.name": "configmap"}).items():
            if (name := at(volume, path)) is not None:
                yield f"{pod.path}.volumes[{i}].{path}", f"{kind}/{name}"
    for where, container in containers(pod):
        for i, entry in enumerate(container.get("env", [])):
            for path, kind in {"secretKeyRef": "secret", "configMapKeyRef": "configmap"}.items():
                if (name := at(entry, f"valueFrom.{path}.name")) is not None:
                    yield f"{where}.env[{i}].valueFrom.{path}.name", f"{kind}/{name}"


def _check_selector(doc: Doc, docs: list[Doc]) -> _Problems:
    """Check that a selector uses only labels that we set ourselves, and selects a pod of this build."""
    path = {
        "PodDisruptionBudget": "spec.selector.matchLabels",
        "NetworkPolicy": "spec.podSelector.matchLabels",
        "Service": "spec.selector",
        "PodMonitor": "spec.selector.matchLabels",
        "InferencePool": "spec.selector.matchLabels",
    }.get(str(doc.get("kind")))
    if path is None:
        return
    wanted = at(doc, path, {})
    found = [pod for other in docs for pod in pod_templates(other) if wanted.items() <= pod.labels.items()]
    for label in wanted:
        if not label.startswith(OURS):
            yield f"{path}.{label}", f"is not ours ({OURS}...): the operator's labels change with every upgrade"
    if not wanted or not found:
        yield path, f"selects no pod of this build: {wanted}"
    if doc["kind"] == "PodDisruptionBudget":
        yield from _budget(doc, docs)
    if doc["kind"] == "PodMonitor":
        yield from _scraped_ports(doc, found)


def _budget(doc: Doc, docs: list[Doc]) -> _Problems:
    least = at(doc, "spec.minAvailable")
    if at(doc, "spec.maxUnavailable") is not None or not isinstance(least, int):
        yield "spec.minAvailable", f"must be an integer, and maxUnavailable unset: Ray's pods have no scale ({least!r})"
        return
    wanted = at(doc, "spec.selector.matchLabels", {})
    workers = [group for service in of_kind(docs, "RayService") for group in groups(service)[1:]]
    few = sum(group.spec["minReplicas"] for group in workers if wanted.items() <= group.labels.items())
    if few and least >= few:
        yield (
            "spec.minAvailable",
            f"must be < the fewest workers ({few}), or no node can ever be emptied, but it is {least}",
        )


def _scraped_ports(doc: Doc, pods: list[PodTemplate]) -> _Problems:
    named = {
        port.get("name") for pod in pods for _, container in containers(pod) for port in container.get("ports", [])
    }
    for i, endpoint in enumerate(at(doc, "spec.podMetricsEndpoints", [])):
        if endpoint["port"] not in named:
            yield f"spec.podMetricsEndpoints[{i}].port", f"no selected pod has a port named {endpoint['port']}"

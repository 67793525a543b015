"""Owns the check of an InferencePool with its route and its endpoint picker: whether they find each other, the workers
and the metrics. Never checks an object by itself; its CRD does."""

from __future__ import annotations

import re
from collections.abc import Iterator

import yaml

from k8s.validate import metric_names
from k8s.validate.manifests import LONGEST_STREAM, MADE_BY_HAND, Doc, Finding, at, groups, name_of, of_kind
from k8s.validate.pods import containers, pod_templates

PICKER_CONFIG = "EndpointPickerConfig"
_Problems = Iterator[tuple[str, str]]
_UNITS = {"h": 3600.0, "m": 60.0, "s": 1.0, "ms": 0.001}


def check(docs: list[Doc]) -> list[Finding]:
    """Find what does not fit together; nothing in a build without a pool."""
    rules = {"InferencePool": (_pods, _picker), "HTTPRoute": (_backends, _parents, _timeouts), "ConfigMap": (_config,)}
    return [
        Finding(name_of(doc), path, problem)
        for doc in docs
        for rule in rules.get(str(doc.get("kind")), ())
        for path, problem in rule(doc, docs)
    ]


def _pods(pool: Doc, docs: list[Doc]) -> _Problems:
    """Check that all selected pods take clients. `cross_checks` looks whether there are any."""
    wanted = at(pool, "spec.selector.matchLabels", {})
    for service in of_kind(docs, "RayService"):
        for group in groups(service):
            if not wanted.items() <= group.labels.items():
                continue
            if group.is_head or group.pod.get("readinessGates"):
                yield "spec.selector.matchLabels", f"selects pods that take no clients: {group.name}"
            ports = {port["containerPort"] for port in at(group.ray_container, "ports", [])}
            for i, port in enumerate(at(pool, "spec.targetPorts", [])):
                if port["number"] not in ports:
                    yield f"spec.targetPorts[{i}].number", f"{group.name} has no port {port['number']}"


def _picker(pool: Doc, docs: list[Doc]) -> _Problems:
    reference = at(pool, "spec.endpointPickerRef", {})
    name, port = reference.get("name"), at(reference, "port.number")
    services = [doc for doc in of_kind(docs, "Service") if at(doc, "metadata.name") == name]
    if not services:
        yield "spec.endpointPickerRef.name", f"no Service of this build is named {name}"
    for service in services:
        if port not in [one["port"] for one in at(service, "spec.ports", [])]:
            yield "spec.endpointPickerRef.port.number", f"service/{name} has no port {port}"
        own = f"--pool-name={at(pool, 'metadata.name')}"
        selector = at(service, "spec.selector", {})
        pods = [pod for doc in docs for pod in pod_templates(doc) if selector.items() <= pod.labels.items()]
        for pod in pods:
            if not any(own in container.get("args", []) for _, container in containers(pod)):
                yield "spec.endpointPickerRef.name", f"the picker of service/{name} is not started with {own}"


def _backends(route: Doc, docs: list[Doc]) -> _Problems:
    here = {name_of(doc) for doc in docs}
    for i, rule in enumerate(at(route, "spec.rules", [])):
        for j, backend in enumerate(rule.get("backendRefs", [])):
            name = f"{backend.get('kind', 'Service')}/{backend['name']}"
            if name not in here:
                yield f"spec.rules[{i}].backendRefs[{j}].name", f"{name} is not in this build"


def _parents(route: Doc, docs: list[Doc]) -> _Problems:
    known = {name_of(doc).lower() for doc in docs}
    known |= set(at(route, "metadata.annotations", {}).get(MADE_BY_HAND, "").split())
    for i, parent in enumerate(at(route, "spec.parentRefs", [])):
        name = f"{parent.get('kind', 'Gateway').lower()}/{parent['name']}"
        if name not in known:
            yield f"spec.parentRefs[{i}].name", f"{name} is neither in this build nor named in {MADE_BY_HAND}"


def _timeouts(route: Doc, docs: list[Doc]) -> _Problems:
    """Check that the gateway ends no stream: its time-outs are none (0s), or as long as the longest stream."""
    services = of_kind(docs, "RayService")
    longest = max((float(at(doc, "metadata.annotations", {}).get(LONGEST_STREAM, 0)) for doc in services), default=0.0)
    for i, rule in enumerate(at(route, "spec.rules", [])):
        path = f"spec.rules[{i}].timeouts.request"
        given = at(rule, "timeouts.request")
        if given is None:
            yield path, "must be written out: some gateways end streams after 15 s otherwise"
        elif 0 < seconds(given) < longest:
            yield path, f"must be 0s (none) or >= {LONGEST_STREAM} ({longest:g}), but it is {given}"


def seconds(duration: str) -> float:
    """Return the seconds of a duration of the Gateway API, such as `1m30s`."""
    parts = re.findall(r"(\d+)(ms|[hms])", duration)
    return sum(int(number) * _UNITS[unit] for number, unit in parts)


def _config(config_map: Doc, docs: list[Doc]) -> _Problems:
    """Check a picker's config: the metrics that it reads are exported, and its profiles name plugins that it has."""
    for file, text in at(config_map, "data", {}).items():
        if PICKER_CONFIG not in text:
            continue
        config = yaml.safe_load(text)
        plugins = config.get("plugins", [])
        for i, plugin in enumerate(plugins):
            for engine in at(plugin, "parameters.engineConfigs", []):
                for field, query in engine.items():
                    unknown = metric_names.names_in(query) - metric_names.exported() if field.endswith("Spec") else ()
                    for name in unknown:
                        yield f"data.{file}: plugins[{i}].{field}", f"nothing exports {name}"
        names = {plugin.get("name", plugin["type"]) for plugin in plugins}
        users = {f"schedulingProfiles.{one['name']}": one["plugins"] for one in config.get("schedulingProfiles", [])}
        users["requestHandler.parsers"] = at(config, "requestHandler.parsers", [])
        for path, used in users.items():
            for plugin in used:
                if plugin["pluginRef"] not in names:
                    yield f"data.{file}: {path}", f"no plugin {plugin['pluginRef']}"

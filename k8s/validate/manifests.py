"""Owns reading manifests: their documents, values in them by path, and the form of findings.
Never judges what it reads; the modules beside it do."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

Doc = dict[str, Any]

K8S = Path(__file__).parents[1]
ROOT = K8S.parent
RENDERED = K8S / "rendered"
OVERLAYS = tuple(sorted(path.parent.name for path in (K8S / "overlays").glob("*/kustomization.yaml")))
MONITORING = "monitoring"
BUILDS = {**{name: K8S / "overlays" / name for name in OVERLAYS}, MONITORING: K8S / MONITORING}
"""The builds that users apply: name -> directory of its kustomization."""

OURS = "chunkserve/"
"""Prefix of this project's own labels and annotations."""
MADE_BY_HAND = f"{OURS}made-by-hand"
"""Annotation with kind/name of objects that are not in the manifests because they hold secrets. On an object, or on the
pods that need them."""
FEATURE_GATES = f"{OURS}feature-gates"
"""Annotation with the operator's feature gates that are off by default and must be on for this RayService."""
LONGEST_STREAM = f"{OURS}longest-stream-seconds"


@dataclass(frozen=True, slots=True)
class Finding:
    """A problem and its place."""

    where: str
    """The object: kind/name, or a file."""
    field: str
    """Path inside it, as in `spec.template.spec.containers[0].image`; empty for the whole."""
    problem: str

    def __str__(self) -> str:
        return f"{self.where}: {self.field}: {self.problem}" if self.field else f"{self.where}: {self.problem}"


def read(text: str) -> list[Doc]:
    """Parse the documents of a YAML stream, in order."""
    return [doc for doc in yaml.load_all(text, Loader=yaml.CSafeLoader) if doc is not None]


def name_of(doc: Doc) -> str:
    return f"{doc.get('kind')}/{(doc.get('metadata') or {}).get('name')}"


def of_kind(docs: list[Doc], kind: str) -> Iterator[Doc]:
    return (doc for doc in docs if doc.get("kind") == kind)


def at(value: Any, path: str, default: Any = None) -> Any:
    """Return the value at a path such as `a.b[0].c`, or `default` if a part of the path is missing."""
    for name, index in re.findall(r"([^.\[\]]+)|\[(\d+)\]", path):
        try:
            value = value[int(index)] if index else value[name]
        except (KeyError, IndexError, TypeError):
            return default
    return default if value is None else value


@dataclass(frozen=True, slots=True)
class Group:
    """A pod template of a RayService: the head's, or a worker group's."""

    name: str
    """`head`, or the group's name."""
    path: str
    """Path of the group in the RayService."""
    spec: Doc

    @property
    def is_head(self) -> bool:
        return self.name == "head"

    @property
    def template(self) -> Doc:
        return dict(at(self.spec, "template", {}))

    @property
    def pod(self) -> Doc:
        return dict(at(self.template, "spec", {}))

    @property
    def ray_container(self) -> Doc:
        """The first container, in which KubeRay starts Ray."""
        return dict(at(self.pod, "containers[0]", {}))

    @property
    def labels(self) -> dict[str, str]:
        return dict(at(self.template, "metadata.labels", {}))

    @property
    def annotations(self) -> dict[str, str]:
        return dict(at(self.template, "metadata.annotations", {}))

    @property
    def start_params(self) -> dict[str, str]:
        return dict(at(self.spec, "rayStartParams", {}))

    def env(self) -> dict[str, Any]:
        """Return the environment of the Ray container: name -> value, or its source."""
        return {
            entry["name"]: entry.get("value", entry.get("valueFrom")) for entry in at(self.ray_container, "env", [])
        }


def groups(ray_service: Doc) -> list[Group]:
    """Return the head first, then the worker groups in order."""
    base = "spec.rayClusterConfig"
    head = Group("head", f"{base}.headGroupSpec", at(ray_service, f"{base}.headGroupSpec", {}))
    workers = at(ray_service, f"{base}.workerGroupSpecs", [])
    return [head] + [
        Group(str(spec.get("groupName", i)), f"{base}.workerGroupSpecs[{i}]", spec) for i, spec in enumerate(workers)
    ]


_UNITS: dict[str, float] = {"": 1, "m": 1e-3, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12} | {
    f"{letter}i": 1024**power for power, letter in enumerate("KMGT", start=1)
}


def quantity(text: Any) -> float:
    """Parse a Kubernetes quantity: `500m` is 0.5, `1Gi` is 2**30. Raises ValueError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(m|k|[MGT]|[KMGT]i)?", str(text))
    if match is None:
        raise ValueError(f"{text!r} is no quantity")
    return float(match[1]) * _UNITS[match[2] or ""]

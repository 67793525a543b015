"""Owns the check of the Helm chart: `helm lint` passes, and with an overlay's values it makes the overlay's objects.
Never compares text: objects are equal if they are once parsed, and Serve's config is parsed, too."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import yaml

from k8s import chart_values
from k8s.validate import tools
from k8s.validate.builds import rendered
from k8s.validate.manifests import K8S, MONITORING, OVERLAYS, Doc, Finding, name_of, read

CHART = K8S / "chart"
VALUES = CHART / "values"
NAMESPACE = "chunkserve"
_ALONE = ("cpu-demo", "gpu")
"""Overlays whose values are complete. Those of all others are given after gpu's."""
NOT_MADE = ("Namespace/chunkserve",)
"""Objects of an overlay that are none of the chart's. A release's namespace must be there before it."""


class ChartError(RuntimeError):
    """Helm refuses the chart or its values. The message is Helm's."""


def values_of(overlay: str) -> list[Path]:
    """Return the files that make an overlay's objects, in the order of their `-f`."""
    names = (overlay,) if overlay in _ALONE else ("gpu", overlay)
    return [VALUES / f"{name}.yaml" for name in names]


def template(*arguments: str | Path) -> list[Doc]:
    """Render the chart in the namespace of the overlays. Raises ChartError, ToolMissing."""
    return read(_helm("template", "chunkserve", CHART, "--namespace", NAMESPACE, *arguments))


def template_with(files: list[Path], *arguments: str | Path) -> list[Doc]:
    """Render the chart with the values of these files. Raises as `template`."""
    return template(*_given(files), *arguments)


def lint(files: list[Path]) -> None:
    """Raises ChartError if `helm lint --strict` finds anything, ToolMissing."""
    _helm("lint", "--strict", CHART, "--namespace", NAMESPACE, *_given(files))


def _given(files: list[Path]) -> list[str | Path]:
    return [argument for file in files for argument in ("--values", file)]


def _helm(*arguments: str | Path) -> str:
    done = tools.run("helm", *arguments)
    if done.returncode:
        lines = (done.stderr + done.stdout).strip().splitlines()
        raise ChartError("\n".join(line for line in lines if not line.startswith("level=INFO")))
    return done.stdout


def differences(made: list[Doc], wanted: list[Doc]) -> list[Finding]:
    """Find where the chart's objects are not the wanted ones: missing, too many, or another value in a field."""
    left = {name_of(doc): doc for doc in made}
    found = []
    for doc in wanted:
        name = name_of(doc)
        if name not in left:
            found.append(Finding(name, "", "the chart does not make it"))
            continue
        for path, mine, theirs in _differ(_parsed(left.pop(name)), _parsed(doc), ""):
            found.append(Finding(name, path, f"the chart has {_shown(mine)}, and the overlay {_shown(theirs)}"))
    return found + [Finding(name, "", "the chart makes it, and the overlay does not") for name in left]


def _parsed(doc: Doc) -> Doc:
    """Return the object with Serve's config parsed, since its order and its quotes say nothing."""
    if doc["kind"] != "RayService":
        return doc
    doc = copy.deepcopy(doc)
    doc["spec"]["serveConfigV2"] = yaml.safe_load(doc["spec"]["serveConfigV2"])
    return doc


_NOTHING = object()


def _shown(value: Any) -> str:
    return "nothing" if value is _NOTHING else repr(value)


def _differ(mine: Any, theirs: Any, path: str) -> list[tuple[str, Any, Any]]:
    if isinstance(mine, dict) and isinstance(theirs, dict):
        names = [*theirs, *(name for name in mine if name not in theirs)]
        return [
            one
            for name in names
            for one in _differ(mine.get(name, _NOTHING), theirs.get(name, _NOTHING), f"{path}.{name}".lstrip("."))
        ]
    if isinstance(mine, list) and isinstance(theirs, list) and len(mine) == len(theirs):
        return [one for i, pair in enumerate(zip(mine, theirs, strict=True)) for one in _differ(*pair, f"{path}[{i}]")]
    same = mine == theirs and isinstance(mine, bool) == isinstance(theirs, bool)  # Helm writes 1.0 as 1
    return [] if same else [(path, mine, theirs)]


def check(monitoring: list[Doc]) -> list[Finding]:
    """Find differences from every overlay, and from the monitoring objects, which are checked beside one of them.

    Raises:
        ChartError: Helm refuses the chart.
        ToolMissing: there is no Helm.
    """
    found = []
    if chart_values.SCHEMA.read_text() != chart_values.text():
        found.append(Finding("chart/values.schema.json", "", "is out of date: `make render-k8s`"))
    lint([])
    for overlay in OVERLAYS:
        lint(values_of(overlay))
        wanted = [doc for doc in rendered(overlay) if name_of(doc) not in NOT_MADE]
        found += _in(overlay, differences(template_with(values_of(overlay)), wanted))
    files = [*values_of("gpu"), VALUES / f"{MONITORING}.yaml"]
    wanted = [doc for doc in rendered("gpu") if name_of(doc) not in NOT_MADE]
    return found + _in(MONITORING, differences(template_with(files), [*wanted, *monitoring]))


def _in(name: str, found: list[Finding]) -> list[Finding]:
    return [Finding(f"chart, {name}: {one.where}", one.field, one.problem) for one in found]

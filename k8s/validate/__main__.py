"""Owns `python -m k8s.validate`: it runs every check on every build and prints a line for each finding.
Never passes if a check could not run."""

from __future__ import annotations

import argparse
import re
import sys

import yaml

from k8s import chart_values
from k8s.validate import (
    alerts,
    builds,
    chart,
    compose,
    core_objects,
    cross_checks,
    custom_resources,
    metric_names,
    operator_rules,
    pods,
    serve_config,
    tools,
)
from k8s.validate.manifests import BUILDS, K8S, MONITORING, OVERLAYS, Doc, Finding, read


def check_objects(docs: list[Doc]) -> list[Finding]:
    """Check every object by itself."""
    found: list[Finding] = []
    for doc in docs:
        wrong = (custom_resources if doc.get("kind") in custom_resources.KINDS else core_objects).check(doc)
        found += wrong
        if wrong:
            continue  # the other checks rely on fields that the schema check has accepted
        if doc["kind"] == "RayService":
            found += [*operator_rules.check(doc), *serve_config.check(doc)]
        found += pods.check(doc)
    return found


def check_build(docs: list[Doc]) -> list[Finding]:
    """Check the objects of one build, and if each is valid, whether they fit together."""
    return check_objects(docs) or cross_checks.check(docs)


def _check_all() -> list[Finding]:
    built = {name: builds.build(name) for name in BUILDS}
    docs = {name: read(text) for name, text in built.items()}
    found = [
        Finding(f"{name}: {one.where}", one.field, one.problem) for name in OVERLAYS for one in check_build(docs[name])
    ]
    # The monitors select pods of other builds: those of every overlay.
    for name in OVERLAYS:
        found += [one for one in check_build([*docs[name], *docs[MONITORING]]) if one not in found]
    found += _check_examples()
    found += [*builds.check_copies(built), *metric_names.check(), *alerts.check(), *alerts.check_with_promtool()]
    found += chart.check(docs[MONITORING])
    found += [*compose.check_rules(), *compose.check_schema(), *compose.check_with_promtool()]
    linted = tools.run("hadolint", "--no-color", K8S / "Dockerfile")
    return found + [Finding("Dockerfile", "", line) for line in linted.stdout.splitlines()]


def _check_examples() -> list[Finding]:
    """Check the README's example overlay, and all components together, since they are made to be combined."""
    (example,) = re.findall(r"```yaml\n(.*?)```", (K8S / "README.md").read_text(), re.DOTALL)
    components = sorted(path.name for path in (K8S / "components").iterdir())
    everything = {"resources": ["../gpu"], "components": [f"../../components/{name}" for name in components]}
    texts = {"README.md's overlay": example, "all components": yaml.safe_dump(everything)}
    return [
        Finding(f"{name}: {one.where}", one.field, one.problem)
        for name, text in texts.items()
        for one in check_build(read(builds.build_example(text)))
    ]


def main(arguments: list[str] | None = None) -> int:
    """Returns 0 if all is well. Otherwise returns 1 and prints a line to standard error for each finding, or for a
    program that is missing."""
    parser = argparse.ArgumentParser(
        prog="python -m k8s.validate",
        description="Build the Kubernetes manifests and check them, with their alerts and dashboards, without a "
        "cluster; and check compose.yaml.",
    )
    parser.add_argument(
        "--render", action="store_true", help="only write the files that tests compare with; check nothing"
    )
    try:
        if parser.parse_args(arguments).render:
            builds.render()
            chart_values.main()
            compose.render()
            return 0
        found = _check_all()
    except (tools.ToolMissing, builds.BuildError, chart.ChartError) as error:
        print(error, file=sys.stderr)
        return 1
    for one in found:
        print(one, file=sys.stderr)
    if not found:
        print(f"{len(BUILDS)} builds are valid, and the chart makes the same objects: {', '.join(BUILDS)}")
        print(f"{compose.COMPOSE.name} is valid")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())

"""Owns the checks of the alerts: promtool's, their unit tests, and that each has what the person on call needs.
Never evaluates a rule itself."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path
from typing import Any

import yaml

from k8s.validate import tools
from k8s.validate.manifests import K8S, Doc, Finding, at, of_kind, read
from k8s.validate.metric_names import ALERTS

TESTS = K8S / "monitoring" / "alerts.test.yaml"
RUNBOOK = K8S / "README.md"


def rules() -> Doc:
    """Return the only PrometheusRule."""
    (found,) = of_kind(read(ALERTS.read_text()), "PrometheusRule")
    return found


def alerts_of(doc: Doc) -> list[Doc]:
    return [rule for group in at(doc, "spec.groups", []) for rule in group["rules"] if "alert" in rule]


def headings(markdown: str) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    titles = re.findall(r"^#+ +(.+)$", markdown, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


def check(doc: Doc | None = None, tests: Doc | None = None) -> list[Finding]:
    """Find alerts that lack a test in which they fire, one in which they do not, a summary, a severity, or, if they
    page, a section of the runbook."""
    doc = rules() if doc is None else doc
    tests = yaml.safe_load(TESTS.read_text()) if tests is None else tests
    anchors = headings(RUNBOOK.read_text())
    found = []
    for alert in alerts_of(doc):
        name, severity = alert["alert"], at(alert, "labels.severity")
        problems = [*_untested(name, tests)]
        if severity not in ("page", "ticket"):
            problems.append(("labels.severity", f"must be page or ticket, but it is {severity}"))
        if not at(alert, "annotations.summary"):
            problems.append(("annotations.summary", "is missing"))
        runbook = at(alert, "annotations.runbook_url", "")
        if severity == "page" and runbook.partition("#")[2] not in anchors:
            problems.append(("annotations.runbook_url", f"leads to no section of {RUNBOOK.name}: {runbook!r}"))
        found += [Finding(f"alert {name}", field, problem) for field, problem in problems]
    return found


def _untested(name: str, tests: Doc) -> list[tuple[str, str]]:
    cases: list[Any] = [case for test in tests["tests"] for case in test.get("alert_rule_test", [])]
    mine = [bool(case.get("exp_alerts")) for case in cases if case["alertname"] == name]
    problems = []
    if True not in mine:
        problems.append(("", f"no test in {TESTS.name} in which it fires"))
    if False not in mine:
        problems.append(("", f"no test in {TESTS.name} in which it does not fire"))
    return problems


def check_with_promtool(doc: Doc | None = None) -> list[Finding]:
    """Run promtool on the rules and their tests. Raises ToolMissing."""
    doc = rules() if doc is None else doc
    with tempfile.TemporaryDirectory() as scratch:
        # promtool reads Prometheus' own files; a PrometheusRule has such a file as its spec.
        (Path(scratch) / "rules.yaml").write_text(yaml.safe_dump(doc["spec"]))
        (Path(scratch) / "tests.yaml").write_text(TESTS.read_text())
        checks = (("check", "rules", "rules.yaml"), ("test", "rules", "tests.yaml"))
        done = [tools.run("promtool", *words, Path(scratch) / file) for *words, file in checks]
    return [
        Finding("promtool", "", (one.stdout + one.stderr).strip().replace(scratch, ""))
        for one in done
        if one.returncode
    ]

"""Owns the rules of compose.yaml's Prometheus, made from the alerts of Kubernetes, and the checks by Compose's
schema and promtool.
Never starts a service. tests/compose checks whether the services fit together."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import jsonschema
import yaml

from k8s.validate import alerts, tools
from k8s.validate.manifests import ROOT, Finding

COMPOSE = ROOT / "compose.yaml"
DIRECTORY = ROOT / "compose"
OVERRIDES = (DIRECTORY / "gpu.yaml", DIRECTORY / "keys.yaml", DIRECTORY / "kv-disk.yaml")
"""Files that a user adds to COMPOSE, any of them."""
PROMETHEUS = DIRECTORY / "prometheus.yaml"
RULES = DIRECTORY / "rules.yaml"
SCHEMA = "compose-spec.json"
_JOBS = {"chunkserve/chunkserve-head": "ray"}
"""Jobs that the alerts name -> what they are called here. An alert for a job that nobody has would always fire."""
_NAMESPACE = ', namespace="chunkserve"'
"""What the alerts ask of targets in Kubernetes. Here targets have no namespace."""
_HEAD = "# Written by `make render-k8s` from k8s/monitoring/alerts.yaml, which has the comments.\n"


def rules_text() -> str:
    """Make a rule file of Prometheus from the only PrometheusRule: such an object has a rule file as its `spec`."""
    text: str = yaml.safe_dump(alerts.rules()["spec"], sort_keys=False, width=1000)
    for theirs, ours in _JOBS.items():
        text = text.replace(f'job="{theirs}"', f'job="{ours}"')
    return _HEAD + text.replace(_NAMESPACE, "")


def render() -> None:
    """Write the rule file that compose.yaml mounts."""
    RULES.write_text(rules_text())


def check_rules() -> list[Finding]:
    """Find a rule file that differs from the alerts."""
    stale = not RULES.is_file() or RULES.read_text() != rules_text()
    return [Finding("compose/rules.yaml", "", "is out of date: `make render-k8s`")] if stale else []


def check_schema(files: tuple[Path, ...] = (COMPOSE, *OVERRIDES)) -> list[Finding]:
    """Hold Compose files against the schema of the Compose Specification. Raises ToolMissing."""
    validator = jsonschema.Draft7Validator(json.loads(tools.find(SCHEMA).read_text()))
    return [
        Finding(path.name, error.json_path.removeprefix("$."), error.message)
        for path in files
        for error in validator.iter_errors(yaml.safe_load(path.read_text()))
    ]


def check_with_promtool() -> list[Finding]:
    """Run promtool on Prometheus's configuration and the rules that it names. Raises ToolMissing."""
    config = yaml.safe_load(PROMETHEUS.read_text())
    config["rule_files"] = [str(RULES)]  # where they are here, and not in the container
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / PROMETHEUS.name
        path.write_text(yaml.safe_dump(config))
        done = tools.run("promtool", "check", "config", path)
    said = (done.stdout + done.stderr).strip().replace(scratch, "")
    return [Finding("promtool", "", said)] if done.returncode else []

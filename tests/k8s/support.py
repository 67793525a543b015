"""Owns what the tests of the manifests share: the monitoring objects, and the mark of tests that need Helm.
Never builds anything; that takes kubectl, which `make validate-k8s` has."""

from __future__ import annotations

import pytest

from k8s.validate import tools
from k8s.validate.manifests import K8S, read

MONITORING_DOCS = [
    doc for file in ("scrape.yaml", "alerts.yaml") for doc in read((K8S / "monitoring" / file).read_text())
]
for _doc in MONITORING_DOCS:
    _doc["metadata"]["namespace"] = "chunkserve"  # as its kustomization does


def _why_there_is_no_helm() -> str:
    try:
        tools.find("helm")
    except tools.ToolMissing as error:
        return str(error)
    return ""


needs_helm = pytest.mark.skipif(bool(_why_there_is_no_helm()), reason=_why_there_is_no_helm() or "it is there")
"""`make validate-k8s` fails without it; `make test` goes on with the rest."""

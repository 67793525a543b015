"""Owns what the tests of the manifests share: the monitoring objects, and the mark for tests that need KubeRay's CRD.
Never builds anything; that takes kubectl, which `make validate-k8s` has."""

from __future__ import annotations

import pytest

from k8s.validate.manifests import K8S, read
from k8s.validate.ray_crd import CrdMissing, crd_path

MONITORING_DOCS = [
    doc for file in ("scrape.yaml", "alerts.yaml") for doc in read((K8S / "monitoring" / file).read_text())
]
for _doc in MONITORING_DOCS:
    _doc["metadata"]["namespace"] = "chunkserve"  # as its kustomization does


def _why_there_is_no_crd() -> str:
    try:
        crd_path()
    except CrdMissing as error:
        return str(error)
    return ""


needs_crd = pytest.mark.skipif(bool(_why_there_is_no_crd()), reason=_why_there_is_no_crd() or "it is there")
"""`make validate-k8s` fails without it; `make test` goes on with the rest."""

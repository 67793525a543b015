"""Owns what the tests of the manifests share: the monitoring objects.
Never builds anything; that takes kubectl, which `make validate-k8s` has."""

from __future__ import annotations

from k8s.validate.manifests import K8S, read

MONITORING_DOCS = [
    doc for file in ("scrape.yaml", "alerts.yaml") for doc in read((K8S / "monitoring" / file).read_text())
]
for _doc in MONITORING_DOCS:
    _doc["metadata"]["namespace"] = "chunkserve"  # as its kustomization does

"""What an API server does with custom resources: it fills in defaults and refuses what the CRD does not allow."""

from __future__ import annotations

import gzip
import hashlib
import re
from typing import Any

import pytest
import yaml

from k8s.validate import builds, custom_resources
from k8s.validate.manifests import K8S, ROOT, Doc, at, of_kind

SOURCES = {one["file"]: one for one in yaml.safe_load((custom_resources.CRDS / "sources.yaml").read_text())}
POOL: Doc = {
    "apiVersion": "inference.networking.k8s.io/v1",
    "kind": "InferencePool",
    "metadata": {"name": "pool", "namespace": "chunkserve"},
    "spec": {
        "selector": {"matchLabels": {"app": "server"}},
        "targetPorts": [{"number": 8000}],
        "endpointPickerRef": {"name": "picker", "port": {"number": 9002}},
    },
}
ROUTE: Doc = {
    "apiVersion": "gateway.networking.k8s.io/v1",
    "kind": "HTTPRoute",
    "metadata": {"name": "route", "namespace": "chunkserve"},
    "spec": {"parentRefs": [{"name": "gateway"}], "rules": [{"backendRefs": [{"name": "server", "port": 8000}]}]},
}


def with_spec(doc: Doc, **changes: Any) -> Doc:
    return {**doc, "spec": {**doc["spec"], **changes}}


@pytest.mark.parametrize("kind", custom_resources.KINDS)
def test_a_crd_is_its_projects_own_file_byte_for_byte_with_its_version_and_licence(kind: str) -> None:
    source = SOURCES[custom_resources.KINDS[kind]]
    content = gzip.decompress((custom_resources.CRDS / source["file"]).read_bytes())
    assert hashlib.sha256(content).hexdigest() == source["sha256"]
    assert source["licence"].startswith("Apache-2.0, ")
    version = re.search(r"bundle-version: (\S+)", content.decode())
    assert version is None or version[1] == source["version"]
    assert custom_resources.schema(kind)["properties"]["spec"]


def test_every_file_of_the_folder_is_one_that_is_used() -> None:
    files = {path.name for path in custom_resources.CRDS.iterdir()}
    assert files == {"sources.yaml", *custom_resources.KINDS.values()} == {"sources.yaml", *SOURCES}


def test_the_operator_that_the_pages_install_is_of_the_crds_version() -> None:
    pages = [K8S / "README.md", ROOT / "docs" / "tutorials" / "first-cluster.md"]
    installed = {found for page in pages for found in re.findall(r"kuberay-operator --version (\S+)", page.read_text())}
    assert {f"v{version}" for version in installed} == {SOURCES[custom_resources.KINDS["RayService"]]["version"]}


def test_defaults_are_filled_in_as_the_api_server_does() -> None:
    (service,) = of_kind(builds.rendered("incremental-upgrade"), "RayService")
    del service["spec"]["upgradeStrategy"]["clusterUpgradeOptions"]["maxSurgePercent"]
    filled = custom_resources.with_defaults(service)
    assert at(filled, "spec.upgradeStrategy.clusterUpgradeOptions.maxSurgePercent") == 100
    assert at(service, "spec.upgradeStrategy.clusterUpgradeOptions.maxSurgePercent") is None


def test_a_pool_and_a_route_are_admitted() -> None:
    assert custom_resources.check(POOL) == []
    assert custom_resources.check(ROUTE) == []


@pytest.mark.parametrize(
    ("doc", "field", "message"),
    [
        (
            {**POOL, "apiVersion": "inference.networking.x-k8s.io/v1alpha2"},
            "apiVersion",
            "must be inference.networking",
        ),
        (with_spec(POOL, selector={}), "spec.selector.matchLabels", "is required"),
        (with_spec(POOL, selector={"matchLabels": {}}), "spec.selector.matchLabels", "must have minProperties 1"),
        (with_spec(POOL, targetPorts=[]), "spec.targetPorts", "must have minItems 1"),
        (with_spec(POOL, targetPorts=[{"number": 65536}]), "spec.targetPorts[0].number", "must have maximum 65535"),
        (with_spec(POOL, targetPorts=[{"number": 0}]), "spec.targetPorts[0].number", "must have minimum 1"),
        (with_spec(POOL, targetPorts=[{"number": 1}] * 2), "spec.targetPorts", "port number must be unique"),
        (with_spec(POOL, endpointPickerRef={"name": "picker"}), "spec.endpointPickerRef", "port is required when kind"),
        (with_spec(POOL, endpointPickerRef={"name": "", "kind": "X"}), "spec.endpointPickerRef.name", "minLength 1"),
        (with_spec(ROUTE, hosts=["a"]), "spec.hosts", "is no field of this CRD"),
        (with_spec(ROUTE, rules=[{"timeouts": {"request": "15"}}]), "spec.rules[0].timeouts.request", "must match"),
        (with_spec(ROUTE, rules=[{"backendRefs": [{"name": "a"}]}]), "spec.rules[0].backendRefs[0]", "Must have port"),
    ],
)
def test_what_a_crd_does_not_allow_is_named(doc: Doc, field: str, message: str) -> None:
    found = custom_resources.check(doc)
    assert [one.field for one in found] == [field]
    assert message in found[0].problem


def test_a_rule_reads_a_field_whose_name_is_a_word_of_cels() -> None:
    """`namespace` is `__namespace__` in a rule: without that, the first two of these were the same parent."""
    parents = [{"name": "gateway", "namespace": "a"}, {"name": "gateway", "namespace": "b"}]
    assert custom_resources.check(with_spec(ROUTE, parentRefs=parents)) == []
    (found,) = {one.field for one in custom_resources.check(with_spec(ROUTE, parentRefs=[*parents, parents[0]]))}
    assert found == "spec.parentRefs"

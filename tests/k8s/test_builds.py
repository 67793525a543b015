"""Every overlay as kustomize built it passes every check that needs no program."""

from __future__ import annotations

import tomllib

import pytest
import yaml

from k8s.validate import builds, pods
from k8s.validate.__main__ import check_build
from k8s.validate.manifests import K8S, OVERLAYS, ROOT, at, groups, of_kind
from k8s.validate.serve_config import settings_of
from tests.k8s.support import MONITORING_DOCS


def service_of(overlay: str) -> dict[str, object]:
    (service,) = of_kind(builds.rendered(overlay), "RayService")
    return service


def test_the_overlays_are_those_that_the_readme_describes() -> None:
    names = "cpu-demo gcs-fault-tolerance gpu incremental-upgrade inference-gateway kv-disk mtls spot tensor-parallel"
    assert list(OVERLAYS) == names.split()
    readme = (K8S / "README.md").read_text()
    assert not [name for name in OVERLAYS if f"| `{name}` |" not in readme]


def test_the_copies_that_tests_read_are_built_from_the_sources_as_they_are() -> None:
    assert builds.check_stamps() == []


def test_a_changed_source_makes_its_copies_out_of_date(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(builds, "sources_digest", lambda: "another")
    assert [one.where for one in builds.check_stamps()] == [f"rendered/{name}.yaml" for name in OVERLAYS]


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_an_overlay_is_valid_and_its_parts_fit_together(overlay: str) -> None:
    assert check_build([*builds.rendered(overlay), *MONITORING_DOCS]) == []


def test_the_demo_asks_for_no_gpu_and_the_others_for_one_a_rank_of_an_engine() -> None:
    for overlay in OVERLAYS:
        service = service_of(overlay)
        gpus = {group.start_params.get("num-gpus", "0") for group in groups(service)[1:]}
        wanted = 0.0 if overlay == "cpu-demo" else settings_of(service).num_ranks
        assert gpus == {str(int(wanted))}, overlay
        assert settings_of(service).engine_num_gpus == wanted, overlay


def test_both_ranks_of_an_engine_are_on_the_node_whose_gpus_it_reserves() -> None:
    settings = settings_of(service_of("tensor-parallel"))
    assert settings.engine_placement["placement_group_strategy"] == "STRICT_PACK"
    assert settings.engine_placement["placement_group_bundles"] == [{"CPU": 4.0, "GPU": 1.0}] * 2


def test_an_engine_on_a_spot_node_is_not_where_clients_are_sent() -> None:
    on_demand, spot = groups(service_of("spot"))[1:]
    assert "readinessGates" not in on_demand.pod
    assert at(spot.pod, "readinessGates") == [{"conditionType": "chunkserve/takes-clients"}]
    config = yaml.safe_load(at(service_of("spot"), "spec.serveConfigV2"))
    placed = config["applications"][0]["deployments"]
    assert {deployment["name"] for deployment in placed} == {"Ingress", "ResponsesStore"}
    for deployment in placed:  # a lost node would take with it what the store keeps for everybody
        assert at(deployment, "ray_actor_options.label_selector") == at(on_demand.spec, "labels")
    assert at(spot.spec, "labels") != at(on_demand.spec, "labels")


def test_the_spot_components_config_is_the_gpu_overlays_but_for_where_replicas_are() -> None:
    """A string cannot be patched, so the config is there twice."""
    (gpu,), (spot,) = (
        yaml.safe_load(at(service_of(name), "spec.serveConfigV2"))["applications"] for name in ("gpu", "spot")
    )
    del spot["deployments"], spot["args"]["max_migrations"]
    assert spot == gpu


def test_the_environment_of_the_pods_is_what_the_docs_ask_of_a_cluster_that_runs() -> None:
    page = (ROOT / "docs" / "how-to" / "existing-cluster.md").read_text()
    assert not [name for name in pods.REQUIRED_ENV if f"| `{name}` |" not in page]


def test_the_checks_are_no_part_of_what_is_installed() -> None:
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    assert not [name for name in listed if name.startswith("k8s")]

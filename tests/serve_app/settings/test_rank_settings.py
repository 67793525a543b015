"""Contracts of an engine's ranks in Serve: what is reserved for each, where they are placed, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from pydantic import ValidationError
from ray.serve._private.config import ReplicaConfig

from serve_app import app
from serve_app.replicas.deployment import EngineReplica, needs_of
from serve_app.settings import model as model_settings
from serve_app.settings.application import AppSettings
from serve_app.settings.ranks import ONE_NODE, Placement, check_ranks, placement_options, rank_options, ranks_in


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Let every engine have so many ranks."""
    return lambda size: monkeypatch.setattr(model_settings, "ranks_of", lambda config: size)


@pytest.mark.parametrize(
    ("size", "gpus", "placement", "why"),
    [
        (2, 1, ONE_NODE, r"engine_num_gpus is 1, but engine\.tensor_parallel_size is 2, and each rank has a GPU"),
        (2, 4, ONE_NODE, r"engine_num_gpus is 4, but engine\.tensor_parallel_size is 2"),
        (2, 0.5, ONE_NODE, r"engine_num_gpus is 0\.5, but an engine measures and takes the memory of a whole GPU"),
        (2, 1.5, ONE_NODE, r"engine_num_gpus is 1\.5, but an engine measures"),
        (1, 2, ONE_NODE, r"engine_num_gpus is 2, but engine\.tensor_parallel_size is 1: use 1 and"),
        (
            1,
            1,
            "spread",
            r"placement is spread, but engine\.tensor_parallel_size and engine\.expert_parallel_size are 1",
        ),
    ],
)
def test_ranks_without_a_whole_gpu_each_and_places_for_nobody_are_refused(
    size: int, gpus: float, placement: Placement, why: str
) -> None:
    with pytest.raises(ValueError, match=why):
        check_ranks(size, gpus, placement)


@pytest.mark.parametrize("setting", ["tensor_parallel_size", "expert_parallel_size"])
def test_a_refusal_names_the_setting_that_asked_for_ranks(setting: str) -> None:
    with pytest.raises(ValidationError, match=rf"engine_num_gpus is 1, but engine\.{setting} is 2"):
        AppSettings.model_validate({"engine": {setting: 2}, "engine_num_gpus": 1})


@pytest.mark.parametrize(("size", "gpus"), [(1, 0), (1, 1), (2, 0), (2, 2), (8, 8)])
def test_each_rank_has_a_gpu_or_none_has(size: int, gpus: float) -> None:
    check_ranks(size, gpus, ONE_NODE)


@pytest.mark.parametrize("size", [2, "2", 2.0, True, 0, -2, "two", None])
def test_a_size_that_is_not_checked_yet_counts_as_the_check_will_read_it(size: Any) -> None:
    """Regression: a size in quotes counted as 1, so its ranks were given one GPU, which was then refused."""
    settings = {"tensor_parallel_size": size}
    try:
        read = AppSettings.model_validate({"engine": settings}).engine.tensor_parallel_size
    except ValidationError:
        read = 1
    assert ranks_in(settings) == read


def test_ranks_with_requests_of_their_own_have_seats_and_a_queue_each() -> None:
    """Otherwise each rank of N would get an Nth of what it can run, and Serve would hold back the rest."""
    engine = {"max_num_seqs": 8, "max_queued_requests": 3, "expert_parallel_size": 4}
    settings = AppSettings.model_validate({"engine": engine, "admission": {"dispatch_backlog": 2}})
    (policy,) = settings.gate_policies
    assert policy.dispatch_per_engine == 4 * 8 + 2
    assert policy.concurrent_per_engine == settings.engine_capacity == 4 * (8 + 3)
    few = AppSettings.model_validate({"engine": engine, "admission": {"dispatch_backlog": 100}})
    assert few.gate_policies[0].dispatch_per_engine == 4 * (8 + 3), "no more than the ranks have room for"
    alone = AppSettings.model_validate({"engine": engine | {"expert_parallel_size": 1, "tensor_parallel_size": 4}})
    assert alone.engine_capacity == 8 + 3, "these have one queue"


def test_a_replicas_resources_are_shared_out_equally() -> None:
    assert rank_options(4, 8, 4, "H200") == {"num_cpus": 2, "num_gpus": 1, "accelerator_type": "H200"}
    assert rank_options(1, 0.5, 0, None) == {"num_cpus": 0.5, "num_gpus": 0}


def test_a_single_rank_is_no_placement_group() -> None:
    """Serve would otherwise create one for each replica, as before there were ranks."""
    assert placement_options(1, rank_options(1, 8, 1, None), ONE_NODE) == {}


@pytest.mark.parametrize("placement", ["strict_pack", "pack", "spread"])
def test_a_bundle_for_each_rank_is_placed_as_asked(placement: Placement) -> None:
    found = placement_options(2, rank_options(2, 4, 2, "H200"), placement)
    bundle = {"CPU": 2.0, "GPU": 1.0, "accelerator_type:H200": 0.001}
    assert found == {"placement_group_bundles": [bundle, bundle], "placement_group_strategy": placement.upper()}


@pytest.mark.parametrize(("cpus", "gpus", "kind"), [(16, 8, None), (16, 8, "H200"), (0.5, 0, None), (0, 0, None)])
def test_serve_accepts_the_bundles_and_finds_the_replica_to_fit_into_the_first(
    cpus: float, gpus: float, kind: str | None
) -> None:
    options = rank_options(8, cpus, gpus, kind)
    found = ReplicaConfig.create(
        EngineReplica, ray_actor_options=dict(options), **placement_options(8, options, ONE_NODE)
    )
    assert len(found.placement_group_bundles) == 8
    assert all(found.placement_group_bundles)


def test_the_application_asks_serve_for_them(ranks: Callable[[int], None]) -> None:
    ranks(2)
    args = AppSettings(engine_num_gpus=2, engine_num_cpus=4, tensor_parallel_placement="spread")
    engine = built(args)
    assert engine.placement_group_bundles == [{"CPU": 2.0, "GPU": 1.0}] * 2
    assert engine.placement_group_strategy == "SPREAD"
    assert engine.ray_actor_options["num_gpus"] == 1


def test_an_application_with_one_rank_asks_for_none() -> None:
    assert built(AppSettings()).placement_group_bundles is None


def built(args: AppSettings) -> ReplicaConfig:
    """Return what Serve is told of the first engine deployment."""
    ingress: Any = app.build(args)
    (engine,) = ingress._bound_deployment.init_args[1]
    found: ReplicaConfig = engine._bound_deployment._replica_config
    return found


def test_a_placement_that_ray_does_not_know_is_refused_by_its_name() -> None:
    with pytest.raises(ValidationError, match=r"tensor_parallel_placement\n.*'strict_pack', 'pack' or 'spread'"):
        AppSettings.model_validate({"tensor_parallel_placement": "near"})


def test_what_is_missing_on_a_node_is_the_whole_engines_only_where_all_ranks_must_be_on_one(
    ranks: Callable[[int], None],
) -> None:
    ranks(4)
    args: dict[str, Any] = {"engine_num_gpus": 4, "engine_num_cpus": 8}
    assert needs_of(AppSettings(**args)) == {"CPU": 8, "GPU": 4}
    assert needs_of(AppSettings(**args, tensor_parallel_placement="spread")) == {"CPU": 2, "GPU": 1}

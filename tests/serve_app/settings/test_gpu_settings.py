"""Contracts of GPUs in Serve: an engine replica has one or none, and config.gpu.yaml says so in an accepted way.
Never starts a server: there is no GPU to serve from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from serve_app.routing.router import router_config
from serve_app.settings.application import AppSettings

ROOT = Path(__file__).parents[3]


def test_the_config_for_gpus_is_accepted_and_reserves_one_for_each_engine() -> None:
    (application,) = yaml.safe_load((ROOT / "config.gpu.yaml").read_text())["applications"]
    settings = AppSettings.model_validate(application["args"])
    assert settings.engine_resources == {"num_cpus": 2, "num_gpus": 1}
    assert settings.engine.device == "cuda"
    assert settings.engine.block_size == 64
    kwargs = router_config(settings.routing, settings.engine).request_router_kwargs
    assert kwargs["block_size"] == 64, "the router finds the prefixes that the engines keep"
    assert settings.autoscaling is not None
    assert settings.most_engines == 4


def test_the_config_for_gpus_differs_from_the_other_in_its_arguments_alone() -> None:
    gpu, cpu = (yaml.safe_load((ROOT / name).read_text()) for name in ("config.gpu.yaml", "config.yaml"))
    for config in (gpu, cpu):
        config["applications"][0].pop("args")
    assert gpu == cpu


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        (
            {"engine_num_gpus": 0.5},
            r"engine_num_gpus is 0\.5, but an engine measures and takes the memory of a whole GPU",
        ),
        ({"engine_num_gpus": 1.5}, r"engine_num_gpus is 1\.5, but an engine measures"),
        (
            {"engine_num_gpus": 2},
            "is 2, but engine.tensor_parallel_size is 1: use 1 and engine_replicas",
        ),
        ({"engine_num_gpus": 1, "engine": {"device": "cpu"}}, "but engine.device is cpu: Ray would reserve a GPU"),
        (
            {"engine_num_gpus": 1, "engine": {"executor": "fake"}},
            "but engine.executor is fake: Ray would reserve a GPU",
        ),
        ({"engine": {"device": "cuda"}}, "engine.device is cuda, but engine_num_gpus is 0"),
        ({"engine_accelerator_type": "H100"}, "engine_accelerator_type is H100, but engine_num_gpus is 0"),
    ],
)
def test_gpus_that_an_engine_could_not_use_as_asked_are_refused(settings: dict[str, Any], why: str) -> None:
    with pytest.raises(ValidationError, match=why):
        AppSettings.model_validate(settings)


def test_without_a_gpu_ray_reserves_none() -> None:
    assert AppSettings().engine_resources == {"num_cpus": 0.5, "num_gpus": 0}
    assert AppSettings(engine_num_gpus=1).engine_resources == {"num_cpus": 0.5, "num_gpus": 1}


def test_a_replica_that_holds_a_gpu_never_serves_from_the_cpu() -> None:
    assert AppSettings(engine_num_gpus=1).replica_engine.device == "cuda"
    assert AppSettings().replica_engine.device == "auto"

"""The chart downloads, awaits and places each model that values name, in the form and on the nodes that it needs."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
import yaml

from k8s.validate import chart
from k8s.validate.__main__ import check_build
from k8s.validate.manifests import Doc, at, groups, of_kind
from serve_app.settings.application import AppSettings
from tests.k8s.support import needs_helm


@needs_helm
def test_each_of_several_models_is_downloaded_awaited_and_served(tmp_path: Path) -> None:
    values = tmp_path / "models.yaml"
    entries = [{"model": "org/one", "served_model_name": "one"}, {"model": "org/two"}, {"model": "org/two-b"}]
    values.write_text(yaml.safe_dump({"args": {"models": entries}}))
    made = chart.template_with([values])
    assert check_build(made) == []
    (service,), (job,) = of_kind(made, "RayService"), of_kind(made, "Job")
    args = yaml.safe_load(service["spec"]["serveConfigV2"])["applications"][0]["args"]
    assert "model" not in args
    assert args["models"] == entries
    names = ["org/one", "org/two", "org/two-b"]
    worker = service["spec"]["rayClusterConfig"]["workerGroupSpecs"][0]["template"]["spec"]
    for containers in (worker["initContainers"], job["spec"]["template"]["spec"]["containers"]):
        assert [one["command"][-1] for one in containers] == names
        assert len({one["name"] for one in containers}) == len(names)
    del job["spec"]["template"]["spec"]["containers"][1], worker["initContainers"][2]
    found = " ".join(map(str, check_build(made)))
    assert "nothing waits for org/two-b, which is served" in found
    assert "has org/two, which Job/model-cache-fill does not download" in found


@needs_helm
@pytest.mark.parametrize(
    ("args", "placed"),
    [
        ({}, ["Ingress"]),
        ({"ingress_replicas": 2}, ["Ingress", "ResponsesStore"]),
        ({"ingress_replicas": 2, "responses_store": {"max_mib": 0}}, ["Ingress"]),
        ({"ingress_num_cpus": 0}, ["Ingress"]),
    ],
    ids=["one ingress replica", "several", "several that keep nothing", "one without a CPU of its own"],
)
def test_with_spot_nodes_the_deployments_that_there_are_have_a_place(
    tmp_path: Path, args: Doc, placed: list[str]
) -> None:
    """A place for a store that was not there made Serve refuse the application, with the chart's own defaults."""
    values = tmp_path / "spot.yaml"
    values.write_text(yaml.safe_dump({"spot": {"enabled": True}, "args": args}))
    made = chart.template_with([values])
    assert check_build(made) == []
    (service,) = of_kind(made, "RayService")
    deployments = yaml.safe_load(service["spec"]["serveConfigV2"])["applications"][0]["deployments"]
    assert [one["name"] for one in deployments] == placed
    assert deployments[0]["ray_actor_options"]["num_cpus"] == AppSettings(**args).ingress_num_cpus


@needs_helm
@pytest.mark.parametrize(
    ("setting", "both"),
    [
        ("quantize=stored", True),
        ("quantize=none", True),
        ("batch_invariant=true", True),
        ("quantize=auto", False),
        ("block_size=32", False),
    ],
)
def test_a_gguf_file_is_there_in_the_form_that_engines_ask_for(setting: str, both: bool) -> None:
    """The Job prepared what suits its own processor, which engines that ask for the other form cannot read."""
    made = chart.template("--set", f"args.engine.{setting}")
    assert check_build(made) == []
    (service,), (job,) = of_kind(made, "RayService"), of_kind(made, "Job")
    fill = at(job, "spec.template.spec.containers[0].command")
    wait = at(groups(service)[1].pod, "initContainers[0].command")
    for command in (shlex.join(fill), wait[2]):
        assert ("engine.checkpoints.prepare --quantize both" in command) is both
    assert fill[-1] == wait[-1] == AppSettings().model


@needs_helm
def test_a_model_that_has_one_form_is_prepared_as_ever() -> None:
    """Another command of the Job or of the pods is a new cluster, with twice the GPUs."""
    asked = ("--set", "args.engine.quantize=none", "--set", "args.engine.batch_invariant=true")
    for made in (
        chart.template_with(chart.values_of("gpu"), *asked),
        chart.template("--set", "args.model=a/b", *asked),
    ):
        assert "--quantize" not in json.dumps([at(doc, "spec") for doc in made if doc["kind"] in ("Job", "RayService")])


@needs_helm
def test_of_several_models_the_gguf_files_that_engines_ask_a_form_of_are_there_in_both(tmp_path: Path) -> None:
    values = tmp_path / "models.yaml"
    asking = {"quantize": "none"}
    entries = [
        {"model": "/models/a.gguf", "engine": asking},
        {"model": "/models/b.gguf"},
        {"model": "org/c", "engine": {**asking, "speculative": {"method": "draft_model", "model": "/models/d.gguf"}}},
        {"model": "smollm2-135m-instruct", "engine": asking},
    ]
    values.write_text(yaml.safe_dump({"args": {"models": entries}}))
    made = chart.template_with([values])
    (service,), (job,) = of_kind(made, "RayService"), of_kind(made, "Job")
    asked = {"/models/a.gguf", "/models/d.gguf", "smollm2-135m-instruct"}
    for containers in (at(job, "spec.template.spec.containers"), groups(service)[1].pod["initContainers"]):
        assert len(containers) == 5
        assert {one["command"][-1] for one in containers if "--quantize both" in " ".join(one["command"])} == asked


@needs_helm
def test_a_token_of_the_hub_is_for_the_job_alone() -> None:
    """It alone asks the Hub; without a token, no model that needs one could be served."""
    made = chart.template("--set", "modelCache.hubTokenSecretName=hub", "--set", "args.models[0].model=a/b")
    assert check_build(made) == []
    assert json.dumps(made).count("HF_TOKEN") == 1
    (job,) = of_kind(made, "Job")
    (container,) = at(job, "spec.template.spec.containers")
    assert container["env"][-1]["valueFrom"] == {"secretKeyRef": {"name": "hub", "key": "token"}}


@needs_helm
def test_an_engine_over_several_nodes_takes_of_each_what_one_rank_takes(tmp_path: Path) -> None:
    values = tmp_path / "ranks.yaml"
    ranks = {"tensor_parallel_placement": "pack", "engine": {"tensor_parallel_size": 4}, "engine_num_gpus": 4}
    scaling = {"autoscaling": {"max_replicas": 2}}
    values.write_text(
        yaml.safe_dump({"args": {**ranks, **scaling, "engine_num_cpus": 16}, "engines": {"minReplicas": 8}})
    )
    assert check_build(chart.template_with([*chart.values_of("gpu"), values])) == []
    found = check_build(chart.template_with([*chart.values_of("gpu"), values], "--set", "engines.minReplicas=7"))
    assert "the least number of workers holds 1 engines" in " ".join(map(str, found))


@needs_helm
def test_an_engine_that_reserves_nothing_fits_anywhere() -> None:
    assert check_build(chart.template("--set", "args.engine_num_cpus=0")) == []


@needs_helm
def test_a_draft_model_is_downloaded_and_awaited(tmp_path: Path) -> None:
    """Engines that start from the cache alone, without it, would never start."""
    values = tmp_path / "draft.yaml"
    engine = {"speculative": {"method": "draft_model", "model": "org/small"}}
    values.write_text(yaml.safe_dump({"args": {"model": "org/large", "engine": engine}}))
    made = chart.template_with([values])
    assert check_build(made) == []
    (service,), (job,) = of_kind(made, "RayService"), of_kind(made, "Job")
    worker = service["spec"]["rayClusterConfig"]["workerGroupSpecs"][0]["template"]["spec"]
    for containers in (worker["initContainers"], job["spec"]["template"]["spec"]["containers"]):
        assert [one["command"][-1] for one in containers] == ["org/large", "org/small"]
        del containers[1]
    found = " ".join(map(str, check_build(made)))
    assert "nothing waits for org/small, which is served" in found
    assert "has org/small, which Job/model-cache-fill does not download" in found

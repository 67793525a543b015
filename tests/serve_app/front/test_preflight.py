"""A config that cannot be served is refused by `serve run` itself, in one line a reason, before Ray starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from loadtest.server import ROOT
from serve_app.front.config_file import ConfigRefused, read_config
from serve_app.front.preflight import INGRESS, STORE, preflight
from serve_app.settings.application import AppSettings
from tests.test_architecture import run_python


def config_with(tmp_path: Path, args: Any, import_path: str = "serve_app.app:build") -> Path:
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump({"applications": [{"name": "a", "import_path": import_path, "args": args}]}))
    return path


@pytest.mark.parametrize(
    ("args", "reason"),
    [
        ({"engine": {"ngram_max": 3}}, "args.engine.ngram_max: no such setting here (given: 3)"),
        (
            {"engine": {"max_num_batchd_tokens": 3}},
            "args.engine.max_num_batchd_tokens: no such setting here; did you mean max_num_batched_tokens? (given: 3)",
        ),
        (
            {"engine": {"attention_backend": "torch"}},
            "args.engine.attention_backend: no such setting any more: it is engine.attention (given: 'torch')",
        ),
        (
            {"engine": {"block_size": 0}},
            "args.engine.block_size: Input should be greater than or equal to 1 (given: 0)",
        ),
        (
            {"engine": {"dtype": "int4"}},
            "args.engine.dtype: Input should be 'auto', 'bfloat16', 'float16' or 'float32'",
        ),
        (
            {"engine": {"scheduler": {"preset": "vllm"}}},
            "args.engine.scheduler.preset: Input should be 'openinfer', 'mminf', 'openinfer_echo', 'atom' or 'fastdep"
            "loy' (given: 'vllm')",
        ),
        ({"engine": {"max_num_seqs": 600}}, "max_num_batched_tokens (512) must be at least max_num_seqs + 1 (601)"),
        ({"modle": "x"}, "args.modle: no such setting here; did you mean model? (given: 'x')"),
        ({"model": "/no/such/model"}, "args.model: No model '/no/such/model': expected"),
        (
            {"engine": {"speculative": {"method": "draft_model", "model": "/no/such/model"}}},
            "args.engine.speculative.model: No model '/no/such/model': expected",
        ),
        (
            {"engine": {"speculative": {"method": "draft_model"}}},
            "speculative.method is draft_model, but speculative.model does not name one",
        ),
    ],
)
def test_a_wrong_setting_is_named_with_its_rule_and_value(tmp_path: Path, args: Any, reason: str) -> None:
    with pytest.raises(ConfigRefused) as caught:
        preflight(read_config(config_with(tmp_path, args)))
    assert reason in str(caught.value)


def test_every_wrong_setting_has_a_line_of_its_own(tmp_path: Path) -> None:
    with pytest.raises(ConfigRefused) as caught:
        preflight(read_config(config_with(tmp_path, {"engine_replicas": 0, "engine": {"block_size": "many"}})))
    assert len(str(caught.value).splitlines()) == 2


def test_the_config_of_this_project_passes() -> None:
    preflight(read_config(ROOT / "config.yaml"))


def test_another_projects_application_is_left_to_ray(tmp_path: Path) -> None:
    preflight(read_config(config_with(tmp_path, {"anything": 1}, import_path="their.app:build")))


def test_a_refusal_names_file_line_and_application(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(
        "applications:\n- name: a\n  import_path: serve_app.app:build\n  args:\n    engine:\n      dtype: int4\n"
    )
    with pytest.raises(ConfigRefused) as caught:
        preflight(read_config(path))
    assert str(caught.value).startswith(f"{path}, line 6, application a: args.engine.dtype: Input should be")


def test_a_key_in_the_place_of_its_digest_is_not_shown(tmp_path: Path) -> None:
    with pytest.raises(ConfigRefused) as caught:
        preflight(read_config(config_with(tmp_path, {"auth": {"admin_sha256": "sk-secret"}})))
    assert "args.auth.admin_sha256" in str(caught.value)
    assert "secret" not in str(caught.value)


def test_the_deployments_that_may_be_named_are_those_that_the_builder_makes() -> None:
    made = run_python(
        "from ray.serve._private.build_app import build_app\n"
        "from serve_app.app import build\n"
        "from serve_app.settings.application import AppSettings\n"
        "for replicas in (1, 2):\n"
        "    app = build(AppSettings(ingress_replicas=replicas))\n"
        "    print(*(one.name for one in build_app(app, name='a').deployments))"
    )
    alone, several = (line.split() for line in made.splitlines())
    assert sorted(alone) == sorted([INGRESS, *AppSettings().engine_names])
    assert sorted(several) == sorted([INGRESS, *AppSettings().engine_names, STORE])


def test_the_documented_models_have_the_deployments_that_the_page_names() -> None:
    page = (ROOT / "docs/how-to/several-models.md").read_text()
    made = run_python(
        "import yaml\n"
        "from ray.serve._private.build_app import build_app\n"
        "from serve_app.app import build\n"
        "from serve_app.settings.application import AppSettings\n"
        "from tests.docsite.blocks import block\n"
        "config = yaml.safe_load(block('yaml', 'models:').text)\n"
        "print(*(one.name for one in build_app(build(AppSettings(**config)), name='a').deployments))"
    ).split()
    assert sorted(made) == ["Engine-llama3", "Engine-qwen3", INGRESS, STORE]
    assert all(f"`{name}`" in page for name in made if name.startswith("Engine"))


@pytest.mark.parametrize(
    ("models", "reason"),
    [
        ([{"served_model_name": "a"}, {"served_model_name": "a"}], "models.1.served_model_name is a, which"),
        ([{"served_model_name": "a", "model_aliases": {"x": "y", "y": "x"}}], "args.models.0: .*circle: x -> y -> x"),
        ([{"served_model_name": "a", "engine": {"block_size": 0}}], "args.models.0.engine.block_size: Input should"),
    ],
)
def test_a_mistake_among_several_models_is_one_line_with_its_place(
    tmp_path: Path, models: list[dict[str, Any]], reason: str
) -> None:
    with pytest.raises(ConfigRefused, match=reason) as refused:
        preflight(read_config(config_with(tmp_path, {"models": models})))
    (text,) = str(refused.value).splitlines()
    assert ", line " in text


def test_a_model_that_is_not_there_is_refused_by_its_place_among_several(tmp_path: Path) -> None:
    models = [{"served_model_name": "a", "engine": {"executor": "fake"}}, {"model": "/no/such/model"}]
    with pytest.raises(ConfigRefused, match=r"args\.models\.1\.model: .*/no/such/model"):
        preflight(read_config(config_with(tmp_path, {"models": models})))


def test_a_deployment_of_one_of_several_models_may_be_named(tmp_path: Path) -> None:
    models = [{"served_model_name": name, "engine": {"executor": "fake"}} for name in ("a", "b")]
    path = config_with(tmp_path, {"models": models})
    config = yaml.safe_load(path.read_text())
    config["applications"][0]["deployments"] = [{"name": "Engine-b", "max_ongoing_requests": 7}]
    path.write_text(yaml.safe_dump(config))
    assert [one.settings.model_id for one in preflight(read_config(path))[0].each_model()] == ["a", "b"]
    config["applications"][0]["deployments"] = [{"name": "Engine"}]
    path.write_text(yaml.safe_dump(config))
    with pytest.raises(ConfigRefused, match="expected one of Ingress, Engine-a, Engine-b"):
        preflight(read_config(path))

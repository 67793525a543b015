"""`chunkserve convert` writes a config of ours from one of Ray Serve LLM, which `chunkserve check` accepts, and says in
a line each what it could not take along. Never needs vLLM or ray.serve.llm."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from serve_app.front.command.check import main as check
from serve_app.front.command.convert import main
from tests.support.chunkserve import COMMAND, chunkserve, environment, refusal

PROG = "chunkserve convert"
ONE: dict[str, Any] = {
    "model_loading_config": {"model_id": "small", "model_source": "smollm2-135m-instruct"},
    "deployment_config": {"autoscaling_config": {"min_replicas": 1, "max_replicas": 2}},
    "accelerator_config": {"kind": "cpu"},
    "engine_kwargs": {"max_model_len": 2048},
}
OTHER = {**ONE, "model_loading_config": {"model_id": "other"}}


def serve_config(*models: Any, **application: Any) -> dict[str, Any]:
    return {
        "http_options": {"port": 9000},
        "applications": [
            {
                "name": "llms",
                "route_prefix": "/llm",
                "import_path": "ray.serve.llm:build_openai_app",
                "args": {"llm_configs": list(models)},
                **application,
            }
        ],
    }


def write(path: Path, content: Any) -> str:
    path.write_text(yaml.safe_dump(content), encoding="utf-8")
    return str(path)


def convert(tmp_path: Path, content: Any, *options: str) -> tuple[int, dict[str, Any]]:
    """Return the exit status and the config that was written."""
    status = main([write(tmp_path / "ray.yaml", content), "-o", str(tmp_path / "ours.yaml"), *options], PROG)
    written: dict[str, Any] = yaml.safe_load((tmp_path / "ours.yaml").read_text(encoding="utf-8"))
    return status, written


def args(config: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = config["applications"][0]["args"]
    return found


@pytest.mark.parametrize("form", ["alone", "args", "inline", "by path", "by dotted name"])
def test_each_form_of_the_file_becomes_the_same_settings(
    form: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "model.yaml", ONE)
    content = {
        "alone": ONE,
        "args": {"llm_configs": [ONE]},
        "inline": serve_config(ONE),
        "by path": serve_config("model.yaml"),
        "by dotted name": serve_config(ONE, import_path="ray.serve.llm.build_openai_app"),
    }[form]
    status, config = convert(tmp_path, content)
    assert (status, capsys.readouterr().err) == (0, "")
    assert args(config) == {
        "model": "smollm2-135m-instruct",
        "served_model_name": "small",
        "reasoning_parser": "none",
        "default_sampling": {"source": "model"},
        "autoscaling": {"min_replicas": 1, "max_replicas": 2},
        "engine": {"max_model_len": 2048, "targets": {"tpot_ms": 75, "ttft_ms": 2000}},
    }
    assert check([str(tmp_path / "ours.yaml")], "chunkserve check") == 0


def test_ports_routes_names_and_other_applications_stay(tmp_path: Path) -> None:
    content = serve_config(ONE)
    other = {"name": "other", "route_prefix": "/other", "import_path": "json:loads"}
    content["applications"].append(other)
    _, config = convert(tmp_path, content)
    ours, kept = config["applications"]
    assert (ours["name"], ours["route_prefix"], ours["import_path"]) == ("llms", "/llm", "serve_app.app:build")
    assert kept == other
    assert config["http_options"] == {"port": 9000}
    assert config.keys() == {"http_options", "applications"}, "what the file leaves to Ray stays so"


def test_environments_are_put_together_without_vllms_variables(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = ONE | {"runtime_env": {"env_vars": {"HF_HOME": "/m", "VLLM_USE_V1": "1"}}}
    status, config = convert(tmp_path, serve_config(model, runtime_env={"env_vars": {"A": "1"}}))
    assert status == 0
    assert config["applications"][0]["runtime_env"] == {"env_vars": {"A": "1", "HF_HOME": "/m"}}
    said = capsys.readouterr().err.splitlines()
    assert [line.partition(" (given")[0] for line in said] == [
        "left out: runtime_env.env_vars.VLLM_USE_V1: nothing here reads vLLM's variables",
        "changed: runtime_env: taken as the application's, so that ingress replicas have it, too",
    ]


def test_the_ingress_keeps_its_number_and_cpus(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    content = serve_config(ONE)
    content["applications"][0]["args"]["ingress_deployment_config"] = {
        "autoscaling_config": {"min_replicas": 2, "max_replicas": 4},
        "ray_actor_options": {"num_cpus": 0.5},
        "max_ongoing_requests": 100,
    }
    _, config = convert(tmp_path, content)
    assert (args(config)["ingress_replicas"], args(config)["ingress_num_cpus"]) == (2, 0.5)
    changed, left_out = capsys.readouterr().err.splitlines()
    assert changed.startswith("changed: ingress_deployment_config.autoscaling_config: the number of ingress replicas")
    assert left_out.startswith("left out: ingress_deployment_config.max_ongoing_requests: ")


@pytest.mark.parametrize(
    ("ingress", "number", "notes"),
    [
        ({"num_replicas": "auto"}, None, ["num_replicas"]),
        ({"num_replicas": "auto", "autoscaling_config": {"max_replicas": 4}}, None, ["num_replicas", "auto"]),
        ({"num_replicas": "auto", "autoscaling_config": {"min_replicas": 2, "max_replicas": 2}}, 2, ["num_replicas"]),
        ({"autoscaling_config": {"min_replicas": [], "max_replicas": 4}}, None, ["auto"]),
        ({"num_replicas": 3}, 3, []),
        ({"num_replicas": None}, None, []),
    ],
)
def test_a_number_of_ingress_replicas_that_is_none_is_said_to_become_one(
    ingress: dict[str, Any], number: int | None, notes: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    content = serve_config(ONE)
    content["applications"][0]["args"]["ingress_deployment_config"] = ingress
    _, config = convert(tmp_path, content)
    assert args(config).get("ingress_replicas") == number
    lines = capsys.readouterr().err.splitlines()
    for line, note in zip(lines, notes, strict=True):
        assert line.startswith(f"changed: ingress_deployment_config.{note}")
        assert f"the number of ingress replicas is fixed: taken as {number or 1} " in f"{line} "


def test_what_answers_depend_on_makes_the_exit_status_1_and_is_written_without_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = ONE | {"engine_kwargs": {"pipeline_parallel_size": 2, "compilation_config": 3}}
    status, config = convert(tmp_path, model)
    assert status == 1
    assert "max_model_len" not in args(config)["engine"]
    assert sorted(capsys.readouterr().err.splitlines(), reverse=True) == [
        "unsupported: engine_kwargs.pipeline_parallel_size: here tensor_parallel_size alone divides a model; more "
        "replicas use more devices (given: 2)",
        "left out: engine_kwargs.compilation_config: how a step is computed; chunkserve chooses that itself (given: 3)",
    ]


def test_one_of_several_models_is_chosen_by_its_id(tmp_path: Path) -> None:
    _, config = convert(tmp_path, serve_config(ONE, OTHER), "--model", "other")
    assert args(config)["model"] == "other"


def test_several_models_become_the_models_of_one_application(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What each model has for itself stands in its entry, and what they share beside `models`, by the first."""
    slow = {"graceful_shutdown_timeout_s": 90}
    same_weights = {"model_id": "other", "model_source": "smollm2-135m-instruct"}
    first, second = (
        ONE | {"deployment_config": slow},
        OTHER | {"deployment_config": {"graceful_shutdown_timeout_s": 30}, "model_loading_config": same_weights},
    )
    second |= {"engine_kwargs": {"max_model_len": 1024, "pipeline_parallel_size": 2}}
    status, config = convert(tmp_path, serve_config(first, second))
    said = capsys.readouterr().err
    assert status == 1, "unsupported: pipeline_parallel_size"
    small, other = args(config)["models"]
    assert (small["served_model_name"], small["model"]) == ("small", "smollm2-135m-instruct")
    assert (small["engine"]["max_model_len"], other["engine"]["max_model_len"]) == (2048, 1024)
    assert args(config).keys() == {"models", "drain_timeout_s"}
    assert args(config)["drain_timeout_s"] == 90
    assert "unsupported: other: engine_kwargs.pipeline_parallel_size: " in said
    assert "changed: other: drain_timeout_s: the models share this setting, which is 90 by the first" in said
    assert check([str(tmp_path / "ours.yaml")], PROG) == 0, capsys.readouterr().err


def test_environments_of_several_models_go_together_or_the_second_is_said_to_be_lost(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = (one | {"runtime_env": {"env_vars": {"A": value}}} for one, value in ((ONE, "1"), (OTHER, "2")))
    status, config = convert(tmp_path, serve_config(first, second))
    assert (status, config["applications"][0]["runtime_env"]) == (1, {"env_vars": {"A": "1"}})
    assert "unsupported: other: runtime_env: another value stands before it" in capsys.readouterr().err


REFUSED: list[tuple[Any, tuple[str, ...], str]] = [
    (serve_config(ONE, ONE), (), "llm_configs: two have the model_id small"),
    (serve_config(ONE), ("--model", "big"), "--model: expected one of small (given: 'big')"),
    (serve_config(), (), "llm_configs: expected a list of at least one LLMConfig"),
    (serve_config("no.yaml"), (), "no.yaml: No such file or directory"),
    (serve_config(3), (), "llm_configs: expected a mapping with `model_loading_config:`, or a path"),
    ({"a": 1}, (), "expected a Serve config with `import_path: ray.serve.llm:build_openai_app`, or a mapping"),
    (serve_config(ONE, import_path="ray.serve.llm:build_pd_openai_app"), (), "there are ray.serve.llm:build_pd_openai"),
    (serve_config(ONE, import_pat="x"), (), "unknown key applications.0.import_pat: did you mean import_path?"),
    (ONE | {"model_loading_config": {}}, (), "model_loading_config.model_id: expected the name that clients ask for"),
    (ONE | {"engine_kwargs": {"max_num_seqs": 0}}, (), "it would become engine.max_num_seqs: Input should be greater"),
]


@pytest.mark.parametrize(("content", "options", "message"), REFUSED, ids=str)
def test_what_cannot_be_converted_is_refused_in_a_line_and_nothing_is_written(
    content: Any, options: tuple[str, ...], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path / "ray.yaml", content)
    assert main([path, "-o", str(tmp_path / "ours.yaml"), *options], PROG) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
    assert not (tmp_path / "ours.yaml").exists()


def test_nothing_is_left_of_a_file_that_does_not_fit_on_the_disk(tmp_path: Path) -> None:
    """The next attempt would otherwise find that it is there already."""
    path, out = write(tmp_path / "ray.yaml", ONE), tmp_path / "ours.yaml"
    shell = ["sh", "-c", 'ulimit -f 0; exec "$@"', "sh", *COMMAND, "convert", path, "-o", str(out)]
    done = subprocess.run(shell, capture_output=True, text=True, timeout=60, env=environment(), check=False)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", f"--output: {out}: File too large\n")
    assert not out.exists()


def test_a_file_that_is_there_is_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "ours.yaml").write_text("mine")
    assert main([write(tmp_path / "ray.yaml", ONE), "-o", str(tmp_path / "ours.yaml")], PROG) == 2
    assert "is there already" in capsys.readouterr().err
    assert (tmp_path / "ours.yaml").read_text() == "mine"


def test_a_user_gets_the_config_on_stdout_and_the_lines_on_stderr(tmp_path: Path) -> None:
    done = chunkserve("convert", write(tmp_path / "ray.yaml", ONE | {"engine_kwargs": {"seed": 3}}))
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("# Written by `chunkserve convert` from ray.yaml.")
    assert args(yaml.safe_load(done.stdout))["served_model_name"] == "small"
    (line,) = done.stderr.splitlines()
    assert line.startswith("left out: engine_kwargs.seed: ")
    assert "No such file" in refusal("convert", str(tmp_path / "none.yaml"))


# --- the shapes of Ray's own documentation ----------------------------------------------------------------------------

SHAPES: dict[str, tuple[Any, int]] = {
    "a quick start with two models": (
        serve_config(
            {
                "model_loading_config": {"model_id": "half-b", "model_source": "org/Half-B"},
                "accelerator_type": "A10G",
                "deployment_config": {"autoscaling_config": {"min_replicas": 1, "max_replicas": 2}},
            },
            {
                "model_loading_config": {"model_id": "one-b", "model_source": "org/One-B"},
                "accelerator_type": "A10G",
                "deployment_config": {"autoscaling_config": {"min_replicas": 1, "max_replicas": 2}},
            },
        ),
        0,
    ),
    "a large model over several GPUs": (
        serve_config(
            {
                "model_loading_config": {"model_id": "half-b", "model_source": "org/Large"},
                "accelerator_type": "L40S",
                "deployment_config": {
                    "autoscaling_config": {"min_replicas": 1, "max_replicas": 4, "target_ongoing_requests": 64},
                    "max_ongoing_requests": 128,
                },
                "engine_kwargs": {"tensor_parallel_size": 8, "max_model_len": 16384, "max_num_batched_tokens": 8192},
            }
        ),
        0,
    ),
    "adapters from a bucket": (
        {
            "model_loading_config": {"model_id": "half-b", "model_source": "org/Half-B"},
            "lora_config": {"dynamic_lora_loading_path": "s3://bucket/adapters", "max_num_adapters_per_replica": 8},
            "engine_kwargs": {"enable_lora": True, "max_loras": 8, "max_lora_rank": 32},
            "accelerator_type": "L4",
        },
        1,
    ),
    "a model that takes images": (
        {
            "model_loading_config": {"model_id": "half-b", "model_source": "org/Sees"},
            "accelerator_type": "L4",
            "engine_kwargs": {"limit_mm_per_prompt": {"image": 5}, "trust_remote_code": True, "max_model_len": 8192},
        },
        0,
    ),
    "tools and thoughts": (
        {
            "model_loading_config": {"model_id": "half-b", "model_source": "org/Thinks"},
            "engine_kwargs": {
                "enable_auto_tool_choice": True,
                "tool_call_parser": "hermes",
                "reasoning_parser": "qwen3",
                "gpu_memory_utilization": 0.85,
                "enable_prefix_caching": True,
                "enforce_eager": True,
            },
            "runtime_env": {"env_vars": {"HF_TOKEN": "x"}},
        },
        0,
    ),
    "a fraction of a GPU, and cached prefixes in routing": (
        {
            "model_loading_config": {"model_id": "half-b", "model_source": "org/Half-B"},
            "placement_group_config": {"bundles": [{"GPU": 0.49}]},
            "deployment_config": {
                "num_replicas": 2,
                "request_router_config": {
                    "request_router_class": "ray.serve.llm.request_router.PrefixCacheAffinityRouter"
                },
            },
        },
        1,
    ),
    "no accelerator": (
        {
            "model_loading_config": {"model_id": "half-b", "model_source": "org/Half-B"},
            "placement_group_config": {"bundle_per_worker": {"CPU": 8}},
            "deployment_config": {"autoscaling_config": {"min_replicas": 1, "max_replicas": 1}},
            "runtime_env": {"env_vars": {"VLLM_CPU_KVCACHE_SPACE": "4"}},
            "log_engine_metrics": False,
        },
        0,
    ),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_what_rays_documentation_shows_becomes_a_config_without_a_problem(
    shape: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    content, status = SHAPES[shape]
    assert convert(tmp_path, content, "--model", "half-b")[0] == status, capsys.readouterr().err
    assert check([str(tmp_path / "ours.yaml")], "chunkserve check") == 0, capsys.readouterr().err

"""What docs/how-to/from-ray-serve-llm.md shows is executed: its switches by Ray's own builder, its commands, its lists.
Never starts a server."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import yaml
from ray._common.utils import import_attr

from docsite.pages import DOCS
from serve_app.llm_config.engine import _READERS, _TOGETHER
from serve_app.ray_llm.reading import OWN_SETTINGS, read_settings
from tests.support.chunkserve import chunkserve
from tests.support.ray_llm import SERVER, import_ray_llm, importable

PAGE = (DOCS / "how-to" / "from-ray-serve-llm.md").read_text(encoding="utf-8")
_, PYTHON, _, YAML, _, BASH, *_ = re.split(r"```(?:python|yaml|bash)\n|```\n", PAGE)


def paragraph(beginning: str) -> str:
    return next(one for one in PAGE.split("\n\n") if one.startswith(beginning))


def test_the_page_has_the_three_blocks_that_are_run_here() -> None:
    assert re.findall(r"^```(\w+)$", PAGE, re.MULTILINE) == ["python", "yaml", "bash"]


def test_the_python_line_builds_an_application_of_our_class() -> None:
    made: dict[str, Any] = {}
    with importable():
        exec(PYTHON, made)
    (model,) = made["app"]._bound_deployment.init_kwargs["llm_deployments"].values()
    assert model._bound_deployment.name == "ChunkserveServer:small"
    assert model._bound_deployment.func_or_class is import_attr(SERVER)


def test_the_yaml_line_is_read_by_rays_own_types_and_ours() -> None:
    args = yaml.safe_load(YAML)["applications"][0]["args"]
    (config,) = import_ray_llm().LLMServingArgs.model_validate(args).llm_configs
    assert config.server_cls is import_attr(SERVER)
    settings = read_settings(config)
    assert (settings.model_id, settings.engine.max_model_len, settings.engine.targets.tpot_ms) == ("small", 4096, 75)


def test_the_commands_convert_and_check_the_config_that_is_shown(tmp_path: Path) -> None:
    (tmp_path / "ray.yaml").write_text(YAML, encoding="utf-8")
    for command in BASH.splitlines():
        program, *words = shlex.split(command)
        assert program == ".venv/bin/chunkserve"
        done = chunkserve(*words, cwd=tmp_path)
        assert (done.returncode, done.stderr) == (0, "")
    args: dict[str, Any] = yaml.safe_load((tmp_path / "config-small.yaml").read_text())["applications"][0]["args"]
    assert args["engine"] == {"targets": {"tpot_ms": 75, "ttft_ms": 2000}, "max_model_len": 4096}


def test_the_arguments_and_settings_that_the_page_names_are_those_that_are_read() -> None:
    named = re.findall(r"`(\w+)`", paragraph("Nothing of vLLM").partition("`engine_kwargs`")[2].partition("others")[0])
    assert named
    assert set(named) <= {*_READERS, *_TOGETHER}
    assert re.findall(r"`(\w+)`", paragraph("Under `chunkserve`"))[1:] == list(OWN_SETTINGS)

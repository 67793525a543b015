"""Owns the promise that docs/how-to/from-vllm-or-sglang.md is true of this server: settings, routes, its config.
Never knows what another server does."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from docsite import reference
from docsite.pages import DOCS
from serve_app.api.openapi.operations import OPERATIONS
from serve_app.api.requests.schema import ChatRequest
from serve_app.front.command.check import main as check
from serve_app.front.command.convert import main as convert
from serve_app.llm_config.engine import _READERS, _TOGETHER
from serve_app.llm_config.engine_rules import UNTAKEN

PAGE = (DOCS / "how-to" / "from-vllm-or-sglang.md").read_text(encoding="utf-8")
ROWS = [line.strip("|").split("|") for line in PAGE.splitlines() if line.startswith("| ")][1:]


def test_every_setting_is_one() -> None:
    known = {reference._path(level) + row.name for level in reference.SECTIONS for row in reference._rows(level)}
    named = [name for _, _, here in ROWS for name in re.findall(r"`([a-z_]+(?:\.[a-z_]+)*)(?:: \w+)?`", here)]
    assert len(named) >= len(ROWS)
    assert [name for name in named if name not in known] == []


def test_every_option_of_vllm_is_one_that_a_conversion_knows() -> None:
    options = [name for theirs, _, _ in ROWS for name in re.findall(r"`--(?:no-)?([a-z-]+)`", theirs)]
    assert len(options) > 20
    assert [name for name in options if name.replace("-", "_") not in {*_READERS, *_TOGETHER, *UNTAKEN}] == []


def test_the_config_that_is_shown_is_taken_along_whole_and_can_be_served(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (shown,) = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    (commands,) = re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL)
    program, name, config, option, written = shlex.split(commands.splitlines()[0])
    assert (program, name, option) == (".venv/bin/chunkserve", "convert", "-o")
    assert commands.splitlines()[1] == f".venv/bin/chunkserve serve {written}"
    (tmp_path / config).write_text(shown, encoding="utf-8")
    assert convert([str(tmp_path / config), "-o", str(tmp_path / written)], "chunkserve convert") == 0
    assert capsys.readouterr().err == ""
    args: dict[str, Any] = yaml.safe_load((tmp_path / written).read_text())["applications"][0]["args"]
    assert (args["model"], args["engine"]["max_model_len"]) == ("Qwen/Qwen3-8B", 32768)
    check([str(tmp_path / written)], "chunkserve check")
    (problem,) = "".join(capsys.readouterr()).splitlines()
    assert "there is no directory /models/adapters/support" in problem


def test_routes_and_fields_are_as_the_page_says() -> None:
    routes = {f"{one.method} {one.path}" for one in OPERATIONS}
    assert {"post /admin/reset_prefix_cache", "post /admin/abort"} <= routes
    assert not [path for path in ("score", "rerank", "classify", "transcriptions", "generate") if path in str(routes)]
    assert {"guided_json", "use_beam_search", "best_of"} <= ChatRequest.unsupported.keys()

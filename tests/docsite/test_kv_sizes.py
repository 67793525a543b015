"""The how-to of KV tiers says what a model's KV takes, and shows settings that are those of the manifests.
Never loads a weight: shapes of models are enough."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import yaml

from docsite.pages import DOCS, ROOT
from engine.checkpoints.prepare import prepare_model
from engine.config import DEFAULT_MODEL
from engine.models.config import read_model_config
from engine.models.kv_cache import bytes_per_block
from serve_app.settings.application import AppSettings

PAGE = (DOCS / "how-to" / "keep-prefixes.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| ([\w.-]+)(?: \(the default\))? \| ([\d.]+) KiB \| ([\d.]+) GiB \| ([\d,]+) \|$", PAGE, re.M)

NARROW_ROWS = re.findall(
    r"^\| ([\w.-]+)(?: \(the default\))? \| ([\d.]+) KiB \| ([\d,]+) \| ([\d.]+) \| ([\d.]+) \|$", PAGE, re.M
)


def directory_of(name: str) -> Path:
    if name == DEFAULT_MODEL:
        return prepare_model(name, weights=False, progress=False)
    return ROOT / "engine" / "models" / "shapes" / name


@pytest.mark.parametrize(("name", "token_kib", "many_gib", "in_ten_gib"), ROWS, ids=[row[0] for row in ROWS])
def test_the_table_says_what_kv_takes_in_bfloat16(name: str, token_kib: str, many_gib: str, in_ten_gib: str) -> None:
    token = bytes_per_block(read_model_config(directory_of(name)), 1, torch.bfloat16)
    assert float(token_kib) == token / 2**10
    assert float(many_gib) == round(100_000 * token / 2**30, 1)
    assert int(in_ten_gib.replace(",", "")) == 10 * 2**30 // token


@pytest.mark.parametrize("kept_in", [torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize(
    ("name", "token_kib", "in_ten_gib", "of_bfloat16", "of_float32"), NARROW_ROWS, ids=[row[0] for row in NARROW_ROWS]
)
def test_the_table_says_what_kv_takes_in_8_bits_and_how_much_more_fits(
    name: str, token_kib: str, in_ten_gib: str, of_bfloat16: str, of_float32: str, kept_in: torch.dtype
) -> None:
    model = read_model_config(directory_of(name))
    token = bytes_per_block(model, 1, kept_in)
    assert float(token_kib) == round(token / 2**10, 2)
    assert int(in_ten_gib.replace(",", "")) == 10 * 2**30 // token
    for told, dtype in ((of_bfloat16, torch.bfloat16), (of_float32, torch.float32)):
        assert float(told) == round(bytes_per_block(model, 1, dtype) / token, 2)


def test_the_tables_have_the_models_that_are_asked_about() -> None:
    names = [DEFAULT_MODEL, "llama-3.1-8b", "qwen3-8b"]
    assert [row[0] for row in ROWS] == names
    assert [row[0] for row in NARROW_ROWS] == names


def test_the_page_has_the_default_weight_of_the_router() -> None:
    assert f"KV cache: {AppSettings().routing.tier_hit_weight:g}, unless set" in " ".join(PAGE.split())


def test_the_paths_that_are_shown_first_are_those_of_the_manifests() -> None:
    first = yaml.safe_load(PAGE.partition("```yaml\n")[2].partition("```")[0])["engine"]["kv_tiers"]
    service = (ROOT / "k8s" / "overlays" / "kv-disk" / "serve.yaml").read_text(encoding="utf-8")
    for name in ("disk_path", "disk_gib", "disk_key_file"):
        assert f"{name}: {first[name]}\n" in service

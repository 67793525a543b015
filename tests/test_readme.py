"""The README is executed: a block that no test runs is a claim."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from engine import bench_memory, bench_speculation, bench_step
from engine.bench_mixed import table
from loadtest import transport
from loadtest.server import Server
from serve_app.api.embedding_schema import EmbeddingRequest
from serve_app.api.schema import ChatRequest, CompletionRequest, StreamOptions
from serve_app.reference import BEGIN, END, METRICS_BEGIN, METRICS_END, render, render_metrics
from serve_app.settings import AppSettings

pytestmark = pytest.mark.server

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
BLOCKS = [(kind, text) for kind, text in re.findall(r"```(\w+)\n(.*?)```", README, re.DOTALL)]
ADDRESS = "http://127.0.0.1:8000"


def block(kind: str, containing: str) -> str:
    (text,) = [text for other, text in BLOCKS if other == kind and containing in text]
    return text


def run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=180)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_block_is_run_by_a_test() -> None:
    run_here = [
        "curl ",
        "from openai import OpenAI",
        "engine.prepare",
        "from engine.build import build_engine",
        "tracing:",
    ]
    run_by_the_fresh_clone = ["make serve"]
    run_by_chaos = ["autoscaling:"]  # tests/chaos/test_scaling.py
    for kind, text in BLOCKS:
        assert sum(mark in text for mark in run_here + run_by_the_fresh_clone + run_by_chaos) == 1, f"{kind}:\n{text}"


def test_every_field_that_is_honoured_is_named() -> None:
    section = README.partition("## What it serves")[2].partition("\n## ")[0]
    models = (ChatRequest, CompletionRequest, StreamOptions, EmbeddingRequest)
    fields = {name for model in models for name in model.model_fields}
    assert not [name for name in fields if f"`{name}`" not in section]


def test_the_curl_example_answers_with_paris(default_server: Server) -> None:
    answer = json.loads(run(["bash", "-c", block("bash", "curl ").replace(ADDRESS, default_server.url)]))
    assert "Paris" in answer["choices"][0]["message"]["content"]


def test_the_openai_example_prints_a_story_as_it_is_written(default_server: Server) -> None:
    story = run([sys.executable, "-c", block("python", "openai").replace(ADDRESS, default_server.url)])
    assert len(story.split()) > 30


def test_the_library_example_prints_scheduled_tokens_and_finished() -> None:
    lines = run([sys.executable, "-c", block("python", "build_engine")]).splitlines()
    assert [line.partition("(")[0] for line in lines] == ["Scheduled", *["Token"] * (len(lines) - 2), "Finished"]
    assert len(lines) > 3


def test_the_autoscaling_example_is_a_valid_part_of_a_config() -> None:
    settings = AppSettings.model_validate(yaml.safe_load(block("yaml", "autoscaling:")))
    assert settings.autoscaling is not None
    assert settings.most_engines == 3


def test_the_tracing_example_is_a_valid_part_of_a_config() -> None:
    settings = AppSettings.model_validate(yaml.safe_load(block("yaml", "tracing:")))
    assert (settings.tracing.exporter, settings.tracing.sample_ratio) == ("otlp", 0.1)


def test_the_prepare_example_prints_the_model_directory() -> None:
    command = block("bash", "engine.prepare").replace(".venv/bin/python", sys.executable)
    assert (Path(run(["bash", "-c", command]).strip()) / "model.safetensors").is_file()


def test_the_configuration_reference_is_what_the_settings_say() -> None:
    written = README.partition(BEGIN)[2].partition(END)[0].strip()
    assert written == render().strip(), "run `make docs`"


def test_the_metrics_table_is_what_the_catalogue_says() -> None:
    written = README.partition(METRICS_BEGIN)[2].partition(METRICS_END)[0].strip()
    assert written == render_metrics().strip(), "run `make docs`"


def test_the_kv_tight_table_is_what_its_file_says() -> None:
    document = json.loads((ROOT / "loadtest" / "results" / "kv_tight.json").read_text())
    written = README.partition("<!-- kv tight -->")[2].partition("<!-- end of kv tight -->")[0].strip()
    assert written == bench_memory.table(document)
    assert all(cell["valid"] for cell in document["cells"])


def test_the_transport_table_is_what_its_file_says() -> None:
    document = json.loads((ROOT / "loadtest" / "results" / "transport.json").read_text())
    written = README.partition("<!-- transport -->")[2].partition("<!-- end of transport -->")[0].strip()
    assert written == transport.table(document)
    assert all(cell["num_errors"] == 0 for cell in document["cells"] if cell["path"].startswith("ours"))


def test_the_step_table_is_what_its_file_says() -> None:
    document = json.loads((ROOT / "loadtest" / "results" / "engine_step.json").read_text())
    written = README.partition("<!-- engine step -->")[2].partition("<!-- end of engine step -->")[0].strip()
    assert written == bench_step.table(document)


def test_the_table_of_drafts_is_what_its_file_says() -> None:
    document = json.loads((ROOT / "loadtest" / "results" / "speculation.json").read_text())
    written = README.partition("<!-- drafts -->")[2].partition("<!-- end of drafts -->")[0].strip()
    assert written == bench_speculation.table(document)


def test_the_mixed_load_table_is_what_its_file_says() -> None:
    document = json.loads((ROOT / "loadtest" / "results" / "mixed_load.json").read_text())
    written = README.partition("<!-- mixed load -->")[2].partition("<!-- end of mixed load -->")[0].strip()
    assert written == table(document)
    assert all(cell["valid"] for cell in document["cells"])


@pytest.mark.parametrize("link", sorted(set(re.findall(r"\]\((?!http)([^)#]+)\)", README))))
def test_every_link_leads_to_a_file(link: str) -> None:
    assert (ROOT / link).exists()

"""The library's names: settings and fields are the server's own, unknown ones are refused, and importing it costs
nothing."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import fields
from typing import Any, get_type_hints

import pytest

import chunkserve
from chunkserve import ChatFields, CompletionFields, ConfigError, EmbeddingFields, Engine, EngineSettings
from chunkserve.fields import refuse_unknown
from chunkserve.settings import OF_THE_MODEL, read_settings
from engine.config import EngineConfig
from loadtest.server import ROOT
from serve_app.api.requests.embedding_schema import EmbeddingRequest
from serve_app.api.requests.schema import ChatRequest, CompletionRequest
from serve_app.settings.application import AppSettings
from tests.support.chunkserve import environment
from tests.test_architecture import run_python

OF_A_SERVER = {
    **dict.fromkeys(("user", "metadata", "safety_identifier", "provider"), "a label, without effect"),
    "prompt_cache_key": "chooses among engines, and here is one",
    "stream": "stream and stream_chat are methods",
    "stream_options": "the last chunk has the usage",
    "usage": "the last chunk has the usage",
    "return_token_ids": "answers always have them",
    "return_tokens_as_token_ids": "log-probabilities have both",
    "repeat_penalty": "another name of repetition_penalty",
    "reasoning": "another form of reasoning_effort and its like",
    "thinking": "another form of enable_thinking and its like",
    "include_reasoning": "thoughts stand apart in any case",
    "encoding_format": "vectors are lists of numbers",
}
"""Fields of the server that the library does not have, and why."""
ARGUMENTS = {"messages", "prompt", "input"}


@pytest.mark.parametrize(
    ("kind", "request_kind"),
    [(ChatFields, ChatRequest), (CompletionFields, CompletionRequest), (EmbeddingFields, EmbeddingRequest)],
)
def test_a_field_of_the_server_is_one_of_the_library_or_has_a_reason(kind: type, request_kind: Any) -> None:
    served = set(request_kind.model_fields) - ARGUMENTS
    assert set(kind.__annotations__) == served - OF_A_SERVER.keys()


def test_settings_are_those_of_the_engine_and_some_of_the_application() -> None:
    settings = {spec.name for spec in fields(EngineConfig)}
    assert set(EngineSettings.__annotations__) == settings | set(OF_THE_MODEL)
    assert set(OF_THE_MODEL) <= set(AppSettings.model_fields)


def test_the_types_of_settings_are_those_of_the_engine() -> None:
    """But for sections, which may be written as mappings, and tuples, which may be lists."""
    ours, theirs = get_type_hints(EngineSettings), get_type_hints(EngineConfig)
    others = {"targets", "speculative", "kv_tiers", "scheduler", "fake"} | {
        name for name in theirs if name.startswith(("cuda_graph_", "__"))
    }
    assert {name: kind for name, kind in ours.items() if name in theirs and name not in others} == {
        name: kind for name, kind in theirs.items() if name not in others
    }


@pytest.mark.parametrize(
    ("settings", "lines"),
    [
        ({"max_seqs": 3}, ["unknown setting max_seqs: did you mean max_num_seqs?"]),
        ({"xyz": 1, "dtypes": "auto"}, ["unknown setting xyz", "unknown setting dtypes: did you mean dtype?"]),
        ({"max_num_seqs": 0}, ["max_num_seqs: Input should be greater than or equal to 1 (given: 0)"]),
        ({"targets": {"tpot": 75}}, ["unknown setting targets.tpot: did you mean tpot_ms?"]),
        ({"targets": {"xyz": 1}, "images": {"xyz": 1}}, ["unknown setting targets.xyz", "unknown setting images.xyz"]),
        ({"tpot_ms": 75}, ["unknown setting tpot_ms: did you mean targets.tpot_ms?"]),
        ({"images": {"max_pixel": 3}}, ["unknown setting images.max_pixel: did you mean max_pixels?"]),
        ({"kv_cache_gb": 3}, ["unknown setting kv_cache_gb: did you mean kv_cache_memory_gib?"]),
        ({"max_num_seqs": 600}, ["max_num_batched_tokens (512) must be at least max_num_seqs + 1 (601)"]),
        ({"lora_adapters": {"law": "/x"}}, ["lora_adapters"]),
        ({"engine_replicas": 2}, ["unknown setting engine_replicas"]),
        ({"targets": {"engine_replica": 2}}, ["unknown setting targets.engine_replica"]),
    ],
)
def test_wrong_settings_are_refused_in_a_line_each(settings: dict[str, Any], lines: list[str]) -> None:
    with pytest.raises(ConfigError) as refused:
        Engine(**settings)
    said = str(refused.value).splitlines()
    assert len(said) == len(lines)
    for line, begins in zip(said, lines, strict=True):
        assert line.startswith(begins)
        assert ("did you mean" in line) == ("did you mean" in begins), (
            "a name that resembles none was met by an empty one"
        )
        assert "engine." not in line, "settings have no such prefix here"


def test_a_gpu_that_is_asked_for_is_not_replaced_by_the_cpu() -> None:
    assert read_settings("m", {"device": "cuda"}).replica_engine.device == "cuda"


def test_each_rank_of_an_engine_on_gpus_has_one() -> None:
    """Regression: the library asked for one GPU whatever the ranks, and its refusal named a setting that it has not."""
    settings = read_settings("m", {"device": "cuda", "tensor_parallel_size": 2})
    assert (settings.engine_num_gpus, settings.engine.tensor_parallel_size) == (2, 2)
    with pytest.raises(ConfigError, match=r"^tensor_parallel_size: "):
        read_settings("m", {"device": "cuda", "tensor_parallel_size": "two"})


def test_an_unknown_field_is_refused_with_the_one_that_was_meant() -> None:
    with pytest.raises(chunkserve.RequestRefused, match="max_token: this field is not known: did you mean max_tokens"):
        refuse_unknown(ChatFields, {"max_token": 3})


# --- imports ----------------------------------------------------------------------------------------------------------


def test_importing_the_library_loads_nothing_heavy() -> None:
    code = """
import sys
from chunkserve import AsyncEngine, Engine
heavy = {"torch", "ray", "numpy", "pydantic", "starlette", "tokenizers", "transformers", "jinja2", "llguidance"}
print(sorted(heavy & set(sys.modules)))
"""
    assert run_python(code) == "[]"


def test_an_engine_runs_where_ray_is_not_installed() -> None:
    code = """
import sys
for absent in ("ray", "zmq", "uvicorn", "transformers", "torch"):
    sys.modules[absent] = None
from chunkserve import Engine
with Engine(executor="fake", fake={"reply": "hello"}) as engine:
    print(engine.chat([{"role": "user", "content": "hi"}]).text)
"""
    assert run_python(code) == "hello"


def test_all_public_names_are_there_and_explained() -> None:
    assert sorted(chunkserve.__all__) == chunkserve.__all__
    for name in chunkserve.__all__:
        assert getattr(chunkserve, name) is not None
    for kind in (chunkserve.Engine, chunkserve.AsyncEngine):
        public = [name for name in vars(kind) if not name.startswith("_")]
        assert public
        assert [name for name in public if not getattr(kind, name).__doc__] == []


def test_both_engines_have_the_same_methods() -> None:
    """A program that gets an event loop changes its calls, and not their names."""
    blocking, waiting = ({name for name in vars(kind) if name[0] != "_"} for kind in (Engine, chunkserve.AsyncEngine))
    assert blocking - waiting == {"generate_all", "chat_all"}, "asyncio.gather is the other's"
    assert waiting - blocking == {"start"}


def test_python_m_chunkserve_is_the_command() -> None:
    words = ("--version",)
    done = [
        subprocess.run(
            [sys.executable, "-m", module, *words],
            capture_output=True,
            text=True,
            timeout=60,
            cwd=ROOT,
            env=environment(),
            check=True,
        ).stdout
        for module in ("chunkserve", "serve_app.front.command")
    ]
    assert done[0] == done[1]
    assert done[0].startswith("chunkserve 0.1.0")

"""Owns the contract of what an ingress replica reads of a model: its tokenizer, from either form of a GGUF file.
Never starts Ray: replicas are tested with the whole server."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Literal

import pytest

from engine.checkpoints import gguf_convert
from engine.checkpoints.prepare import prepare_model
from engine.config import EngineConfig
from serve_app.app import build
from serve_app.replicas.deployment import log_as_serve_does
from serve_app.replicas.served_model import read_text_side, served_model
from serve_app.settings.application import AppSettings
from serve_app.settings.scaling import AutoscalingSettings
from serve_app.settings.several import ModelEntry
from tests.support.tiny_gguf import TOKENS, write_gguf


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("CHUNKSERVE_CACHE", str(tmp_path / "cache"))
    return str(write_gguf(tmp_path / "tiny.gguf"))


@pytest.mark.parametrize("quantize", ["stored", "none"])
def test_the_form_that_an_engine_would_refuse_has_the_tokenizer(
    quantize: Literal["stored", "none"], file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node of ingress replicas alone may have only the other form, and no weight of it is read there."""
    prepare_model(file, progress=False, stored=quantize == "none")

    def refuse(*_: object, **__: object) -> None:
        raise OSError("the cache is only read")

    monkeypatch.setattr(gguf_convert, "convert_gguf", refuse)
    settings = AppSettings(model=file, engine=EngineConfig(quantize=quantize, batch_invariant=True))
    assert read_text_side(settings).tokenizer.vocab_size == len(TOKENS)


def test_a_gguf_file_was_created_when_it_was_written_whichever_form_a_replica_reads(file: str) -> None:
    """Replicas on unlike processors read unlike directories, made at unlike times."""
    os.utime(file, (1_700_000_000, 1_700_000_000))
    forms: tuple[Literal["stored", "none"], ...] = ("stored", "none")
    for quantize in forms:
        text = read_text_side(AppSettings(model=file, engine=EngineConfig(quantize=quantize)))
        assert text.created == 1_700_000_000


def test_the_template_for_tools_chooses_the_parser_of_calls_and_the_default_that_of_thoughts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CHUNKSERVE_CACHE", str(tmp_path / "cache"))
    templates = {"tokenizer__chat_template": "<think></think>", "tokenizer__chat_template.tool_use": "[TOOL_CALLS]"}
    settings = AppSettings(model=str(write_gguf(tmp_path / "tiny.gguf", **templates)))
    model = served_model(settings, read_text_side(settings), None)
    assert (model.tool_parser, model.reasoning_parser) == ("mistral", "qwen3")


def test_failed_starts_give_up_a_server_and_never_a_model_that_sleeps() -> None:
    """Serve counts the failed starts of a deployment that never had a replica: three failed wakes would lose a model
    until the next deployment, while the server itself is to say at once that it cannot start."""
    sleepy = ModelEntry(model="b", autoscaling=AutoscalingSettings(min_replicas=0, max_replicas=1))
    settings = AppSettings(models=(ModelEntry(model="a", engine_replicas=2), sleepy), ingress_replicas=3)
    ingress = build(settings)._bound_deployment
    deployments = [*(engine._bound_deployment for engine in ingress.init_args[1]), ingress]
    counts = {one.name: one._deployment_config.max_constructor_retry_count for one in deployments}
    assert counts == {"Engine-a": 6, "Engine-b": 2**31 - 1, "Ingress": 9}
    (alone,) = build(AppSettings(model="a"))._bound_deployment.init_args[1]
    assert alone._bound_deployment._deployment_config.max_constructor_retry_count == 3


@pytest.mark.parametrize("earlier_replica", ["none", "in this process"])
def test_a_replica_in_this_process_leaves_the_loggers_to_later_tests(
    earlier_replica: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The second of the two runs after a replica: its record came twice, or not at all."""
    logging.getLogger("serve_app").warning("a line")
    assert caplog.messages == ["a line"]
    assert logging.getLogger("serve_app").propagate
    log_as_serve_does()
    assert logging.getLogger("serve_app").handlers is not logging.getLogger("engine").handlers

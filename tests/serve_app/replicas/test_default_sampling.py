"""Owns the contract of sampling where a request does not say it: settings, then the model's file, then OpenAI's way.
Never runs a model: it looks at what engines are asked."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine.checkpoints.prepare import ModelError
from serve_app.engines.engine_client import SamplingDefaults
from serve_app.replicas.default_sampling import default_sampling
from serve_app.settings.application import AppSettings
from serve_app.settings.sampling import SamplingSettings
from tests.serve_app.harness import CHAT, MODEL, PROMPT, Exchange, ScriptedClient, app_for, finished, scheduled, tokens

pytestmark = pytest.mark.anyio

OF_QWEN = {"do_sample": True, "temperature": 0.6, "top_p": 0.95, "top_k": 20, "eos_token_id": [1, 2], "max_length": 9}
OWN = SamplingDefaults(temperature=0.6, top_p=0.95, top_k=20, min_p=0.05, repetition_penalty=1.1)
SERVED = replace(MODEL, sampling=OWN)


def model_dir(directory: Path, config: Any) -> Path:
    (directory / "generation_config.json").write_text(json.dumps(config))
    return directory


def test_the_models_values_count_only_if_they_are_asked_for(tmp_path: Path) -> None:
    model = model_dir(tmp_path, OF_QWEN)
    assert default_sampling(SamplingSettings(), model) == SamplingDefaults()
    found = default_sampling(SamplingSettings(source="model"), model)
    assert found == SamplingDefaults(temperature=0.6, top_p=0.95, top_k=20)


def test_a_setting_stands_over_the_models_value_and_over_openais(tmp_path: Path) -> None:
    model = model_dir(tmp_path, OF_QWEN)
    assert default_sampling(SamplingSettings(source="model", temperature=0, top_k=-1), model) == SamplingDefaults(
        temperature=0, top_p=0.95, top_k=0
    )
    assert default_sampling(SamplingSettings(min_p=0.1), model) == SamplingDefaults(min_p=0.1)


@pytest.mark.parametrize("config", [{}, {"temperature": None, "top_k": None}])
def test_a_file_that_says_nothing_is_openais_way(tmp_path: Path, config: dict[str, Any]) -> None:
    settings = SamplingSettings(source="model")
    assert default_sampling(settings, model_dir(tmp_path, config)) == SamplingDefaults()
    assert default_sampling(settings, tmp_path / "empty") == SamplingDefaults()
    assert default_sampling(settings, None) == SamplingDefaults()


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"temperature": 3}, "temperature: .*less than or equal to 2"),
        ({"top_p": "much"}, "top_p: .*valid number"),
    ],
)
def test_a_value_that_no_request_may_have_is_refused_with_its_file(tmp_path: Path, config: Any, reason: str) -> None:
    with pytest.raises(ModelError, match=f"generation_config.json: {reason}.*stands over the file's"):
        default_sampling(SamplingSettings(source="model"), model_dir(tmp_path, config))


@pytest.mark.parametrize(("text", "reason"), [("[]", "no JSON object"), ("{", "no JSON: ")])
def test_a_file_that_is_no_object_is_refused(tmp_path: Path, text: str, reason: str) -> None:
    (tmp_path / "generation_config.json").write_text(text)
    with pytest.raises(ModelError, match=f"generation_config.json is {reason}"):
        default_sampling(SamplingSettings(source="model"), tmp_path)


def test_a_value_that_a_setting_stands_over_is_not_judged(tmp_path: Path) -> None:
    model = model_dir(tmp_path, {"temperature": 3, "top_p": 0.9})
    found = default_sampling(SamplingSettings(source="model", temperature=0.7), model)
    assert found == SamplingDefaults(temperature=0.7, top_p=0.9)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", CHAT),
        ("/v1/completions", PROMPT),
        ("/v1/responses", {"model": MODEL.id, "input": "hi"}),
        ("/v1/messages", {**CHAT, "model": MODEL.id, "max_tokens": 5}),
    ],
)
async def test_a_request_gets_the_defaults_for_what_it_does_not_set(path: str, body: dict[str, Any]) -> None:
    assert await asked(path, body) == OWN
    given = {"temperature": 0, "top_p": 1}
    assert await asked(path, {**body, **given}) == SamplingDefaults(
        temperature=0, top_p=1, top_k=20, min_p=0.05, repetition_penalty=1.1
    )


async def test_a_request_takes_limits_away_by_the_values_that_mean_none() -> None:
    given = {"temperature": 1, "top_p": 1, "top_k": 0, "min_p": 0, "repetition_penalty": 1}
    assert await asked("/v1/completions", {**PROMPT, **given}) == SamplingDefaults()


async def asked(path: str, body: dict[str, Any]) -> SamplingDefaults:
    """Return how an answer is sampled by a server whose model has OWN."""
    client = ScriptedClient([scheduled()], tokens("a"), [finished()])
    app = app_for(client, model=SERVED)
    answer = await Exchange(app, "POST", path, json.dumps(body).encode()).finish()
    assert answer.status == 200, answer.json
    if path == "/v1/responses":
        told = (answer.json["temperature"], answer.json["top_p"])
        assert told == (client.submissions[0].sampling.temperature, client.submissions[0].sampling.top_p)
    (submission,) = client.submissions
    names = SamplingDefaults.__dataclass_fields__
    return SamplingDefaults(**{name: getattr(submission.sampling, name) for name in names})


def test_the_setting_stands_beside_the_model() -> None:
    settings = AppSettings.model_validate({"default_sampling": {"source": "model", "temperature": 0.3}})
    assert settings.default_sampling == SamplingSettings(source="model", temperature=0.3)

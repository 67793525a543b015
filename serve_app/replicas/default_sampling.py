"""Owns how answers are sampled where a request does not say it: by the settings, the model's file, or as OpenAI does.
Never changes what a request sets."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pydantic_core
from pydantic import ValidationError

from engine.checkpoints.prepare import ModelError
from serve_app.engines.engine_client import SamplingDefaults
from serve_app.settings.sampling import SamplingSettings

_FILE = "generation_config.json"
_OTHERWISE = "A value in default_sampling stands over the file's, and `source: openai` does not use the file."


# `do_sample` does not count, as in vLLM: it is false by default, and many files that have a temperature do not set it.
_NAMES = tuple(spec.name for spec in dataclasses.fields(SamplingDefaults))


def default_sampling(settings: SamplingSettings, model_dir: Path | None) -> SamplingDefaults:
    """`model_dir`: the prepared model; None if it has no files.

    Raises:
        ModelError: the file is to be used, and has a value that no request may have.
    """
    found, path = dict[str, Any](), None
    if settings.source == "model" and model_dir is not None and (model_dir / _FILE).exists():
        path = model_dir / _FILE
        found = _read(path)
    values = {name: found.get(name) for name in _NAMES} | settings.model_dump(exclude_none=True)
    try:
        checked = SamplingSettings.model_validate(values)
    except ValidationError as error:
        reasons = "; ".join(f"{one['loc'][0]}: {one['msg']}" for one in error.errors())
        raise ModelError(f"{path}: {reasons}. {_OTHERWISE}") from None
    chosen = checked.model_dump(include=set(_NAMES), exclude_none=True)
    if "top_k" in chosen:
        chosen["top_k"] = max(chosen["top_k"], 0)
    return SamplingDefaults(**chosen)


def _read(path: Path) -> dict[str, Any]:
    try:
        found = pydantic_core.from_json(path.read_bytes())
    except ValueError as error:
        raise ModelError(f"{path} is no JSON: {error}. {_OTHERWISE}") from None
    if not isinstance(found, dict):
        raise ModelError(f"{path} is no JSON object. {_OTHERWISE}")
    return found


def told(defaults: SamplingDefaults) -> str:
    """Write for a log what a request gets."""
    return ", ".join(f"{name} {value:g}" for name, value in dataclasses.asdict(defaults).items())

"""Owns how answers are sampled where a request does not say it: by the settings, the model's file, or as OpenAI does.
Never changes what a request sets."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from engine.checkpoints.prepare import ModelError
from serve_app.engines.engine_client import SamplingDefaults
from serve_app.settings.sampling import MinP, RepetitionPenalty, SamplingSettings, Temperature, TopK, TopP

_FILE = "generation_config.json"


class _GenerationConfig(BaseModel):
    """What is read of the file. `do_sample` does not count, as in vLLM: it is false by default, and many files that
    have a temperature do not set it."""

    model_config = ConfigDict(extra="ignore", allow_inf_nan=False)

    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    min_p: MinP | None = None
    repetition_penalty: RepetitionPenalty | None = None


def default_sampling(settings: SamplingSettings, model_dir: Path | None) -> SamplingDefaults:
    """`model_dir`: the prepared model; None if it has no files.

    Raises:
        ModelError: the file is to be used, and has a value that no request may have.
    """
    found = _read(model_dir / _FILE) if settings.source == "model" and model_dir is not None else _GenerationConfig()
    values = found.model_dump(exclude_none=True) | settings.model_dump(exclude={"source"}, exclude_none=True)
    if "top_k" in values:
        values["top_k"] = max(values["top_k"], 0)
    return SamplingDefaults(**values)


def _read(path: Path) -> _GenerationConfig:
    try:
        return _GenerationConfig.model_validate_json(path.read_bytes()) if path.exists() else _GenerationConfig()
    except ValidationError as error:
        reasons = "; ".join(": ".join((*map(str, one["loc"]), one["msg"])) for one in error.errors())
        raise ModelError(f"{path}: {reasons}. default_sampling.source: openai does not use the file.") from None

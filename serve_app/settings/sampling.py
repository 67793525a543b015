"""Defines the settings of sampling: what a request gets for what it does not set.
Never reads a model's files: `serve_app.replicas.default_sampling` does."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

Temperature = Annotated[float, Field(ge=0, le=2)]
TopP = Annotated[float, Field(gt=0, le=1)]
TopK = Annotated[int, Field(ge=-1, lt=2**31)]
MinP = Annotated[float, Field(ge=0, le=1)]
RepetitionPenalty = Annotated[float, Field(ge=0.01, le=10)]


class SamplingSettings(BaseModel):
    """How answers are sampled where a request does not say it. A value that is unset comes from `source`."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    source: Literal["openai", "model"] = Field(
        default="openai",
        description="`openai`: a temperature of 1, and nothing that limits what is sampled. `model`: the values of the "
        "model's generation_config.json, as with vLLM and SGLang.",
    )
    temperature: Temperature | None = Field(default=None, description="0 takes the likeliest token.")
    top_p: TopP | None = Field(default=None, description="1: no limit.")
    top_k: TopK | None = Field(default=None, description="0 and -1: no limit.")
    min_p: MinP | None = Field(default=None, description="0: no limit.")
    repetition_penalty: RepetitionPenalty | None = Field(default=None, description="1: none.")

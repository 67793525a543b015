"""Defines the settings of tracing: where spans are sent, and which.
Never makes a span: `serve_app.tracing` does."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from engine.config import refuse_conflicts
from engine.features import terms_of, turned_on
from serve_app.settings.features import APP_RULES


class TracingSettings(BaseModel):
    """OpenTelemetry spans of the requests for generated text. They show no prompt and no answer."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    exporter: Literal["none", "console", "otlp"] = Field(
        default="none",
        description="Where spans go. `none`: nowhere. `console`: to the ingress replicas' output, one JSON line each. "
        "`otlp`: to a collector, by OTLP over HTTP; this needs the extra `tracing`.",
    )
    endpoint: str | None = Field(
        default=None,
        description="`otlp`: the collector's URL for traces, such as `http://collector:4318/v1/traces`. Unset: "
        "OpenTelemetry's own environment variables, and without them port 4318 of this machine.",
        pattern="^https?://.",
    )
    sample_ratio: float = Field(
        default=1,
        description="Share of requests that get a span, 0 to 1. A request with a `traceparent` gets one exactly if its "
        "caller was sampled.",
        ge=0,
        le=1,
    )

    @model_validator(mode="after")
    def _goes_together(self) -> Self:
        refuse_conflicts(turned_on(self, terms_of(APP_RULES), prefix="tracing."), APP_RULES)
        return self

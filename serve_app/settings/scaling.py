"""Owns the settings of autoscaling: what an engine's signals are measured against, and what they call for.
Never counts replicas; `serve_app.scaling.autoscaler` does."""

from __future__ import annotations

from typing import Self

from pydantic import BaseModel, ConfigDict, Field, model_validator


class SignalSettings(BaseModel):
    """What the signals of an engine are measured against."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    ttft_target_ms: float = Field(
        default=2000,
        description="Time to first token that requests are to have; a prompt that takes longer than this by itself, "
        "which no replica can change, may take twice its own time.",
        gt=0,
    )
    prefill_tokens_per_s: float = Field(
        default=1000, description="Prefill throughput of an engine that has not measured its own yet.", gt=0
    )


class ScalingSettings(BaseModel):
    """Targets that a replica is loaded to, and how fast the number of replicas follows."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    target_utilization: float = Field(
        0.7, description="Share of an engine's seats, and of its prefill throughput, that is to be in use.", gt=0, le=1
    )
    target_kv_utilization: float = Field(
        0.8, description="Share of an engine's KV blocks that is to be held or reserved.", gt=0, le=1
    )
    target_queue_s: float = Field(2, description="Seconds of prefill work that may wait at an engine.", gt=0)
    drain_time_s: float = Field(
        30, description="Time to work off what waits beyond that, besides all that arrives.", gt=0
    )
    ttft_objective: float = Field(
        0.9,
        description="Share of requests that are to meet `ttft_target_ms`; below it, busy engines are given less load.",
        gt=0,
        le=1,
    )
    startup_time_s: float = Field(
        60, description="How far ahead a steady rise of the load is extrapolated: a replica's start-up. 0: off.", ge=0
    )
    max_growth: float = Field(
        2, description="Waiting work may ask for at most this multiple of the running replicas.", gt=1
    )
    upscale_delay_s: float = Field(2, description="How long more load must last before replicas are added.", ge=0)
    downscale_delay_s: float = Field(
        300, description="How long the load must be low before one step of replicas is removed.", ge=0
    )
    downscale_to_zero_delay_s: float = Field(
        600, description="How long nothing may have run or waited before the last replica is removed.", ge=0
    )
    downscale_step: float = Field(
        0.25, description="Largest share of the replicas that one step removes; at least one.", gt=0, le=1
    )
    downscale_margin: float = Field(
        0.1, description="Share of their targets that the remaining replicas must have left after a step.", ge=0, lt=1
    )
    stale_after_s: float = Field(
        10, description="A replica without news for this long is assumed full, and nothing is removed.", gt=0
    )


class AutoscalingSettings(SignalSettings, ScalingSettings):
    """How the number of engine replicas follows the load; serve_app.scaling.autoscaler has the rules."""

    min_replicas: int = Field(
        default=1, description="Fewest engine replicas. 0: none while nothing is asked for.", ge=0
    )
    max_replicas: int = Field(description="Most engine replicas.", ge=1)

    @model_validator(mode="after")
    def _bounds_in_order(self) -> Self:
        if self.min_replicas > self.max_replicas:
            raise ValueError(f"min_replicas ({self.min_replicas}) is more than max_replicas ({self.max_replicas}).")
        return self

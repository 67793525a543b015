"""Defines the settings of autoscaling: the targets of an engine's signals, and the reaction to them.
Never counts replicas: `serve_app.scaling.autoscaler` does."""

from __future__ import annotations

from typing import Self

from pydantic import BaseModel, ConfigDict, Field, model_validator


class SignalSettings(BaseModel):
    """The targets of an engine's signals."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    ttft_target_ms: float = Field(
        default=2000,
        description="Time to first token that requests should have, in milliseconds. Lower it to scale up earlier. A "
        "prompt whose own computation takes longer may take twice that time, since more replicas cannot shorten it.",
        gt=0,
    )
    prefill_tokens_per_s: float = Field(
        default=1000,
        description="Prompt tokens a second that an engine is assumed to compute until it has measured its own rate.",
        gt=0,
    )


class ScalingSettings(BaseModel):
    """The target load of a replica, and how fast the number of replicas follows the load."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    target_utilization: float = Field(
        0.7,
        description="Share of an engine's seats, and of its prefill throughput, that should be in use. Lower it for "
        "more headroom and more replicas.",
        gt=0,
        le=1,
    )
    target_kv_utilization: float = Field(
        0.8, description="Share of an engine's KV blocks that should be held or reserved.", gt=0, le=1
    )
    target_queue_s: float = Field(2, description="Seconds of prefill work that may wait at an engine.", gt=0)
    drain_time_s: float = Field(
        30,
        description="Time in which work beyond that is to be done, besides all that arrives, in seconds. Lower it to "
        "add more replicas for a burst.",
        gt=0,
    )
    ttft_objective: float = Field(
        0.9,
        description="Share of requests that should meet `ttft_target_ms`. Below it, busy engines are planned with less "
        "load each.",
        gt=0,
        le=1,
    )
    startup_time_s: float = Field(
        60,
        description="How far ahead a steady rise of the load is extrapolated, in seconds: the time that a replica "
        "takes to start. 0: off.",
        ge=0,
    )
    max_growth: float = Field(
        2, description="Waiting work may ask for at most this many times the running replicas.", gt=1
    )
    upscale_delay_s: float = Field(
        2, description="How long a higher load must last before replicas are added, in seconds.", ge=0
    )
    downscale_delay_s: float = Field(
        300, description="How long the load must be lower before one step of replicas is removed, in seconds.", ge=0
    )
    downscale_to_zero_delay_s: float = Field(
        600,
        description="How long nothing must have run or waited before the last replica is removed, in seconds.",
        ge=0,
    )
    downscale_step: float = Field(
        0.25,
        description="Largest share of the replicas that one step removes; always at least one replica.",
        gt=0,
        le=1,
    )
    downscale_margin: float = Field(
        0.1,
        description="Share of their targets that the remaining replicas must have left after a step down.",
        ge=0,
        lt=1,
    )
    stale_after_s: float = Field(
        10,
        description="After this many seconds without a report, a replica is assumed to be full, and no replica is "
        "removed.",
        gt=0,
    )


class AutoscalingSettings(SignalSettings, ScalingSettings):
    """How the number of engine replicas follows the load; serve_app.scaling.autoscaler has the rules."""

    min_replicas: int = Field(
        default=1, description="Fewest engine replicas. 0: scale to zero while there are no requests.", ge=0
    )
    max_replicas: int = Field(description="Most engine replicas.", ge=1)

    @model_validator(mode="after")
    def _bounds_in_order(self) -> Self:
        if self.min_replicas > self.max_replicas:
            raise ValueError(f"min_replicas ({self.min_replicas}) is more than max_replicas ({self.max_replicas}).")
        return self

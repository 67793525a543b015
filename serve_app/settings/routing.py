"""Owns the settings of routing: how much is remembered of the engines, and how load outweighs a cached prefix.
Never places a request; `serve_app.routing.placement` does."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class RoutingSettings(BaseModel):
    """How requests are spread over the engine replicas; serve_app.routing.placement has the rules."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    prefix_blocks: int = Field(
        default=256, description="Most KV blocks of a prompt that are looked for in the engines' caches. 0: none.", ge=0
    )
    index_blocks: int = Field(
        default=16384, description="Most cached blocks that an ingress replica remembers of each engine.", ge=1
    )
    published_blocks: int = Field(
        default=1024,
        description="Most cached blocks that an engine reports. 0: an ingress replica knows only what it sent.",
        ge=0,
    )
    stats_period_s: float = Field(default=1, description="How often Serve collects the engines' reports.", gt=0)
    load_factor: float = Field(
        default=1.25, description="A replica whose load is above the mean times this is chosen after the others.", ge=1
    )
    slack_tokens: int = Field(
        default=2048, description="Load above that which is let pass, in prompt tokens to compute.", ge=0
    )
    request_tokens: int = Field(
        default=64,
        description="What a running or waiting request adds to a load, besides its prompt tokens to compute.",
        ge=0,
    )
    adapter_tokens: int = Field(
        default=512,
        description="What it counts that an engine has to read a request's LoRA adapter first, in prompt tokens to "
        "compute: engines that have it are chosen while they have no more to do than that.",
        ge=0,
    )

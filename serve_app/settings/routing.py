"""Defines the settings of routing: how much is remembered about the engines, and how load outweighs a cached prefix.
Never places a request: `serve_app.routing.placement` does."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class RoutingSettings(BaseModel):
    """How requests are spread over the engine replicas; serve_app.routing.placement has the rules."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    prefix_blocks: int = Field(
        default=256,
        description="Most KV blocks of a prompt that are looked up in the engines' prefix caches. 0: none, so that "
        "prefixes do not affect routing.",
        ge=0,
    )
    tier_hit_weight: float = Field(
        default=0.8,
        description="What a prompt token counts that an engine has only in a tier (`engine.kv_tiers`), compared with "
        "one in its KV cache: the share of computing it that loading saves. 1: as much. 0: nothing.",
        ge=0,
        le=1,
    )
    index_blocks: int = Field(
        default=16384,
        description="Most cached KV blocks that an ingress replica remembers for each engine, and again for its tiers.",
        ge=1,
    )
    published_blocks: int = Field(
        default=1024,
        description="Most cached KV blocks that an engine reports, and again of each of its tiers. 0: an ingress "
        "replica knows only of prompts that it sent itself.",
        ge=0,
    )
    stats_period_s: float = Field(
        default=1, description="How often Serve collects the engines' reports, in seconds.", gt=0
    )
    load_factor: float = Field(
        default=1.25,
        description="An engine whose load exceeds the mean load times this is chosen only after the others. Lower it "
        "to spread load more evenly; raise it to hit prefix caches more often.",
        ge=1,
    )
    slack_tokens: int = Field(
        default=2048,
        description="Load that an engine may have beyond load_factor times the mean and still be preferred, in prompt "
        "tokens to compute.",
        ge=0,
    )
    request_tokens: int = Field(
        default=64,
        description="Load of a running or waiting request besides its prompt, in prompt tokens to compute.",
        ge=0,
    )
    adapter_tokens: int = Field(
        default=512,
        description="Cost of reading a LoRA adapter that an engine does not have in memory, in prompt tokens to "
        "compute. Engines that have the adapter are preferred while they have no more to do than this.",
        ge=0,
    )

"""Defines the settings of one model: its names, its engines, and how its text is read.
Never holds a default twice: the engine's own settings are engine.config.EngineConfig, validated here by pydantic."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from engine.checkpoints.gguf_form import gguf_form
from engine.config import EngineConfig, refuse_conflicts
from engine.features import terms_of, turned_on
from serve_app.settings.features import MODEL_RULES
from serve_app.settings.images import ImageSettings
from serve_app.settings.names import NameSettings
from serve_app.settings.ranks import (
    ONE_NODE,
    Placement,
    check_ranks,
    placement_options,
    rank_options,
    ranks_of,
    setting_of,
)
from serve_app.settings.routing import RoutingSettings
from serve_app.settings.sampling import SamplingSettings
from serve_app.settings.scaling import AutoscalingSettings, SignalSettings


class ModelSettings(NameSettings):
    """A model, its engines, and their share of the machine."""

    engine: EngineConfig = Field(default_factory=EngineConfig, description="Settings of each engine.")
    engine_replicas: int = Field(
        1,
        description="Number of engines, each a process of its own. With `autoscaling`: how many to start with whenever "
        "the deployment changes; unset, as many as are running, and min_replicas at first.",
        ge=1,
    )
    autoscaling: AutoscalingSettings | None = Field(
        None, description="Let the number of engines follow the load. Unset: it is engine_replicas."
    )
    engine_num_cpus: float = Field(
        0.5,
        description="CPUs that Ray reserves for an engine replica, all its ranks together. They do not limit its "
        "threads.",
        ge=0,
    )
    engine_num_gpus: float = Field(
        0,
        description="GPUs that Ray reserves for an engine replica: 0, or one for each of its ranks. A rank sees no "
        "other GPU.",
        ge=0,
    )
    tensor_parallel_placement: Placement = Field(
        ONE_NODE,
        description="Where the ranks of an engine may be. `strict_pack`: on one node, where they exchange the most. "
        "`pack`: on as few nodes as have room. `spread`: on as many as there are.",
    )
    engine_accelerator_type: str | None = Field(
        None, description="Kind of GPU that an engine replica needs, by Ray's name for it, such as `H100`. Unset: any."
    )
    routing: RoutingSettings = Field(
        default_factory=RoutingSettings, description="How requests are spread over the engines."
    )
    tool_parser: Literal[
        "auto",
        "none",
        "hermes",
        "qwen3_coder",
        "llama3_json",
        "pythonic",
        "mistral",
        "openai",
        "deepseek_v3",
        "deepseek_v31",
        "glm45",
        "kimi_k2",
        "phi4_mini_json",
    ] = Field(
        "auto",
        description="Format in which the model writes tool calls. `auto`: detected from its chat template. `none`: "
        "calls are not parsed.",
    )
    reasoning_parser: Literal["auto", "none", "qwen3", "deepseek_r1", "kimi_k2", "mistral", "openai_gptoss"] = Field(
        "auto",
        description="Format in which the model marks its reasoning, which answers then carry separately. `auto`: "
        "detected from its chat template. `none`: reasoning stays in the text.",
    )
    pooling: Literal["none", "mean", "last"] = Field(
        "none",
        description="What /v1/embeddings returns, as the model was trained for it. `mean`: the mean of a text's final "
        "hidden states. `last`: the last one. `none`: the route is refused.",
    )
    default_sampling: SamplingSettings = Field(
        default_factory=SamplingSettings, description="How answers are sampled where a request does not say it."
    )
    images: ImageSettings = Field(
        default_factory=ImageSettings, description="Images in requests, for models that take them."
    )

    @model_validator(mode="after")
    def _each_rank_has_one_gpu_or_none(self) -> Self:
        placement, setting = self.tensor_parallel_placement, setting_of(self.engine)
        check_ranks(self.num_ranks, self.engine_num_gpus, placement, setting)
        return self

    @model_validator(mode="after")
    def _goes_together(self) -> Self:
        refuse_conflicts(turned_on(self, terms_of(MODEL_RULES)), MODEL_RULES)
        return self

    @model_validator(mode="after")
    def _starts_within_bounds(self) -> Self:
        bounds = self.autoscaling
        if bounds is None or "engine_replicas" not in self.model_fields_set:
            return self
        if not bounds.min_replicas <= self.engine_replicas <= bounds.max_replicas:
            raise ValueError(
                f"engine_replicas ({self.engine_replicas}) is the number to start with, and must be in "
                f"autoscaling.min_replicas ({bounds.min_replicas}) to max_replicas ({bounds.max_replicas})."
            )
        return self

    @property
    def most_engines(self) -> int:
        return self.engine_replicas if self.autoscaling is None else self.autoscaling.max_replicas

    @property
    def first_engines(self) -> int:
        """How many engines a new deployment starts with."""
        if self.autoscaling is None or "engine_replicas" in self.model_fields_set:
            return self.engine_replicas
        return self.autoscaling.min_replicas

    @property
    def signals(self) -> SignalSettings:
        """The settings of the engines' reports. Engines report even without `autoscaling`, because Serve's own config
        may scale them."""
        return self.autoscaling or SignalSettings()

    @property
    def may_sleep(self) -> bool:
        """Whether there may be no engine while nothing is asked of the model."""
        return self.autoscaling is not None and self.autoscaling.min_replicas == 0

    @property
    def replica_engine(self) -> EngineConfig:
        """`engine`, changed so that a replica with a GPU does not fall back to the CPU."""
        return dataclasses.replace(self.engine, device="cuda") if self.engine_num_gpus else self.engine

    @property
    def gguf_form(self) -> dict[str, bool]:
        """The form in which a GGUF file is prepared for the engines; see engine.checkpoints.gguf_form."""
        return gguf_form(self.engine, on_gpu=bool(self.engine_num_gpus))

    @property
    def tokenizer_form(self) -> dict[str, bool]:
        """The same for what reads no weights: either form has the tokenizer."""
        return self.gguf_form | {"either": True}

    @property
    def num_ranks(self) -> int:
        """How many processes compute an engine's model together: the replica, and a follower for each other rank."""
        return ranks_of(self.engine)

    @property
    def engine_resources(self) -> dict[str, float | str]:
        """The resources that Ray reserves for each rank of an engine, the replica's own included, as its
        `ray_actor_options`."""
        cpus, gpus, kind = self.engine_num_cpus, self.engine_num_gpus, self.engine_accelerator_type
        return rank_options(self.num_ranks, cpus, gpus, kind)

    @property
    def engine_placement(self) -> dict[str, Any]:
        """The keywords of serve.deployment that reserve the places of an engine's ranks together; none for one rank."""
        return placement_options(self.num_ranks, self.engine_resources, self.tensor_parallel_placement)

    @property
    def engine_capacity(self) -> int:
        """The most requests that one engine holds, running and waiting; it refuses more by itself, with a reason."""
        return self.engine.num_seats + self.engine.queue_room

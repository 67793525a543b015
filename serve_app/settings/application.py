"""Defines the settings of one application: the `args:` of serve_app.app:build in config.yaml.
Never holds a default twice: the engine's own settings are engine.config.EngineConfig, validated here by pydantic."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Literal, Self

from pydantic import ConfigDict, Field, model_validator

from engine.checkpoints.gguf_form import gguf_form
from engine.config import EngineConfig, refuse_conflicts
from engine.features import terms_of, turned_on
from serve_app.settings.admission import AdmissionSettings
from serve_app.settings.auth import AuthSettings
from serve_app.settings.cors import CorsSettings
from serve_app.settings.features import APP_RULES
from serve_app.settings.images import ImageSettings
from serve_app.settings.limits import GatePolicy, Limits
from serve_app.settings.names import NameSettings
from serve_app.settings.responses_store import ResponsesStoreSettings
from serve_app.settings.routing import RoutingSettings
from serve_app.settings.scaling import AutoscalingSettings, SignalSettings
from serve_app.settings.tracing import TracingSettings

CONTROL_CALLS = 8
"""How many calls besides requests (health, load, drain) a replica answers while it is full."""


FernetKey = Annotated[str, Field(pattern="^[A-Za-z0-9_-]{43}=$")]


class AppSettings(NameSettings):
    """The model that an application serves, its replicas, and their share of the machine."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, hide_input_in_errors=True)

    engine: EngineConfig = Field(default_factory=EngineConfig, description="Settings of each engine.")
    strict: bool = Field(
        False,
        description="Refuse hints, which are fields such as `verbosity` that cannot change this server's answer. "
        "Otherwise the header `x-chunkserve-ignored` names those of a request that had no effect.",
    )
    drop_billing_header: bool = Field(
        True,
        description="Remove the line `x-anthropic-billing-header: ...`, with which Claude Code begins its system "
        "prompt. A part of that line changes, so no conversation would find another's prefix in the cache.",
    )
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
        0.5, description="CPUs that Ray reserves for an engine replica. They do not limit its threads.", ge=0
    )
    engine_num_gpus: float = Field(
        0, description="GPUs that Ray reserves for an engine replica, 0 or 1. The replica sees no other GPU.", ge=0
    )
    engine_accelerator_type: str | None = Field(
        None, description="Kind of GPU that an engine replica needs, by Ray's name for it, such as `H100`. Unset: any."
    )
    ingress_replicas: int = Field(
        1,
        description="Number of HTTP replicas, which tokenize, apply chat templates and stream. Raise it when they use "
        "their CPUs up.",
        ge=1,
    )
    ingress_num_cpus: float = Field(0.25, description="CPUs that Ray reserves for an ingress replica.", ge=0)
    drain_timeout_s: float = Field(
        120,
        description="How long running requests may continue at shutdown, in seconds; the rest then end with an error.",
        gt=0,
    )
    health_check_period_s: float = Field(
        5,
        description="How often Serve checks an engine replica's health, in seconds. Three failed checks restart it.",
        gt=0,
    )
    health_check_timeout_s: float = Field(
        10, description="How long Serve waits for the answer to a health check, in seconds.", gt=0
    )
    engine_silence_s: float = Field(
        2,
        description="After this many seconds without news of an engine, it gets no new requests until it is heard of "
        "again, and its streams move to another engine. The same holds for a step that takes this long and four times "
        "as long as the slowest recent step.",
        ge=0.5,
    )
    hang_timeout_s: float = Field(
        20,
        description="A replica whose process stands still for this many seconds is killed. A long step does not count; "
        "stall_timeout_s bounds those.",
        ge=1,
    )
    max_migrations: int = Field(
        3, description="How often a request may move to another engine replica when its own fails. 0: never.", ge=0
    )
    migration_timeout_s: float = Field(
        60,
        description="How long a stream whose engine failed waits until another has begun to compute it, in seconds, "
        "however often it moves meanwhile; then it fails.",
        gt=0,
    )
    routing: RoutingSettings = Field(
        default_factory=RoutingSettings, description="How requests are spread over the engines."
    )
    max_unread_tokens: int = Field(
        2048,
        description="Most tokens that may wait for a client that reads too slowly; its request is then ended.",
        ge=1,
    )
    client_stall_timeout_s: float = Field(
        60, description="A client that reads nothing of its answer for this many seconds is disconnected.", gt=0
    )
    sse_keep_alive_s: float = Field(
        15,
        description="A stream that has been silent for this many seconds gets a comment, so that proxies do not close "
        "it. 0: none.",
        ge=0,
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
    admission: AdmissionSettings = Field(
        default_factory=AdmissionSettings, description="How many requests are let in, and how many wait in the ingress."
    )
    tracing: TracingSettings = Field(default_factory=TracingSettings, description="OpenTelemetry spans of requests.")
    images: ImageSettings = Field(
        default_factory=ImageSettings, description="Images in requests, for models that take them."
    )
    reasoning_keys: tuple[FernetKey, ...] = Field(
        (),
        description="Keys that encrypt reasoning (`encrypted_content`; `signature` in `/v1/messages`), so that a "
        "client can send it back to any replica. Each tenant's is encrypted with a key of its own, derived from these: "
        "nobody else can have it decrypted. Each is 32 random bytes in URL-safe base64: the output of `openssl "
        "rand -base64 32` with `-` for each `+` and `_` for each `/`. The first key encrypts, and all of them decrypt. "
        "Unset: an ingress replica makes a key when it starts; with more than one replica, reasoning is not encrypted.",
    )
    responses_store: ResponsesStoreSettings = Field(
        default_factory=ResponsesStoreSettings, description="Answers of /v1/responses that requests may refer to."
    )
    auth: AuthSettings = Field(default_factory=AuthSettings, description="API keys and the admin key.")
    cors: CorsSettings = Field(default_factory=CorsSettings, description="Web pages that may use the API.")
    max_body_bytes: int = Field(
        4 * 1024 * 1024, description="Largest request body, in bytes; a larger one gets a 413.", ge=1024
    )

    @model_validator(mode="after")
    def _an_engine_has_one_gpu_or_none(self) -> Self:
        gpus = self.engine_num_gpus
        if gpus % 1:
            raise ValueError(
                f"engine_num_gpus is {gpus:g}, but an engine measures and takes the memory of a whole GPU: two that "
                "share one would each take gpu_memory_utilization of it. Use 1, or 0 for the CPU."
            )
        if gpus > 1:
            raise ValueError(
                f"engine_num_gpus is {gpus:g}, but an engine runs on one GPU: use 1, and engine_replicas for more GPUs."
            )
        return self

    @model_validator(mode="after")
    def _goes_together(self) -> Self:
        refuse_conflicts(turned_on(self, terms_of(APP_RULES)), APP_RULES)
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
    def shares_responses(self) -> bool:
        """Whether several ingress replicas keep responses, which is then done in one place for all."""
        return self.ingress_replicas > 1 and self.responses_store.max_bytes > 0

    @property
    def signals(self) -> SignalSettings:
        """The settings of the engines' reports. Engines report even without `autoscaling`, because Serve's own config
        may scale them."""
        return self.autoscaling or SignalSettings()

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
    def engine_resources(self) -> dict[str, float | str]:
        """The resources that Ray reserves for an engine replica, as its `ray_actor_options`."""
        options: dict[str, float | str] = {"num_cpus": self.engine_num_cpus, "num_gpus": self.engine_num_gpus}
        kind = self.engine_accelerator_type
        return options if kind is None else options | {"accelerator_type": kind}

    @property
    def engine_capacity(self) -> int:
        """The most requests that one engine holds, running and waiting; it refuses more by itself, with a reason."""
        return self.engine.max_num_seqs + self.engine.max_queued_requests

    @property
    def gate_policy(self) -> GatePolicy:
        ask = self.admission
        return GatePolicy(
            dispatch_per_engine=self.engine.max_num_seqs + min(ask.dispatch_backlog, self.engine.max_queued_requests),
            concurrent_per_engine=self.engine_capacity,
            deployment=Limits(
                max_concurrent_requests=ask.max_concurrent_requests, max_queued_tokens=ask.max_queued_tokens
            ),
            tenant=Limits(
                max_concurrent_requests=ask.tenant_max_concurrent_requests,
                max_queued_tokens=ask.tenant_max_queued_tokens,
            ),
            ingress_replicas=self.ingress_replicas,
        )

    @property
    def ingress_capacity(self) -> int:
        """The most requests that Serve may pass to an ingress replica: those that its gate lets in, and as many again
        to refuse. More would wait in front of the replica without an answer."""
        most = self.gate_policy.of_deployment(self.most_engines).max_concurrent_requests
        assert most is not None, "derived if it is not set"
        return 2 * most

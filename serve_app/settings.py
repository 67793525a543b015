"""Owns the settings of one application: the `args:` of serve_app.app:build in config.yaml.
Never holds a default twice: the engine's own settings are engine.config.EngineConfig, validated here by pydantic."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from engine.config import EngineConfig, refuse_conflicts
from engine.features import terms_of, turned_on
from serve_app.adapters.settings import NameSettings
from serve_app.admission.limits import GatePolicy, Limits
from serve_app.cors import CorsSettings
from serve_app.features import APP_RULES
from serve_app.images.settings import ImageSettings
from serve_app.scaling.autoscaler import ScalingSettings
from serve_app.scaling.signals import SignalSettings

CONTROL_CALLS = 8
"""Calls besides requests (health, load, drain) that a replica takes while it is full."""


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


class AdmissionSettings(BaseModel):
    """What is let in, and what waits in the ingress; serve_app.admission.gate has the rules. With several ingress
    replicas each keeps its share of every limit, rounded up."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    max_concurrent_requests: int | None = Field(
        default=None,
        description="Most requests at a time, running and waiting; one more is a 503. Unset: max_num_seqs + "
        "max_queued_requests for each engine.",
        ge=1,
    )
    max_queued_tokens: int | None = Field(
        default=None,
        description="Most prompt tokens of requests that have not begun; more are a 503, except for a request that is "
        "alone. Unset: no limit.",
        ge=1,
    )
    tenant_max_concurrent_requests: int | None = Field(
        default=None, description="The same for each tenant; one more is a 429. Unset: no limit.", ge=1
    )
    tenant_max_queued_tokens: int | None = Field(
        default=None, description="The same for each tenant; more are a 429. Unset: no limit.", ge=1
    )
    dispatch_backlog: int = Field(
        default=16,
        description="Requests beyond max_num_seqs that are with each engine, so that no seat waits for the next one to "
        "come from the ingress, where the others wait. At most max_queued_requests.",
        ge=0,
    )


FernetKey = Annotated[str, Field(pattern="^[A-Za-z0-9_-]{43}=$")]
_Sha256 = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


class ApiKey(BaseModel):
    """One API key, and whose it is."""

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)

    tenant: str = Field(description="Whose key this is; keys of one tenant share its limits.", min_length=1)
    sha256: _Sha256 = Field(description="SHA-256 of the key, in hexadecimal; the key itself is written nowhere.")
    max_concurrent_requests: int | None = Field(
        default=None, description="Instead of admission.tenant_max_concurrent_requests.", ge=1
    )
    max_queued_tokens: int | None = Field(None, description="Instead of admission.tenant_max_queued_tokens.", ge=1)


class AuthSettings(BaseModel):
    """Who may use the server. `python -m serve_app.auth` makes keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)

    keys: tuple[ApiKey, ...] = Field(
        default=(),
        description="API keys. None here and in keys_file: everybody may use the server, as one tenant.",
    )
    keys_file: str | None = Field(
        default=None,
        description="More of them: a YAML or JSON list on the ingress replicas' machines, read when they start.",
    )
    admin_sha256: _Sha256 | None = Field(
        default=None, description="SHA-256 of the admin key, in hexadecimal. Unset: the admin routes are closed."
    )


class TracingSettings(BaseModel):
    """OpenTelemetry spans of the requests for generated text. They show no prompt and no answer."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    exporter: Literal["none", "console", "otlp"] = Field(
        default="none",
        description="Where spans go: nowhere; to the ingress replicas' output, a JSON line each; or to a collector, by "
        "OTLP over HTTP, which needs the extra `tracing`.",
    )
    endpoint: str | None = Field(
        default=None,
        description="`otlp`: the collector's URL for traces, such as `http://collector:4318/v1/traces`. Unset: what "
        "OpenTelemetry's own environment variables say, and without them this machine's port 4318.",
        pattern="^https?://.",
    )
    sample_ratio: float = Field(
        default=1,
        description="Share of the requests that get a span, 0 to 1. One that comes with a `traceparent` has it if its "
        "caller's was sampled, and only then.",
        ge=0,
        le=1,
    )

    @model_validator(mode="after")
    def _goes_together(self) -> Self:
        refuse_conflicts(turned_on(self, terms_of(APP_RULES), prefix="tracing."), APP_RULES)
        return self


class AppSettings(NameSettings):
    """What one application serves, on how many replicas, with which share of the machine."""

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)

    engine: EngineConfig = Field(default_factory=EngineConfig, description="Settings of each engine.")
    strict: bool = Field(
        False,
        description="Refuse hints, such as `verbosity`: fields that ask for no other answer than this server gives. "
        "Otherwise the header `x-chunkserve-ignored` names those of a request that had no effect.",
    )
    drop_billing_header: bool = Field(
        True,
        description="Keep the line `x-anthropic-billing-header: ...`, with which Claude Code begins its system prompt, "
        "out of the prompt. A part of it changes, so that no conversation would find another's prefix in the cache.",
    )
    engine_replicas: int = Field(
        1,
        description="Engines, each in a process of its own. With `autoscaling`: how many to start with, at each change "
        "of the deployment; unset, as many as run, and at first min_replicas.",
        ge=1,
    )
    autoscaling: AutoscalingSettings | None = Field(
        None, description="Let the number of engines follow the load. Unset: it is engine_replicas."
    )
    engine_num_cpus: float = Field(
        0.5, description="CPUs that Ray reserves for an engine replica; it does not bound its threads.", ge=0
    )
    engine_num_gpus: float = Field(
        0, description="GPUs that Ray reserves for an engine replica, which then sees no other: 0 or 1.", ge=0
    )
    engine_accelerator_type: str | None = Field(
        None, description="The kind of GPU that an engine replica needs, as Ray names it, such as `H100`. Unset: any."
    )
    ingress_replicas: int = Field(1, description="HTTP replicas: tokenization, templates, streaming.", ge=1)
    ingress_num_cpus: float = Field(0.25, description="CPUs that Ray reserves for an ingress replica.", ge=0)
    drain_timeout_s: float = Field(
        120,
        description="How long running requests may go on at shutdown; what is left then ends with an error.",
        gt=0,
    )
    health_check_period_s: float = Field(
        5, description="How often Serve asks an engine replica how it is; three bad answers restart it.", gt=0
    )
    health_check_timeout_s: float = Field(10, description="How long it waits for the answer.", gt=0)
    engine_silence_s: float = Field(
        2,
        description="An engine that was not heard of for this long, or whose step takes this long and four times its "
        "slowest lately, gets no new requests until it is heard of again, and its streams move to another engine.",
        ge=0.5,
    )
    hang_timeout_s: float = Field(
        20,
        description="A replica whose process does nothing for this long is killed. A step is not nothing: an engine "
        "has stall_timeout_s besides.",
        ge=1,
    )
    max_migrations: int = Field(
        3, description="How often a request moves to another engine replica when its own fails.", ge=0
    )
    migration_timeout_s: float = Field(
        60, description="How long a stream waits for the first token of the next replica before it fails.", gt=0
    )
    routing: RoutingSettings = Field(
        default_factory=RoutingSettings, description="How requests are spread over the engines."
    )
    max_unread_tokens: int = Field(
        2048, description="Tokens that may wait for a client that reads too slowly; its request then ends.", ge=1
    )
    client_stall_timeout_s: float = Field(
        60, description="A client that takes nothing of its answer for this long is disconnected.", gt=0
    )
    sse_keep_alive_s: float = Field(
        15,
        description="A stream that was silent this long gets a comment, so that no proxy takes it for dead. 0: none.",
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
    ] = Field("auto", description="How the model writes tool calls; `auto` looks at its chat template.")
    reasoning_parser: Literal["auto", "none", "qwen3", "deepseek_r1", "kimi_k2", "mistral", "openai_gptoss"] = Field(
        "auto",
        description="How the model marks what it thinks, which answers then tell apart; `auto` looks at its chat "
        "template.",
    )
    pooling: Literal["none", "mean", "last"] = Field(
        "none",
        description="What /v1/embeddings answers with: the mean of a text's final hidden states, or the last one, as "
        "the model was trained for. `none`: it is refused.",
    )
    admission: AdmissionSettings = Field(
        default_factory=AdmissionSettings, description="What is let in, and what waits in the ingress."
    )
    tracing: TracingSettings = Field(default_factory=TracingSettings, description="OpenTelemetry spans of requests.")
    images: ImageSettings = Field(
        default_factory=ImageSettings, description="Images in requests, for models that take any."
    )
    reasoning_keys: tuple[FernetKey, ...] = Field(
        (),
        description="Keys that seal the thoughts in a response's `encrypted_content`, so that a client can send them "
        "back to any replica: 32 random bytes each in URL-safe base64, which is what `openssl rand -base64 32` writes "
        "with `-` for each `+` and `_` for each `/`. The first seals, all of them open. Unset: one that the ingress "
        "replica draws when it starts; with more than one replica, thoughts are not sealed.",
    )
    auth: AuthSettings = Field(default_factory=AuthSettings, description="API keys and the admin key.")
    cors: CorsSettings = Field(default_factory=CorsSettings, description="Web pages that may use the API.")
    max_body_bytes: int = Field(4 * 1024 * 1024, description="Largest request body; a larger one is a 413.", ge=1024)

    @model_validator(mode="after")
    def _an_engine_has_one_gpu_or_none(self) -> Self:
        gpus = self.engine_num_gpus
        if gpus != int(gpus):
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
    def signals(self) -> SignalSettings:
        """What engines measure their reports against. They report without `autoscaling`, too: Serve's own config may
        scale them."""
        return self.autoscaling or SignalSettings()

    @property
    def replica_engine(self) -> EngineConfig:
        """`engine`, where a replica that holds a GPU does not fall back to the CPU."""
        return dataclasses.replace(self.engine, device="cuda") if self.engine_num_gpus else self.engine

    @property
    def engine_resources(self) -> dict[str, float | str]:
        """What Ray reserves for an engine replica, as its `ray_actor_options`."""
        options: dict[str, float | str] = {"num_cpus": self.engine_num_cpus, "num_gpus": self.engine_num_gpus}
        kind = self.engine_accelerator_type
        return options if kind is None else options | {"accelerator_type": kind}

    @property
    def engine_capacity(self) -> int:
        """Requests that one engine holds, running and waiting; it refuses more by itself, with a reason."""
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
        """Requests that Serve may hand to an ingress replica: what its gate lets in, and as many again to refuse. More
        would wait before the replica, where nobody tells them."""
        most = self.gate_policy.of_deployment(self.most_engines).max_concurrent_requests
        assert most is not None, "derived where it is not set"
        return 2 * most

"""Defines the settings of one application: the `args:` of serve_app.app:build in config.yaml.
Never holds a default twice: a model's own settings are in serve_app.settings.model."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import ConfigDict, Field, model_validator

from engine.config import refuse_conflicts
from engine.features import terms_of, turned_on
from serve_app.settings.admission import AdmissionSettings
from serve_app.settings.auth import AuthSettings
from serve_app.settings.cors import CorsSettings
from serve_app.settings.engine_names import ENGINE, engine_names
from serve_app.settings.features import SHARED_RULES
from serve_app.settings.limits import GatePolicy, Limits, RoomPolicy
from serve_app.settings.model import ModelSettings
from serve_app.settings.responses_store import ResponsesStoreSettings
from serve_app.settings.several import ModelEntry, refuse_shared_names
from serve_app.settings.tracing import TracingSettings

CONTROL_CALLS = 8
"""How many calls besides requests (health, load, drain) a replica answers while it is full."""


FernetKey = Annotated[str, Field(pattern="^[A-Za-z0-9_-]{43}=$")]


class AppSettings(ModelSettings):
    """What an application serves, one model or several, its replicas, and their share of the machine."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, hide_input_in_errors=True)

    models: tuple[ModelEntry, ...] = Field(
        (),
        description="Several models, each with settings of its own; then none of those may stand beside `models`. "
        "Clients ask for one by `model`. Unset: one model, whose settings stand here.",
    )
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
    ingress_replicas: int = Field(
        1,
        description="Number of HTTP replicas, which tokenize, apply chat templates and stream. Raise it when they use "
        "their CPUs up.",
        ge=1,
    )
    ingress_num_cpus: float = Field(0.25, description="CPUs that Ray reserves for an ingress replica.", ge=0)
    drain_timeout_s: float = Field(
        120,
        description="How long running requests may continue when the server or their ingress replica is stopped, in "
        "seconds; the rest then end with an error.",
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
    admission: AdmissionSettings = Field(
        default_factory=AdmissionSettings, description="How many requests are let in, and how many wait in the ingress."
    )
    tracing: TracingSettings = Field(default_factory=TracingSettings, description="OpenTelemetry spans of requests.")
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
    def _shared_settings_go_together(self) -> Self:
        refuse_conflicts(turned_on(self, terms_of(SHARED_RULES)), SHARED_RULES)
        return self

    @model_validator(mode="after")
    def _serves_one_model_or_several(self) -> Self:
        if "models" not in self.model_fields_set:
            return self
        if not self.models:
            raise ValueError("models is empty: expected at least one model, or no `models` at all.")
        own = [name for name in ModelSettings.model_fields if name in self.model_fields_set]
        if own:
            raise ValueError(f"{own[0]} stands beside models, but it is each model's own: put it into an entry there.")
        refuse_shared_names(self.models)
        return self

    def each_model(self) -> tuple[AppSettings, ...]:
        """Return the settings of each model as if it were served alone, with what all models share. `admission` is
        that of all of them; `gate_policies` has each model's own limits."""
        if not self.models:
            return (self,)
        shared = {name: getattr(self, name) for name in self.model_fields_set - {"models"}}
        own = ModelSettings.model_fields.keys()
        each = ({name: getattr(one, name) for name in own & one.model_fields_set} for one in self.models)
        return tuple(AppSettings(**shared, **one) for one in each)

    @property
    def total_engines(self) -> int:
        """The most engines of all models together."""
        return sum(one.most_engines for one in self.models or (self,))

    @property
    def engine_names(self) -> tuple[str, ...]:
        """The engine deployment of each model."""
        return engine_names([one.model_id for one in self.models]) if self.models else (ENGINE,)

    @property
    def shares_responses(self) -> bool:
        """Whether several ingress replicas keep responses, which is then done in one place for all."""
        return self.ingress_replicas > 1 and self.responses_store.max_bytes > 0

    @property
    def gate_policies(self) -> tuple[GatePolicy, ...]:
        """The limits of each model. A model that is alone has all that is let in; see `room_policy` for several."""
        if not self.models:
            return (self._policy_of(self, self._limits),)
        own = [(one, one.admission.max_concurrent_requests, one.admission.max_queued_tokens) for one in self.models]
        return tuple(
            self._policy_of(one, Limits(max_concurrent_requests=requests, max_queued_tokens=tokens))
            for one, requests, tokens in own
        )

    @property
    def room_policy(self) -> RoomPolicy:
        """The limits that several models share."""
        shares = tuple(one.admission.share for one in self.models)
        return RoomPolicy(limits=self._limits, shares=shares, ingress_replicas=self.ingress_replicas)

    @property
    def _limits(self) -> Limits:
        ask = self.admission
        return Limits(max_concurrent_requests=ask.max_concurrent_requests, max_queued_tokens=ask.max_queued_tokens)

    def _policy_of(self, model: ModelSettings, limits: Limits) -> GatePolicy:
        ask = self.admission
        backlog = min(ask.dispatch_backlog, model.engine.queue_room)
        return GatePolicy(
            dispatch_per_engine=model.engine.num_seats + backlog,
            concurrent_per_engine=model.engine_capacity,
            deployment=limits,
            tenant=Limits(
                max_concurrent_requests=ask.tenant_max_concurrent_requests,
                max_queued_tokens=ask.tenant_max_queued_tokens,
            ),
            tenant_min_priority=ask.tenant_min_priority,
            ingress_replicas=self.ingress_replicas,
        )

    @property
    def ingress_capacity(self) -> int:
        """The most requests that Serve may pass to an ingress replica: those that its gates let in, and as many again
        to refuse. More would wait in front of the replica without an answer."""
        most = 0
        for model, policy in zip(self.models or (self,), self.gate_policies, strict=True):
            of_model = policy.of_deployment(model.most_engines).max_concurrent_requests
            assert of_model is not None, "derived if it is not set"
            most += of_model
        return 2 * most

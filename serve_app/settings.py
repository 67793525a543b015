"""Owns the settings of one application: the `args:` of serve_app.app:build in config.yaml.
Never holds a default twice: the engine's own settings are engine.config.EngineConfig, validated here by pydantic."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from engine.config import DEFAULT_MODEL, EngineConfig

CONTROL_CALLS = 8
"""Calls besides requests (health, load, drain) that a replica takes while it is full."""


class AppSettings(BaseModel):
    """What one application serves, on how many replicas, with which share of the machine."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str = Field(
        DEFAULT_MODEL,
        description="The packaged default, a local Hugging Face directory, a hub id, or a GGUF file.",
    )
    served_model_name: str | None = Field(
        None, description="The `model` that clients ask for. Unset: `model` itself.", min_length=1
    )
    engine: EngineConfig = Field(default_factory=EngineConfig, description="Settings of each engine; see below.")
    engine_replicas: int = Field(1, description="Engines, each in a process of its own.", ge=1)
    engine_num_cpus: float = Field(
        0.5, description="CPUs that Ray reserves for an engine replica; it does not bound its threads.", ge=0
    )
    engine_num_gpus: float = Field(0, description="GPUs that Ray reserves for an engine replica.", ge=0)
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
    max_migrations: int = Field(
        3, description="How often a request moves to another engine replica when its own fails.", ge=0
    )
    migration_timeout_s: float = Field(
        60, description="How long a stream waits for the first token of the next replica before it fails.", gt=0
    )
    max_unread_tokens: int = Field(
        2048, description="Tokens that may wait for a client that reads too slowly; its request then ends.", ge=1
    )
    max_body_bytes: int = Field(4 * 1024 * 1024, description="Largest request body; a larger one is a 413.", ge=1024)

    @property
    def model_id(self) -> str:
        return self.served_model_name or self.model

    @property
    def engine_capacity(self) -> int:
        """Requests that one engine holds, running and waiting; it refuses more by itself, with a reason."""
        return self.engine.max_num_seqs + self.engine.max_queued_requests

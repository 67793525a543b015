"""Defines the settings of admission: how many requests and tokens a deployment and its tenants may have.
Never lets a request in: `serve_app.admission.gate` does."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from serve_app.settings.limits import MIN_PRIORITY


class AdmissionSettings(BaseModel):
    """How many requests are let in, and how many wait in the ingress; serve_app.admission.gate has the rules. With
    several ingress replicas, each enforces its share of every limit, rounded up."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    max_concurrent_requests: int | None = Field(
        default=None,
        description="Most requests at a time, running and waiting; one more gets a 503. Unset: max_num_seqs + "
        "max_queued_requests for each engine, or for each rank with expert_parallel_size.",
        ge=1,
    )
    max_queued_tokens: int | None = Field(
        default=None,
        description="Most prompt tokens of requests that have not begun; a request that would exceed them gets a 503, "
        "unless it is the only one. Unset: no limit.",
        ge=1,
    )
    tenant_max_concurrent_requests: int | None = Field(
        default=None,
        description="Most requests of one tenant at a time, running and waiting; one more gets a 429. Unset: no limit.",
        ge=1,
    )
    tenant_max_queued_tokens: int | None = Field(
        default=None,
        description="Most prompt tokens of one tenant's requests that have not begun; a request that would exceed them "
        "gets a 429, unless it is the only one. Unset: no limit.",
        ge=1,
    )
    tenant_min_priority: int | None = Field(
        default=None,
        description="Lowest `priority` that a request may have; lower numbers go first, before all tenants' turns, and "
        "get a 400. An API key's min_priority replaces it. Unset: any.",
        ge=MIN_PRIORITY,
        le=0,
    )
    dispatch_backlog: int = Field(
        default=16,
        description="Requests beyond max_num_seqs that are sent ahead to each engine, so that a free seat need not "
        "wait for the ingress. All others wait in the ingress. At most max_queued_requests.",
        ge=0,
    )

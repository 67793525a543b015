"""Owns the settings of the store of responses: how much of what /v1/responses answered is kept, and for how long.
Never keeps anything; `serve_app.store` does."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class ResponsesStoreSettings(BaseModel):
    """Answers of `/v1/responses` that later requests may refer to, kept in memory and nowhere else. Requests with
    `store: false` leave nothing there."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    max_mib: float = Field(
        default=64,
        description="Most memory that kept responses take, in MiB, with their inputs. The least recently used leave "
        "first, of the tenant that keeps the most. With `ingress_replicas` above 1, one process keeps them for all. "
        "0: nothing is kept.",
        ge=0,
        allow_inf_nan=False,
    )
    max_age_s: float = Field(
        default=3600,
        description="How long a response is kept after it was made or last referred to, in seconds.",
        gt=0,
        allow_inf_nan=False,
    )

    @property
    def max_bytes(self) -> int:
        return int(self.max_mib * 2**20)

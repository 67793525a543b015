"""Defines the settings of access: the digests of API keys and of the admin key.
Never checks a key: `serve_app.auth` does."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from serve_app.settings.limits import MIN_PRIORITY

_Sha256 = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


class ApiKey(BaseModel):
    """One API key, and the tenant to which it belongs."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, hide_input_in_errors=True)

    tenant: str = Field(
        description="The tenant that the key belongs to. All keys of a tenant share its limits.", min_length=1
    )
    sha256: _Sha256 = Field(description="SHA-256 of the key, in hexadecimal. The key itself is stored nowhere.")
    max_concurrent_requests: int | None = Field(
        default=None, description="Replaces admission.tenant_max_concurrent_requests for this tenant.", ge=1
    )
    max_queued_tokens: int | None = Field(
        None, description="Replaces admission.tenant_max_queued_tokens for this tenant.", ge=1
    )
    min_priority: int | None = Field(
        None,
        description="Replaces admission.tenant_min_priority for requests with this key.",
        ge=MIN_PRIORITY,
        le=0,
    )


class AuthSettings(BaseModel):
    """Who may use the server. `python -m serve_app.auth` makes keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, hide_input_in_errors=True)

    keys: tuple[ApiKey, ...] = Field(
        default=(),
        description="API keys. With none here or in keys_file, everybody may use the server, as one tenant.",
    )
    keys_file: str | None = Field(
        default=None,
        description="File with further API keys, a YAML or JSON list. Every ingress replica reads it on its own "
        "machine when it starts. A file without keys is refused if `keys` has none either.",
    )
    admin_sha256: _Sha256 | None = Field(
        default=None, description="SHA-256 of the admin key, in hexadecimal. Unset: the admin routes are closed."
    )

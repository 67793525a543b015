"""Defines the settings of CORS: which web pages may use the API from a browser.
Never answers a preflight: `serve_app.api.http.cors` does."""

from __future__ import annotations

import re

from pydantic import BaseModel, ConfigDict, Field, field_validator

LOOPBACK = r"https?://(localhost|127\.0\.0\.1|\[::1\])(:[0-9]{1,5})?"
"""Origins of pages that a program of the browser's own machine serves."""


class CorsSettings(BaseModel):
    """Which pages may use the API. The fields are named as in Starlette's CORSMiddleware."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    allow_origins: tuple[str, ...] | None = Field(
        default=None,
        description="Origins of web pages that may use the API, such as `https://chat.example.com`; `*` allows all. "
        "Unset: all if API keys are required, otherwise only pages of the browser's own machine (`localhost`). Empty: "
        "none.",
    )
    allow_origin_regex: str | None = Field(
        default=None, description="Regular expression for further origins. It must match the whole origin."
    )
    max_age: int = Field(default=600, description="How long a browser may remember a preflight, in seconds.", ge=0)

    @field_validator("allow_origin_regex")
    @classmethod
    def _is_one(cls, text: str | None) -> str | None:
        try:
            re.compile(text or "")
        except re.error as error:
            raise ValueError(f"it is not a regular expression: {error}") from error
        return text


def allowed_origins(settings: CorsSettings, *, needs_keys: bool) -> tuple[tuple[str, ...], str | None]:
    """Origins, and an expression for further ones. `needs_keys`: a page gets nothing without one."""
    origins, regex = settings.allow_origins, settings.allow_origin_regex
    if origins is not None:
        return origins, regex
    return ("*",) if needs_keys else (), LOOPBACK if regex is None else f"{LOOPBACK}|{regex}"

"""Owns the settings of CORS: which web pages may use the API from a browser.
Never answers one; `serve_app.api.http.cors` does."""

from __future__ import annotations

import re

from pydantic import BaseModel, ConfigDict, Field, field_validator


class CorsSettings(BaseModel):
    """Which pages may use the API, as Starlette's CORSMiddleware names it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    allow_origins: tuple[str, ...] | None = Field(
        default=None,
        description="Origins of pages that may, such as `https://chat.example.com`; `*` is all of them. Unset: all "
        "where API keys are needed, else pages of the browser's own machine (`localhost`). Empty: none.",
    )
    allow_origin_regex: str | None = Field(
        default=None, description="A regular expression of further origins, which must match as a whole."
    )
    max_age: int = Field(default=600, description="Seconds for which a browser may remember a preflight.", ge=0)

    @field_validator("allow_origin_regex")
    @classmethod
    def _is_one(cls, text: str | None) -> str | None:
        try:
            re.compile(text or "")
        except re.error as error:
            raise ValueError(f"it is no regular expression: {error}") from error
        return text

"""Defines the settings of images: how many, how large, and from where.
Never reads an image."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class ImageSettings(BaseModel):
    """The limits of images in requests, for a model that takes images; other models take none."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    max_per_request: int = Field(default=8, description="Most images in one request.", ge=1)
    max_tokens: int = Field(
        default=1280,
        description="Most prompt tokens of one image. A larger image is scaled down, as is one that exceeds what the "
        "model or the engine can take.",
        ge=4,
    )
    max_bytes: int = Field(
        default=8 * 1024 * 1024,
        description="Largest image file, in bytes. In a data URL, its base64 text also counts towards max_body_bytes.",
        ge=1024,
    )
    max_pixels: int = Field(
        default=24_000_000,
        description="Most pixels of an image as it was sent. A larger one is refused before it is decoded.",
        ge=1,
    )
    allowed_hosts: tuple[str, ...] = Field(
        default=(),
        description="Hosts from which images may be fetched by HTTP and HTTPS, as `host` or `host:port`. If a host has "
        "a private address, that address must be listed, too. Empty: images must come as data URLs.",
    )
    fetch_timeout_s: float = Field(default=5, description="How long fetching one image may take, in seconds.", gt=0)

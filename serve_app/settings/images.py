"""Owns the settings of images: how many, how large, and from where.
Never reads one."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class ImageSettings(BaseModel):
    """What is taken of requests to a model that takes images; other models take none."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    max_per_request: int = Field(default=8, description="Most images in one request.", ge=1)
    max_tokens: int = Field(
        default=1280,
        description="Most prompt tokens of one image; a larger one is scaled down, as one that has more than the model "
        "or the engine takes.",
        ge=4,
    )
    max_bytes: int = Field(
        default=8 * 1024 * 1024,
        description="Largest file of an image. In a data URL it also counts, in base64, towards max_body_bytes.",
        ge=1024,
    )
    max_pixels: int = Field(
        default=24_000_000,
        description="Most pixels of an image as it is sent; more are refused before they are decoded.",
        ge=1,
    )
    allowed_hosts: tuple[str, ...] = Field(
        default=(),
        description="Hosts whose images may be fetched by http and https, as `host` or `host:port`. One that has a "
        "private address needs that address listed, too. Empty: images come as data URLs.",
    )
    fetch_timeout_s: float = Field(default=5, description="How long fetching one image may take.", gt=0)

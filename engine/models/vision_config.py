"""Owns the description of an image encoder: its shapes, how pixels are prepared, and where its outputs go.
Never computes, and never reads a file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engine.multimodal_inputs import InputKind


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionConfig:
    """A transformer over patches. Its outputs replace the embeddings of an image's tokens in the prompt."""

    depth: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    channels: int
    patch_size: int
    """Pixels along a side of a patch."""
    temporal_patch_size: int
    """Frames in a patch; an image is repeated that many times."""
    merge_size: int
    """Patches along each side of the square that becomes one token."""
    window_size: int
    """Pixels along a side of the square within which patches see each other, except in the layers of
    `full_attention`."""
    full_attention: tuple[int, ...]
    """Layers in which every patch of an image sees every other."""
    output_size: int
    rope_theta: float
    token_id: int
    """The id of the prompt tokens that an image replaces."""
    position_sections: tuple[int, int, int]
    """How many pairs of the decoder's heads are rotated by a token's frame, row and column (M-RoPE, arXiv
    2409.12191)."""

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    @property
    def side(self) -> int:
        """Pixels along a side of the square that becomes one token."""
        return self.patch_size * self.merge_size

    @property
    def patch_values(self) -> int:
        return self.channels * self.temporal_patch_size * self.patch_size**2


@dataclass(frozen=True, slots=True, kw_only=True)
class PixelConfig:
    """How a checkpoint wants images prepared; see engine.models.config.image_processor."""

    mean: tuple[float, ...] = (0.48145466, 0.4578275, 0.40821073)
    std: tuple[float, ...] = (0.26862954, 0.26130258, 0.27577711)
    scale: float = 1 / 255
    min_pixels: int = 56 * 56
    max_pixels: int = 28 * 28 * 1280


def read_pixels(raw: Mapping[str, Any], vision: VisionConfig) -> PixelConfig:
    """Read a parsed description. Missing fields get the values of the published checkpoints.

    Raises:
        ValueError: it asks for patches other than the encoder's, or for another way to prepare images.
    """
    expected = {"patch_size": vision.patch_size, "temporal_patch_size": vision.temporal_patch_size}
    expected |= {"merge_size": vision.merge_size, "resample": 3}
    expected |= dict.fromkeys(("do_resize", "do_rescale", "do_normalize", "do_convert_rgb"), True)
    for key, computed in expected.items():
        if raw.get(key) not in (None, computed):
            raise ValueError(f"{key} {raw[key]!r} is not supported; supported is {computed!r}.")
    size = raw.get("size") or {}
    found = PixelConfig()
    return PixelConfig(
        mean=tuple(map(float, raw.get("image_mean") or found.mean)),
        std=tuple(map(float, raw.get("image_std") or found.std)),
        scale=float(raw.get("rescale_factor") or found.scale),
        min_pixels=int(raw.get("min_pixels") or size.get("shortest_edge") or found.min_pixels),
        max_pixels=int(raw.get("max_pixels") or size.get("longest_edge") or found.max_pixels),
    )


def image_kind(vision: VisionConfig, pixels: PixelConfig, most_tokens: int) -> InputKind:
    """Return the kind of images that the engine accepts for this model. most_tokens: the engine's limit for one image.

    Raises:
        ValueError: the limit is below this model's smallest image.
    """
    area = vision.side**2
    if most_tokens * area < pixels.min_pixels:
        raise ValueError(f"an image has at least {pixels.min_pixels} pixels, and {area} make one token")
    return InputKind(
        name="image",
        token_id=vision.token_id,
        side=vision.side,
        min_pixels=pixels.min_pixels,
        max_pixels=min(pixels.max_pixels, most_tokens * area),
        chunkable=False,
    )

"""Owns what a model with an encoder needs in addition: the encoder's weights, and the limits on its inputs.
Never runs on a GPU, where such a model is refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from engine.build.model import ModelBuilder, Runner
from engine.build.resolve import torch_dtype
from engine.config import ConfigError, EngineConfig, ResolvedConfig
from engine.models.computed import Model
from engine.models.config import image_processor, pixels_of
from engine.models.contents import Contents
from engine.models.description import ModelConfig
from engine.models.encoding import EncodingModel
from engine.models.native_encoding import NativeEncodingModel
from engine.models.vision import VisionEncoder
from engine.models.vision_config import image_kind
from engine.models.vision_weights import allocate_vision, vision_table
from kernels.collectives.group import Group
from kernels.eager.ops import TABLES, TORCH_CPU, Ops


def encoder_builder(
    model_dir: Path,
    model: ModelConfig,
    config: EngineConfig,
    resolved: ResolvedConfig,
    native: Mapping[str, Any] | None,
    group: Group | None = None,
) -> ModelBuilder[Model]:
    """Return the builder of a decoder with its encoder. resolved: see with_inputs. native: how the native kernels
    record the decoder, beside which the encoder runs on torch's; None: both run on the kernels of `resolved`.
    group: the ranks that compute the decoder, each of which has the whole encoder; None: there is one.

    Raises:
        CheckpointError: the checkpoint's description of images cannot be read.
    """
    assert model.vision is not None
    ops = TORCH_CPU if native is not None else TABLES[resolved.kernels]
    weights = allocate_vision(model.vision, torch_dtype(resolved.dtype))
    contents = Contents(VisionEncoder(model.vision, pixels_of(model_dir, model.vision), weights, ops))
    return ModelBuilder(
        model_dir=model_dir,
        model=model,
        config=config,
        resolved=resolved,
        runner=_runner(contents, ops, resolved.block_size, native, group),
        others=vision_table(weights),
    )


def _runner(
    contents: Contents, ops: Ops, block_size: int, native: Mapping[str, Any] | None, group: Group | None
) -> Runner[Model]:
    if native is not None:
        return lambda decoder, cache, _: NativeEncodingModel(decoder, contents, cache, **native)
    return lambda decoder, cache, _: EncodingModel(decoder, contents, ops, cache, block_size, group=group)


def with_inputs(model_dir: Path, model: ModelConfig, config: EngineConfig, resolved: ResolvedConfig) -> ResolvedConfig:
    """Add the limits on images, and how many encoded image tokens are kept. resolved: the decoder's config alone.

    Raises:
        CheckpointError: the checkpoint's description of images cannot be read.
        ConfigError: the engine's limits leave no room for an image.
    """
    assert model.vision is not None
    pixels = pixels_of(model_dir, model.vision)
    token_bytes = model.vision.output_size * torch_dtype(resolved.dtype).itemsize
    kept = int(config.encoder_cache_memory_gib * 2**30) // token_bytes
    limits = {
        "max_num_batched_tokens and max_prefill_tokens (a step computes a whole image)": resolved.max_atomic_span,
        "encoder_cache_memory_gib (it must hold the encoded image)": kept,
        "max_model_len and num_kv_blocks (a request must hold the image)": resolved.max_request_tokens - 1,
    }
    why = min(limits, key=limits.__getitem__)
    try:
        kind = image_kind(model.vision, pixels, limits[why])
    except ValueError as error:
        raise ConfigError(f"Images are limited to {limits[why]} tokens by {why}: {error}.") from error
    trained = pixels.max_pixels // model.vision.side**2
    reason = f"{kind.max_tokens} tokens, limited by {why}" if kind.max_tokens < trained else "as the checkpoint says"
    reasons = resolved.reasons | {"largest image": f"{reason}; larger ones are scaled down"}
    if image_processor(model_dir)[0] is None:
        reasons["images"] = "prepared as for the published models: the checkpoint describes no image processor"
    return replace(resolved, inputs=(kind,), encoder_cache_tokens=kept, reasons=reasons)

"""Owns the reader of a checkpoint's config.json, by the family that it names, and of its image processor's.
Never guesses: an unsupported setting that would change answers is refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from engine.features import IMAGES, PACKED, find_conflict
from engine.models.description import ModelConfig as ModelConfig
from engine.models.family import ModelFamily
from engine.models.fields import expect
from engine.models.json_files import CheckpointError as CheckpointError
from engine.models.json_files import read_json as read_json
from engine.models.quantization import read_quantization
from engine.models.registry import BASE_MODELS, FAMILIES
from engine.models.tensor_files import is_base_model, lacks_head
from engine.models.values import integer, section, sequence
from engine.models.vision_config import PixelConfig, VisionConfig, read_pixels


def read_model_config(model_dir: Path) -> ModelConfig:
    """Read the decoder that `model_dir/config.json` describes. Whether it has an LM head, the tensors' names show.

    Raises:
        CheckpointError: a field is missing or of the wrong kind, or a feature is not supported. The message says what
            is supported. Or a file of weights is not readable.
    """
    path = model_dir / "config.json"
    raw = read_json(path)
    try:
        config = parse_model_config(raw)
    except ValueError as error:
        raise CheckpointError(f"{path}: {error}") from error
    has_base = not is_base_model([*FAMILIES[config.architecture].names])
    if has_base and not config.tie_word_embeddings and lacks_head(model_dir):
        # A head that nothing uses takes no memory where it is the embedding.
        return replace(config, tie_word_embeddings=True, headless=True)
    return config


def parse_model_config(raw: Mapping[str, Any]) -> ModelConfig:
    """Like `read_model_config`, from the parsed object. Raises ValueError without the file's name."""
    family, quantization = _family(raw), read_quantization(raw)
    dense_positions = _of_all_families(raw)
    config = replace(
        family.describe(raw),
        architecture=family.architecture,
        quantization=quantization,
        dense_positions=dense_positions,
    )
    if config.vision is not None and quantization is not None:
        on = {
            PACKED: f"the checkpoint is quantized ({quantization.summary})",
            IMAGES: f"{config.architecture} takes images",
        }
        if conflict := find_conflict(on):
            raise ValueError(conflict.text(on))
    return config


def _of_all_families(raw: Mapping[str, Any]) -> int | None:
    """Refuse what transformers computes in any decoder and this one in none. Return ModelConfig.dense_positions."""
    lengths = []
    for fields in (raw, section(raw, "text_config")):
        expect(fields, "is_causal", True, None)
        if layers := fields.get("per_layer_config"):
            raise ValueError(f"per_layer_config {str(layers)[:80]} is not supported; supported is one for all layers.")
        if chunks := section(fields, "dual_chunk_attention_config"):
            original = integer(chunks, "original_max_position_embeddings")
            lengths.append(min(original, integer(chunks, "chunk_size", original)))  # what one chunk covers is the same
    return min(lengths, default=None)


def _family(raw: Mapping[str, Any]) -> ModelFamily:
    names = sequence(raw, "architectures")
    for name in names:
        if isinstance(name, str) and (family := FAMILIES.get(name) or BASE_MODELS.get(name)):
            return family
    found = ", ".join(map(str, names)) or "none"
    raise ValueError(f"architecture {found} is not supported; supported are {', '.join(FAMILIES)}.")


def pixels_of(model_dir: Path, vision: VisionConfig) -> PixelConfig:
    """Read the checkpoint's description of images; without one, images are prepared as for the published checkpoints.

    Raises:
        CheckpointError: it asks for what the encoder does not do.
    """
    path, fields = image_processor(model_dir)
    try:
        return read_pixels(fields, vision)
    except ValueError as error:
        raise CheckpointError(f"{path}: {error}") from error


def image_processor(model_dir: Path) -> tuple[Path | None, Mapping[str, Any]]:
    """Return the file that describes how images are prepared, and its fields. None: there is none.

    transformers 5 writes them into processor_config.json, and prefers these. Before, that file had no such object.

    Raises:
        CheckpointError: a file is no JSON object, or the description in it is none.
    """
    whole, own = model_dir / "processor_config.json", model_dir / "preprocessor_config.json"
    if whole.exists() and (nested := read_json(whole).get("image_processor")) is not None:
        if not isinstance(nested, dict):
            raise CheckpointError(f"{whole}: image_processor is {nested!r}: expected an object.")
        return whole, nested
    return (own, read_json(own)) if own.exists() else (None, {})

"""Owns the reader of a checkpoint's config.json, by the family that it names, and of preprocessor_config.json.
Never guesses: an unsupported setting that would change answers is refused by name."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from engine.checkpoints.model_cache import ModelError
from engine.features import IMAGES, PACKED, find_conflict
from engine.models.description import ModelConfig as ModelConfig
from engine.models.family import ModelFamily
from engine.models.fields import expect
from engine.models.quantization import read_quantization
from engine.models.registry import FAMILIES
from engine.models.values import section, sequence
from engine.models.vision_config import PixelConfig, VisionConfig, read_pixels

PROCESSOR_FILE = "preprocessor_config.json"


class CheckpointError(ModelError):
    """A checkpoint cannot be served as it is. The message names the file, what was found and what was expected."""


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file.

    Raises:
        CheckpointError: the file is missing, is not JSON, or is not an object.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing: expected a Hugging Face model directory.") from None
    except ValueError as error:
        raise CheckpointError(f"{path} is not JSON: {error}.") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds a {type(value).__name__}: expected an object.")
    return value


def read_model_config(model_dir: Path) -> ModelConfig:
    """Read the decoder that `model_dir/config.json` describes.

    Raises:
        CheckpointError: a field is missing or of the wrong kind, or a feature is not supported. The message says what
            is supported.
    """
    path = model_dir / "config.json"
    raw = read_json(path)
    try:
        return parse_model_config(raw)
    except ValueError as error:
        raise CheckpointError(f"{path}: {error}") from error


def parse_model_config(raw: Mapping[str, Any]) -> ModelConfig:
    """Like `read_model_config`, from the parsed object. Raises ValueError without the file's name."""
    family, quantization = _family(raw), read_quantization(raw)
    for fields in (raw, section(raw, "text_config")):
        expect(fields, "is_causal", True, None)  # transformers computes any of its decoders without the mask, too
    config = replace(family.describe(raw), architecture=family.architecture, quantization=quantization)
    if config.vision is not None and quantization is not None:
        on = {
            PACKED: f"the checkpoint is quantized ({quantization.summary})",
            IMAGES: f"{config.architecture} takes images",
        }
        if conflict := find_conflict(on):
            raise ValueError(conflict.text(on))
    return config


def _family(raw: Mapping[str, Any]) -> ModelFamily:
    names = sequence(raw, "architectures")
    for name in names:
        if isinstance(name, str) and name in FAMILIES:
            return FAMILIES[name]
    found = ", ".join(map(str, names)) or "none"
    raise ValueError(f"architecture {found} is not supported; supported are {', '.join(FAMILIES)}.")


def pixels_of(model_dir: Path, vision: VisionConfig) -> PixelConfig:
    """Read the checkpoint's description of images; its file may be missing.

    Raises:
        CheckpointError: it asks for what the encoder does not do.
    """
    path = model_dir / PROCESSOR_FILE
    try:
        return read_pixels(read_json(path) if path.exists() else {}, vision)
    except ValueError as error:
        raise CheckpointError(f"{path}: {error}") from error

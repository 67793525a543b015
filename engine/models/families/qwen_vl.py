"""Owns Qwen2.5-VL (arXiv 2502.13923): Qwen2's decoder with a frame, row and column per token, and an encoder.
Never computes: `engine.models.decoder` and `engine.models.vision` do."""

from __future__ import annotations

from dataclasses import replace

from engine.models.description import ModelConfig
from engine.models.families.qwen import QWEN2
from engine.models.family import LLAMA_NAMES, ModelFamily
from engine.models.fields import expect
from engine.models.values import Fields, integer, number, section, sequence
from engine.models.vision_config import VisionConfig


def _qwen2_5_vl(raw: Fields) -> ModelConfig:
    """Read the decoder and its encoder. Published checkpoints have the decoder's fields at the top level; transformers
    5 writes them under `text_config`."""
    nested = section(raw, "text_config")
    text = {key: value for key, value in raw.items() if key not in ("text_config", "vision_config")} | dict(nested)
    text["tie_word_embeddings"] = bool(raw.get("tie_word_embeddings") or nested.get("tie_word_embeddings"))
    key = "rope_scaling" if text.get("rope_scaling") else "rope_parameters"
    rope = dict(section(text, key))
    given = {"mrope_section": rope.pop("mrope_section", (16, 24, 24))}
    sections = [integer({"mrope_section": size}, "mrope_section") for size in sequence(given, "mrope_section")]
    for name in ("type", "rope_type"):
        if rope.get(name) == "mrope":
            rope[name] = "default"
    config = QWEN2.describe({"rope_theta": 1e6} | text | {key: rope})
    if len(sections) != 3 or sum(sections) != config.head_dim // 2:
        raise ValueError(f"mrope_section is {sections}: expected three numbers that sum up to {config.head_dim // 2}.")
    frame, row, column = sections
    return replace(config, vision=_vision(raw, (frame, row, column), config.hidden_size))


def _vision(raw: Fields, sections: tuple[int, int, int], hidden_size: int) -> VisionConfig:
    found = section(raw, "vision_config")
    expect(found, "hidden_act", "silu")
    rope = section(found, "rope_parameters")
    expect(rope, "rope_type", "axial", "default")
    channels = integer(found, "in_channels", integer(found, "in_chans", 3))
    expect({"in_channels": channels}, "in_channels", 3)
    config = VisionConfig(
        depth=integer(found, "depth", 32),
        hidden_size=integer(found, "hidden_size", 3584),
        intermediate_size=integer(found, "intermediate_size", 3420),
        num_heads=integer(found, "num_heads", 16),
        channels=channels,
        patch_size=integer(found, "patch_size", integer(found, "spatial_patch_size", 14)),
        temporal_patch_size=integer(found, "temporal_patch_size", 2),
        merge_size=integer(found, "spatial_merge_size", 2),
        window_size=integer(found, "window_size", 112),
        full_attention=tuple(sequence({"fullatt_block_indexes": (7, 15, 23, 31), **found}, "fullatt_block_indexes")),
        output_size=integer(found, "out_hidden_size", 3584),
        rope_theta=number(rope, "rope_theta", 10000.0),
        token_id=integer(raw, "image_token_id", 151655),
        position_sections=sections,
    )
    if config.hidden_size % config.num_heads or config.head_dim % 4 or config.window_size % config.side:
        raise ValueError(
            f"vision_config has {config.num_heads} heads of hidden_size {config.hidden_size}, and windows of "
            f"{config.window_size} for tokens of {config.side} pixels: they do not fit together."
        )
    expect({"out_hidden_size": config.output_size}, "out_hidden_size", hidden_size)
    return config


_WITHIN_MODEL = {"model.language_model.": "model.", "model.visual.": "visual."}
"""As transformers names its own modules since 4.52. It stores the published names, but other programs do not."""

QWEN2_5_VL = ModelFamily("Qwen2_5_VLForConditionalGeneration", _qwen2_5_vl, LLAMA_NAMES, nested=_WITHIN_MODEL)

"""Owns a tiny random checkpoint that takes images, made with transformers, and prompts for it.
Never downloads anything; windows are cut at the images' edges, and the decoder's heads in three unlike parts."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers
import torch
from PIL import Image
from tokenizers import decoders, models, pre_tokenizers
from torch import Tensor
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from engine.multimodal_inputs import SpanInput

TEXT_VOCAB = 256
"""Ids of text are below this: a byte each."""
SPECIALS = ("<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|image_pad|>", "<|vision_end|>")
IM_START, IM_END, VISION_START, IMAGE, VISION_END = range(TEXT_VOCAB, TEXT_VOCAB + len(SPECIALS))
VOCAB = TEXT_VOCAB + len(SPECIALS) + 2
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{% if message.content is string %}"
    "{{ message.content }}{% else %}{% for part in message.content %}{% if part.type == 'image' %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""The chat template of Qwen2.5-VL for texts and images."""
TEXT: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 96,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]},
    "bos_token_id": None,
    "eos_token_id": IM_END,
}
VISION: dict[str, Any] = {
    "depth": 3,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_heads": 2,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "window_size": 16,
    "out_hidden_size": 96,
    "fullatt_block_indexes": [1],
    "initializer_range": 0.2,
}
PIXELS = {"patch_size": 4, "temporal_patch_size": 2, "merge_size": 2, "min_pixels": 256, "max_pixels": 4096}
"""Image sizes of 4 to 64 tokens."""
SIDE = 8


def make_vision_model() -> Qwen2_5_VLForConditionalGeneration:
    """Make a float32 model with random weights, norms and biases included, the same at every call."""
    torch.manual_seed(7)
    config = Qwen2_5_VLConfig(
        text_config=TEXT,
        vision_config=VISION,
        image_token_id=IMAGE,
        video_token_id=VOCAB - 1,
        vision_start_token_id=VISION_START,
        vision_end_token_id=VISION_END,
    )
    model = Qwen2_5_VLForConditionalGeneration(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1 and not name.endswith("bias"):
                parameter.copy_(torch.rand_like(parameter) + 0.5)
            elif name.endswith("bias"):
                parameter.copy_(torch.randn_like(parameter) * (0.2 if "visual" in name else 1))
    return model.eval()


def save_vision_model(directory: Path) -> Qwen2_5_VLForConditionalGeneration:
    """Write the checkpoint as transformers does, with its processor and chat template, and return the model."""
    model = make_vision_model()
    model.save_pretrained(directory)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = tokenizers.Tokenizer(models.BPE(vocab={piece: number for number, piece in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(list(SPECIALS))
    core.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"eos_token": SPECIALS[1], "chat_template": TEMPLATE}))
    (directory / "preprocessor_config.json").write_text(json.dumps(PIXELS))
    return model


@dataclass(frozen=True)
class Shown:
    """A prompt with images, for transformers and for the engine."""

    token_ids: list[int]
    inputs: tuple[SpanInput, ...]
    pixel_values: Tensor
    grids: Tensor

    def for_transformers(self) -> dict[str, Tensor]:
        ids = torch.tensor([self.token_ids])
        return {
            "input_ids": ids,
            "attention_mask": torch.ones_like(ids),
            "mm_token_type_ids": (ids == IMAGE).int(),
            "pixel_values": self.pixel_values,
            "image_grid_thw": self.grids,
        }


def show(*parts: list[int] | Image.Image) -> Shown:
    """Make a prompt of texts and images in this order, each image between its marks."""
    processor = Qwen2VLImageProcessorPil(
        patch_size=4, merge_size=2, size={"shortest_edge": PIXELS["min_pixels"], "longest_edge": PIXELS["max_pixels"]}
    )
    tokens: list[int] = []
    inputs, pixels, grids = [], [], []
    for part in parts:
        if isinstance(part, list):
            tokens += part
            continue
        found = processor(part, return_tensors="pt")
        _, height, width = found["image_grid_thw"][0].tolist()
        grid = (1, height // 2, width // 2)
        resized = part.resize((width * 4, height * 4), Image.Resampling.BICUBIC)
        tokens.append(VISION_START)
        inputs.append(SpanInput.of("image", len(tokens), grid, resized.tobytes()))
        tokens += [IMAGE] * inputs[-1].num_tokens + [VISION_END]
        pixels.append(found["pixel_values"])
        grids.append(found["image_grid_thw"])
    return Shown(tokens, tuple(inputs), torch.cat(pixels), torch.cat(grids))

"""Owns the prompts with images that the golden gate scores, and their logits, by transformers and by this engine.
Never schedules: a prompt is cut where the test says, even inside of an image."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import Qwen2_5_VLForConditionalGeneration

from engine.execution.executor import TorchExecutor
from engine.multimodal_inputs import EncodeJob, overlapping, place_inputs, shift_at
from engine.step import RowInputs, RowKind, ScheduledRequest, StepPlan
from tests.support.image_files import make_image
from tests.support.plans import greedy
from tests.support.tiny_vision import TEXT_VOCAB, Shown, show

VISION = "qwen2_5_vl"


def vision_prompts() -> list[Shown]:
    """Return prompts whose images fill their windows or do not;
    at the start, the same image twice, and after 100 tokens."""
    return [
        show(_text(1, 9), make_image(1, 70, 50), _text(2, 21)),
        show(make_image(2, 16, 16), _text(3, 5), make_image(3, 100, 20), make_image(2, 16, 16), _text(4, 3)),
        show(_text(5, 100), make_image(4, 64, 64), _text(6, 2)),
        show(_text(7, 2), make_image(5, 8, 40), _text(8, 1)),
    ]


def scored_prompts() -> list[Shown]:
    """Return more of them: near ties in bfloat16 are rare, and a few must not decide."""
    sizes = [(64, 64), (16, 120), (100, 33), (48, 48)]
    return vision_prompts() + [
        show(_text(100 + n, 20 + 9 * n), make_image(100 + n, *sizes[n % 4]), _text(200 + n, 60)) for n in range(16)
    ]


def _text(seed: int, length: int) -> list[int]:
    return torch.randint(3, TEXT_VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def logits_of_transformers(model: Qwen2_5_VLForConditionalGeneration, prompts: Sequence[Shown]) -> list[Tensor]:
    with torch.inference_mode():
        return [model(**prompt.for_transformers()).logits[0].float() for prompt in prompts]


def forced_logits(executor: TorchExecutor, prompt: Shown, chunk_size: int | None) -> Tensor:
    """Return the logits at each position, fed in chunks. # [len(token_ids), vocab] float32"""
    tokens, placed = prompt.token_ids, place_inputs(prompt.inputs)
    encodes = tuple(EncodeJob(one.digest, one.grid, one.data) for one in prompt.inputs)
    size = chunk_size or len(tokens)
    blocks = tuple(range(-(-len(tokens) // 16)))
    parts = []
    for start in range(0, len(tokens), size):
        end = min(start + size, len(tokens))
        last = end == len(tokens)
        row = ScheduledRequest(
            "a",
            RowKind.LAST if last else RowKind.MIDDLE,
            start,
            tuple(tokens[start:end]),
            blocks,
            greedy() if last else None,
            inputs=RowInputs(overlapping(placed, start, end), shift_at(placed, start)),
        )
        parts.append(executor.logits(StepPlan(start, (row,), encodes=() if start else encodes)).float())
    return torch.cat(parts)

"""Owns the table of supported lines, by the architecture that a checkpoint's config.json names.
Never describes one: each line has a file of its own."""

from __future__ import annotations

from engine.models.line import Line
from engine.models.lines.gemma3 import GEMMA3
from engine.models.lines.hybrid import QWEN3_5, QWEN3_5_MOE, QWEN3_5_MOE_VL, QWEN3_5_VL, QWEN3_NEXT
from engine.models.lines.llama import LLAMA
from engine.models.lines.mistral import MISTRAL
from engine.models.lines.moe import MIXTRAL, QWEN3_MOE
from engine.models.lines.phi3 import PHI3
from engine.models.lines.qwen import QWEN2, QWEN3
from engine.models.lines.qwen_vl import QWEN2_5_VL
from engine.models.lines.smollm3 import SMOLLM3

_DENSE = (LLAMA, QWEN2, QWEN3, MISTRAL, GEMMA3, SMOLLM3, PHI3)
_WITH_EXPERTS = (QWEN3_MOE, MIXTRAL)
_HYBRID = (QWEN3_NEXT, QWEN3_5, QWEN3_5_MOE, QWEN3_5_VL, QWEN3_5_MOE_VL)

LINES: dict[str, Line] = {line.architecture: line for line in (*_DENSE, *_WITH_EXPERTS, *_HYBRID, QWEN2_5_VL)}

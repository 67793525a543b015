"""Owns the adapters of the golden gate, and the tiny model that they are for.
Never writes them: tests do, each into a directory of its own."""

from __future__ import annotations

from typing import Any

from tests.support.tiny_adapters import ATTENTION, MLP

KIND = "llama"
# On all projections; with another rank and scale; on one part of two stacks; of the lowest rank.
ADAPTERS: tuple[dict[str, Any], ...] = (
    {"seed": 1},
    {"seed": 2, "modules": ATTENTION, "rank": 7, "use_rslora": True},
    {"seed": 3, "modules": ("v_proj", "up_proj"), "lora_alpha": 3},
    {"seed": 4, "modules": MLP, "rank": 1},
)

"""Owns the recording of the gate's floors: how far transformers is from itself. `python -m tests.golden.record`
Never measures our own model: a tolerance that follows the thing it judges is none."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import transformers
from transformers import AutoModelForCausalLM

from engine.config import DEFAULT_MODEL
from engine.prepare import prepare_model
from kernels.reference import round_weight
from tests.golden.models import FAMILIES, family_sequences, tokenized_prompts
from tests.golden.scoring import FLOORS_FILE, Score, compare, transformers_logits
from tests.support.tiny_models import save_model

# Room for another order of operations (fused projections, chunked softmax) than the one that set the floor.
MULTIPLES = {"float32": 4.0, "bfloat16": 1.25}
# Two runs may agree exactly on the argmax everywhere, or to the last bit: a floor of 0 would forbid rounding itself.
LEAST = {"float32": 1e-6, "bfloat16": 1e-3}


def floors(directory: Path, sequences: list[list[int]]) -> dict[str, dict[str, object]]:
    """float32: eager attention against SDPA. bfloat16: against float32."""

    def logits(dtype: torch.dtype, attention: str) -> list[torch.Tensor]:
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype, attn_implementation=attention)
        return transformers_logits(model, sequences)

    reference = logits(torch.float32, "sdpa")
    return {
        "float32": entry(compare(logits(torch.float32, "eager"), reference, sequences), "float32"),
        "bfloat16": entry(compare(logits(torch.bfloat16, "sdpa"), reference, sequences), "bfloat16"),
    }


def int8_floor(directory: Path, sequences: list[list[int]]) -> dict[str, object]:
    """bfloat16 with every matrix but the embedding rounded, against float32 as it is."""
    reference = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    want = transformers_logits(reference, sequences)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16)
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.clone())  # tied: the embedding stays as it is
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            module.weight.data = round_weight(module.weight.data).to(torch.bfloat16)
    return entry(compare(transformers_logits(model, sequences), want, sequences), "bfloat16")


def entry(score: Score, dtype: str) -> dict[str, object]:
    floor = {key: round(max(value, LEAST[dtype]), 9) for key, value in asdict(score).items() if key != "delta_max"}
    return {"floor": floor, "multiple": MULTIPLES[dtype], "delta_max_seen": score.delta_max}


def main() -> None:
    recorded: dict[str, object] = {
        "_": "Nats. float32 floor: transformers eager vs SDPA; bfloat16 floor: transformers bfloat16 vs float32; "
        "int8 floor: the same with rounded weights. "
        "Written by python -m tests.golden.record",
        "_transformers": transformers.__version__,
        "_torch": torch.__version__,
    }
    for dtype, value in floors(prepare_model(DEFAULT_MODEL), tokenized_prompts()).items():
        recorded[f"default_model.{dtype}"] = value
    recorded["default_model.int8"] = int8_floor(prepare_model(DEFAULT_MODEL), tokenized_prompts())
    for kind in FAMILIES:
        with TemporaryDirectory() as directory:
            save_model(kind, Path(directory))
            for dtype, value in floors(Path(directory), family_sequences()).items():
                recorded[f"{kind}.{dtype}"] = value
    FLOORS_FILE.write_text(json.dumps(recorded, indent=2) + "\n")


if __name__ == "__main__":
    main()

"""Owns the recording of the gate's floors: how far transformers is from itself. `python -m tests.golden.record [KIND]`
Never measures our own model: a tolerance that follows what it judges proves nothing."""

from __future__ import annotations

import argparse
import functools
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel, Qwen2_5_VLForConditionalGeneration

from engine.checkpoints.prepare import prepare_model
from engine.config import DEFAULT_MODEL
from kernels.reference import round_blocks, round_token, round_weight
from tests.golden.adapters import ADAPTERS, KIND
from tests.golden.models import FAMILIES, family_sequences, tokenized_prompts
from tests.golden.scoring import FLOORS_FILE, Score, compare, transformers_logits
from tests.golden.vision import VISION, logits_of_transformers, scored_prompts
from tests.support.packed_models import from_fp8_blocks, to_fp8_blocks
from tests.support.tiny_adapters import beside, merged, save_adapter
from tests.support.tiny_models import HYBRIDS, save_model
from tests.support.tiny_vision import save_vision_model

# Allows for another order of operations (fused projections, chunked softmax) than the one that set the floor.
MULTIPLES = {"float32": 4.0, "bfloat16": 1.25}
# Two runs may agree exactly on the argmax everywhere, or to the last bit, and a floor of 0 would forbid rounding
# itself.
LEAST = {"float32": 1e-6, "bfloat16": 1e-3}
# What rounding to bfloat16 does is a matter of chance near ties: one order of sums has twice the regret of another.
ATTENTION = ("sdpa", "eager")


NARROW_CACHES, ROUNDED_ACTIVATIONS = "narrow_caches", "rounded_activations"


def floors(directory: Path, sequences: list[list[int]], *, hybrid: bool = False) -> dict[str, dict[str, object]]:
    """Measure how far transformers is from itself. float32: eager attention against SDPA. For a hybrid this also
    compares token by token with whole sequences: attention is only a part of its layers, and the others sum in another
    order then. bfloat16: both kinds of attention against float32."""

    def logits(dtype: torch.dtype, attention: str, score: Callable[..., list[torch.Tensor]]) -> list[torch.Tensor]:
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype, attn_implementation=attention)
        return score(model, sequences)

    reference = logits(torch.float32, "sdpa", transformers_logits)
    other = logits(torch.float32, "eager", logits_by_token if hybrid else transformers_logits)
    rounded = [logits(torch.bfloat16, attention, transformers_logits) for attention in ATTENTION]
    return {
        "float32": entry(compare(other, reference, sequences), "float32"),
        "bfloat16": largest([compare(got, reference, sequences) for got in rounded]),
    }


def logits_by_token(model: PreTrainedModel, sequences: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    """Do as transformers_logits, but with each token in a step of its own, on the cache of those before."""
    found = []
    with torch.inference_mode():
        for tokens in sequences:
            kept, logits = None, []
            for token in tokens:
                out = model(torch.tensor([[token]]), past_key_values=kept, use_cache=True)
                kept = out.past_key_values
                logits.append(out.logits[0])
            found.append(torch.cat(logits).float())
    return found


def int8_floor(directory: Path, sequences: list[list[int]]) -> dict[str, object]:
    """Compare bfloat16 with every matrix but the embedding rounded with float32 as it is."""
    reference = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    want = transformers_logits(reference, sequences)
    scores = []
    for model in in_bfloat16(directory):
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.clone())  # tied: the embedding stays as it is
        for module in model.modules():
            if isinstance(module, torch.nn.Linear):
                module.weight.data = round_weight(module.weight.data).to(torch.bfloat16)
        scores.append(compare(transformers_logits(model, sequences), want, sequences))
    return largest(scores)


def of_rounded_activations() -> dict[str, object]:
    """Compare bfloat16 with the activations of every matrix rounded in blocks of 32 with float32 as it is."""
    directory, sequences = prepare_model(DEFAULT_MODEL), tokenized_prompts()
    reference = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    want = transformers_logits(reference, sequences)
    scores = []
    for model in in_bfloat16(directory):
        for module in model.modules():
            if isinstance(module, torch.nn.Linear):
                module.register_forward_pre_hook(lambda _, x: (round_blocks(x[0]).to(x[0].dtype),))
        scores.append(compare(transformers_logits(model, sequences), want, sequences))
    return {"default_model.rounded_activations": largest(scores)}


def in_bfloat16(directory: Path) -> Iterator[PreTrainedModel]:
    for attention in ATTENTION:
        yield AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16, attn_implementation=attention)


class RoundedCache(DynamicCache):
    """Keeps keys and values in fewer bits, also those of the token that is computed."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self._kept_in = dtype

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Both are [batch, kv_heads, tokens, head_dim]."""
        k, v = (round_token(x, self._kept_in).to(x.dtype) for x in (key_states, value_states))
        found: tuple[torch.Tensor, torch.Tensor] = super().update(k, v, layer_idx, *args, **kwargs)
        return found


def kv_floor(directory: Path, sequences: list[list[int]], dtype: torch.dtype) -> dict[str, object]:
    """Compare bfloat16 with rounded keys and values with float32 as it is."""
    reference = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    want = transformers_logits(reference, sequences)
    scores = []
    for model in in_bfloat16(directory):
        with torch.inference_mode():
            got = [
                model(torch.tensor([tokens]), past_key_values=RoundedCache(dtype), use_cache=True).logits[0].float()
                for tokens in sequences
            ]
        scores.append(compare(got, want, sequences))
    return largest(scores)


def entry(score: Score, dtype: str) -> dict[str, Any]:
    floor = {key: round(max(value, LEAST[dtype]), 9) for key, value in asdict(score).items() if key != "delta_max"}
    return {"floor": floor, "multiple": MULTIPLES[dtype], "delta_max_seen": score.delta_max}


def larger(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Take the larger value of each figure of two entries, the later of which is last. Each entry is a sample of what
    rounding and another order of sums do, and the gate must hold for all orders, those of other processors included."""
    figures = {key: max(value, other["floor"][key]) for key, value in one["floor"].items()}
    seen = max(one["delta_max_seen"], other["delta_max_seen"])
    return {"floor": figures, "multiple": other["multiple"], "delta_max_seen": seen}


def largest(scores: Sequence[Score]) -> dict[str, Any]:
    return functools.reduce(larger, [entry(score, "bfloat16") for score in scores])


def of_default_model() -> dict[str, object]:
    directory, sequences = prepare_model(DEFAULT_MODEL), tokenized_prompts()
    found = {f"default_model.{dtype}": value for dtype, value in floors(directory, sequences).items()}
    found["default_model.fp8"] = fp8_floor(directory, sequences)
    found |= {"default_model.int8": int8_floor(directory, sequences)}
    return found | of_rounded_activations() | of_narrow_caches()


def fp8_floor(directory: Path, sequences: list[list[int]]) -> dict[str, object]:
    """Compare bfloat16 with the layers' matrices rounded to blocks of fp8 with float32 as it is."""
    reference = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    want = transformers_logits(reference, sequences)
    scores = []
    for model in in_bfloat16(directory):
        for name, parameter in model.named_parameters():
            if name.endswith("_proj.weight"):
                parameter.data = from_fp8_blocks(*to_fp8_blocks(parameter.data)).to(torch.bfloat16)
        scores.append(compare(transformers_logits(model, sequences), want, sequences))
    return largest(scores)


def of_narrow_caches() -> dict[str, object]:
    directory, sequences = prepare_model(DEFAULT_MODEL), tokenized_prompts()
    kinds = {"int8": torch.int8, "fp8_e4m3": torch.float8_e4m3fn}
    return {f"default_model.kv_{name}": kv_floor(directory, sequences, dtype) for name, dtype in kinds.items()}


def of_family(kind: str) -> dict[str, object]:
    with TemporaryDirectory() as directory:
        save_model(kind, Path(directory))
        found = floors(Path(directory), family_sequences(), hybrid=kind in HYBRIDS)
        return {f"{kind}.{dtype}": value for dtype, value in found.items()}


def of_vision() -> dict[str, object]:
    """Measure the same for the family that takes images; its encoder is in the measured type, too."""
    prompts = scored_prompts()
    with TemporaryDirectory() as directory:
        save_vision_model(Path(directory))

        def logits(dtype: torch.dtype, attention: str) -> list[torch.Tensor]:
            model = Qwen2_5_VLForConditionalGeneration.from_pretrained(
                directory, dtype=dtype, attn_implementation=attention
            )
            return logits_of_transformers(model, prompts)

        sequences = [prompt.token_ids for prompt in prompts]
        reference = logits(torch.float32, "sdpa")
        exact = compare(logits(torch.float32, "eager"), reference, sequences)
        rounded = compare(logits(torch.bfloat16, "sdpa"), reference, sequences)
    return {f"{VISION}.float32": entry(exact, "float32"), f"{VISION}.bfloat16": entry(rounded, "bfloat16")}


def of_adapters() -> dict[str, object]:
    """float32: eager attention against SDPA, merged. bfloat16: adapters beside the weights, against merged float32."""
    sequences = family_sequences()
    with TemporaryDirectory() as directory:
        base = Path(directory) / "model"
        model = save_model(KIND, base)
        paths = [save_adapter(model, Path(directory) / str(i), **of) for i, of in enumerate(ADAPTERS)]

        def logits(make: Callable[..., PreTrainedModel], dtype: torch.dtype, attention: str) -> list[torch.Tensor]:
            loaded = AutoModelForCausalLM.from_pretrained(base, dtype=dtype, attn_implementation=attention)
            models = [loaded, *(make(loaded, path) for path in paths)]
            return [transformers_logits(models[i % len(models)], [of])[0] for i, of in enumerate(sequences)]

        reference = logits(merged, torch.float32, "sdpa")
        exact = compare(logits(merged, torch.float32, "eager"), reference, sequences)
        rounded = compare(logits(beside, torch.bfloat16, "sdpa"), reference, sequences)
    return {"adapters.float32": entry(exact, "float32"), "adapters.bfloat16": entry(rounded, "bfloat16")}


OTHERS = {
    VISION: of_vision,
    "adapters": of_adapters,
    NARROW_CACHES: of_narrow_caches,
    ROUNDED_ACTIVATIONS: of_rounded_activations,
}


def main() -> None:
    """Record everything, or only the kinds that are named, beside what is recorded already."""
    parser = argparse.ArgumentParser(
        description="Record how far the engine's log-probabilities lie from the reference."
    )
    parser.add_argument("kinds", nargs="*", choices=[*FAMILIES, *OTHERS, []])
    parser.add_argument("--another-processor", action="store_true", help="keep what is recorded where it is larger")
    options = parser.parse_args()
    kinds: list[str] = options.kinds
    before: dict[str, Any] = json.loads(FLOORS_FILE.read_text()) if FLOORS_FILE.exists() else {}
    versions = {"_transformers": transformers.__version__, "_torch": torch.__version__}
    if options.another_processor and any(before.get(name) != version for name, version in versions.items()):
        parser.error(f"What is recorded is of other versions than {versions}: record it anew.")
    recorded: dict[str, Any] = dict(before) if kinds else {}
    recorded |= {
        "_": "Nats. float32 floor: transformers eager vs SDPA, hybrids also token by token vs whole; "
        "bfloat16 floor: transformers bfloat16, eager and SDPA, vs float32; int8, fp8: the same with rounded weights; "
        "kv: with rounded keys and values; rounded_activations: those of every matrix in blocks of 32. Written by "
        "python -m tests.golden.record.",
        **versions,
    }
    recorded |= {} if kinds else of_default_model()
    for kind in kinds or (*FAMILIES, *OTHERS):
        recorded |= OTHERS[kind]() if kind in OTHERS else of_family(kind)
    if options.another_processor:
        recorded["_"] += " The largest of each on processors with and without AMX."
        for name in before.keys() & recorded.keys():
            if not name.startswith("_"):
                recorded[name] = larger(before[name], recorded[name])
    FLOORS_FILE.write_text(json.dumps(recorded, indent=2) + "\n")


if __name__ == "__main__":
    main()

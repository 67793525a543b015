"""Owns what `quantize: auto` means for a model on a CPU: whether its matrices stay in their checkpoint's bits, and why.
Never refuses: where bits cannot stay, weights have the type of `dtype`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from engine.checkpoints.gguf_form import why_not_stored
from engine.checkpoints.two_forms import is_in_bfloat16
from engine.config import EngineConfig
from engine.models.config import ModelConfig
from engine.models.stored_forms import form_of
from kernels.choice import NATIVE, Choice
from kernels.cpu.native.library import load_library


def settle_quantize(
    model_dir: Path, model: ModelConfig, config: EngineConfig, kernels: Choice
) -> tuple[EngineConfig, dict[str, str]]:
    """Return the config with `quantize` other than `auto`, and the reason by the setting's name if it was `auto`.
    model: of the checkpoint in `model_dir`. kernels: those that compute it."""
    if config.quantize != "auto":
        return config, {}
    if config.rounds_activations:  # other weights are as they would be
        return replace(config, quantize="stored"), {"quantize": "stored: activations are rounded for such weights"}
    why_not = _why_unpacked(model_dir, model, config, kernels)
    if why_not is not None:
        return replace(config, quantize="none"), {"quantize": f"none: {why_not}"}
    why = "the checkpoint has its matrices in 4 to 8 bits, with which the native kernels compute"
    return replace(config, quantize="stored"), {"quantize": f"stored: {why}"}


def _has_groups(model: ModelConfig) -> bool:
    """Whether the native kernels compute with any of the checkpoint's matrices in groups of 4 to 8 bits, or in FP8.
    Integers with a scale for each output are kept in any case."""
    packed = model.quantization
    forms = [] if packed is None else [(form_of(one), one.by_output) for _, one in packed.groups]
    return any(form is not None and (form.fp8 or not by_output) for form, by_output in forms)


def _why_unpacked(model_dir: Path, model: ModelConfig, config: EngineConfig, kernels: Choice) -> str | None:
    if kernels.name != NATIVE:
        return f"the kernels are {kernels.name}, and only the native ones compute with a checkpoint's own bits"
    # Asked of the library, not of the processor: where Linux or the compiler withholds the unit, vectors multiply.
    matrix_unit = load_library().matrix_unit() == 1
    if (why_not := why_not_stored(config, matrix_unit=matrix_unit)) is not None:
        return why_not
    if _has_groups(model):
        return None
    if is_in_bfloat16(model_dir):
        return "the GGUF file was prepared in bfloat16; where its own bits could not be prepared, a warning says why"
    packed = model.quantization
    return f"the weights are {'not packed' if packed is None else packed.summary}"

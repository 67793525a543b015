"""Owns the choice of the form in which a GGUF file is prepared: its matrices in the file's own blocks, or in bfloat16.
Never imports torch or knows a model's shape: an engine's start can read either form, and has the last word."""

from __future__ import annotations

from engine.config import EngineConfig

MATRIX_UNIT = "amx_bf16"


def gguf_form(config: EngineConfig, *, on_gpu: bool = False) -> dict[str, bool]:
    """Return the arguments of engine.checkpoints.prepare.prepare_model that say in which form engines with these
    settings want a GGUF file, and whether the other will do. on_gpu: whether they run on a GPU, where `quantize: auto`
    takes weights in the type of `dtype`."""
    if config.quantize != "auto":
        return {"stored": config.stored, "either": False}
    return {"stored": not on_gpu and why_not_stored(config) is None, "either": True}


def why_not_stored(config: EngineConfig) -> str | None:
    """Say why `quantize: auto` keeps no matrix in its checkpoint's bits on this machine's CPU, whatever the model.
    None: nothing speaks against it."""
    if config.kernels not in ("auto", "native"):
        return f"kernels is {config.kernels}, and only the native kernels compute with a checkpoint's own bits"
    if config.load_format == "dummy":
        return "load_format is dummy, and random numbers are drawn in the type of dtype"
    return _why_matrix_unit(config)


def _why_matrix_unit(config: EngineConfig) -> str | None:
    """The unit does not multiply float32, and activations in 8 bits do without it."""
    from kernels.cpu.processor import cpu_flags  # the serving path knows no kernels until it is asked

    if config.rounds_activations or config.dtype == "float32" or MATRIX_UNIT not in cpu_flags():
        return None
    return "this processor's matrix unit (AMX) multiplies weights in bfloat16 faster"

"""Owns the choice of the form in which a GGUF file is prepared: its matrices in the file's own blocks, or in bfloat16.
Never imports torch or knows a model's shape: an engine's start can read either form, and has the last word."""

from __future__ import annotations

from engine.config import EngineConfig

MATRIX_UNIT = "amx_bf16"


def gguf_form(config: EngineConfig, *, on_gpu: bool = False) -> dict[str, bool]:
    """Return the arguments of engine.checkpoints.prepare.prepare_model that say in which form engines with these
    settings want a GGUF file, and whether the other will do. on_gpu: whether theirs is a GPU, where `quantize: auto`
    takes weights in the type of `dtype`.

    Bfloat16 will not do where blocks must stay, but any engine can unpack blocks. With `batch_invariant` no other form
    will do: what one process can prepare and another cannot would decide about an answer's bits.
    """
    if config.quantize == "auto":
        stored = not on_gpu and why_not_stored(config, matrix_unit=_reports_matrix_unit()) is None
    else:
        stored = config.stored
    either = config.quantize != "stored" and not config.batch_invariant
    return {"stored": stored, "either": either}


def why_not_stored(config: EngineConfig, *, matrix_unit: bool) -> str | None:
    """Say why `quantize: auto` keeps no matrix in its checkpoint's bits on this machine's CPU, whatever the model.
    None: nothing speaks against it. matrix_unit: whether bfloat16 is multiplied by a matrix unit here."""
    if config.kernels not in ("auto", "native"):
        return f"kernels is {config.kernels}, and only the native kernels compute with a checkpoint's own bits"
    if config.load_format == "dummy":
        return "load_format is dummy, and random numbers are drawn in the type of dtype"
    # The unit does not multiply float32, and weights of activations in 8 bits are multiplied as bytes.
    if matrix_unit and not config.rounds_activations and config.dtype != "float32":
        return "this processor's matrix unit (AMX) multiplies weights in bfloat16 faster"
    return None


def _reports_matrix_unit() -> bool:
    """Whether the processor has the unit. Only the library knows whether it is granted, and this must not load it."""
    from kernels.cpu.processor import cpu_flags  # the serving path knows no kernels until it is asked

    return MATRIX_UNIT in cpu_flags()

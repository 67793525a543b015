"""Owns which packings the native kernels compute with as they are stored, and in which form of panels.
Never looks at a matrix: `kernels.cpu.native.grouped.fitting` does at its inputs."""

from __future__ import annotations

import torch

from engine.models.narrow import Narrow
from engine.models.packing import Gguf, Packing
from kernels.cpu.native.grouped import BLOCK, FORMS, FP8, INTEGERS, Form


def form_of(packing: Packing) -> Form | None:
    """Return the form, with as many inputs in a run as have one scale, up to 128. None: see `why_unpacked`."""
    if isinstance(packing, Gguf):
        return FORMS[packing.kind]
    layout = _layout(packing)
    if isinstance(layout, str):
        return None
    run = BLOCK if layout.group is not None and layout.group % 128 else 128
    return FP8[run] if layout.dtype == torch.float8_e4m3fn else INTEGERS[4 if layout.dtype == torch.uint8 else 8, run]


def why_unpacked(packing: Packing) -> str | None:
    """Return why no form has what a packing stores; None if one has."""
    layout = None if isinstance(packing, Gguf) else _layout(packing)
    return layout if isinstance(layout, str) else None


def in_integers(packing: Packing) -> bool:
    """Whether what stays as stored is integers, the only weights that are multiplied by rounded activations."""
    form = form_of(packing)
    return form is not None and not form.fp8


def _layout(packing: Packing) -> Narrow | str:
    """Return the layout, or why no form has it."""
    layout = packing.narrow(zeros=True)
    if isinstance(layout, str):
        return layout
    if layout.order:
        return "inputs of a group do not lie beside each other"
    if layout.group is not None and layout.group % BLOCK:
        return f"groups of {layout.group} inputs are no multiple of {BLOCK}"
    return layout

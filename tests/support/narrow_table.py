"""Owns a table of operations in which Triton multiplies narrow weights and torch does the rest, for its interpreter.
Never loaded but by its name, in place of kernels.choice.TRITON_TABLE."""

from __future__ import annotations

from dataclasses import replace

from kernels.eager.ops import TORCH
from kernels.triton.ops import TRITON as WHOLE

TRITON = replace(TORCH, narrow=WHOLE.narrow)

"""Owns the forward pass on the Triton kernels: norms, rotation and the cache write are one launch.
Never waits for the device, so that a step can be captured as a graph."""

from __future__ import annotations

from torch import Tensor

from kernels.collectives.group import Group
from kernels.eager.forward import Adapters, EagerPass
from kernels.eager.ops import Ops
from kernels.forward import HeadShape
from kernels.rows.step import StateRows
from kernels.triton.elementwise.norm import add_rms_norm
from kernels.triton.elementwise.rotate import rotate_and_cache
from kernels.triton.ops import TRITON


class TritonPass(EagerPass):
    """A kernels.forward.ForwardPass over one step, on the device of its tensors.

    token_ids, positions, slots: [num_tokens] int64; slot -1: a padding token, whose row has length 0 in the plan.
    """

    def __init__(
        self,
        ops: Ops = TRITON,
        *,
        token_ids: Tensor,
        positions: Tensor,
        slots: Tensor,
        plan: object,
        states: StateRows | None = None,
        adapters: Adapters | None = None,
        group: Group | None = None,
    ) -> None:
        """ops: the Triton table, with any attention. plan: what its `prepare_attention` returned for the step. group:
        see EagerPass."""
        super().__init__(
            ops,
            token_ids=token_ids,
            positions=positions,
            slots=slots,
            plan=plan,
            states=states,
            adapters=adapters,
            group=group,
        )

    def add_rms_norm(self, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        return add_rms_norm(x, residual, weight, eps)

    def rotate_and_cache(
        self,
        qkv: Tensor,
        rotations: tuple[Tensor, Tensor],
        heads: HeadShape,
        cache: tuple[Tensor, Tensor],
        norms: tuple[Tensor, Tensor] | None,
        eps: float,
    ) -> Tensor:
        return rotate_and_cache(qkv, rotations, heads, cache, self._slots, norms, eps)

"""Owns a model that runs its operations one by one, on tensors that are newly allocated in each step.
Never keeps anything of a step except K, V and recurrent states."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from engine.batch.inputs import StepInputs, build_inputs
from engine.models.computed import Computed
from engine.models.decoder import Decoder
from engine.models.expert_ranks import CountedExchanges
from engine.models.kv_cache import KVCache
from engine.models.recurrent_state import RecurrentState
from engine.step import AdapterHost, RowKind, ScheduledRequest, StepPlan
from kernels.collectives.group import Exchanging, Group
from kernels.eager.forward import EagerPass, multiply
from kernels.eager.ops import Ops
from kernels.eager.rewind import Rewind
from kernels.rows.step import StateRows


class EagerModel:
    """An engine.models.computed.Model on the operators of `ops`."""

    def __init__(
        self,
        decoder: Decoder,
        ops: Ops,
        cache: KVCache,
        block_size: int,
        state: RecurrentState | None = None,
        *,
        group: Group | None = None,
        expert_ranks: Exchanging | None = None,
    ) -> None:
        """group: the ranks that `decoder` is a shard for; a step then may raise RankLostError. None: it is whole.
        expert_ranks: those that have the experts between them, of which `decoder` has this rank's: then it is a
        engine.models.expert_ranks.DividedModel. None: it has all."""
        self.decoder = decoder
        self.cache = cache
        self.state = state
        self._ops = ops
        self._block_size = block_size
        self._group = group
        self._expert_ranks = None if expert_ranks is None else CountedExchanges(expert_ranks)

    @property
    def adapters(self) -> AdapterHost | None:
        return None

    def forward(self, plan: StepPlan, newest: Mapping[str, int]) -> Computed:
        num_slots = 0 if self.state is None else self.state.num_slots
        inputs = build_inputs(plan, self._block_size, newest, num_state_slots=num_slots)
        states = _state_rows(inputs)
        rewind = _rewind(plan, states)
        run = self._pass(
            plan.rows,
            token_ids=inputs.token_ids,
            positions=inputs.positions,
            slots=inputs.slots,
            plan=self._ops.prepare_attention(inputs.rows, self.decoder.config.num_kv_heads, self.decoder.dtype),
            states=states,
            rewind=rewind,
        )
        hidden: Tensor = self.decoder.forward(run, self.cache, self.state)
        return Computed.by_head(
            hidden, inputs.sampled_tokens, partial(multiply, self._ops, self.decoder.weights.lm_head), rewind
        )

    def _pass(self, rows: Sequence[ScheduledRequest], **step: Any) -> EagerPass:
        """step: see EagerPass."""
        return EagerPass(self._ops, group=self._group, expert_ranks=self._expert_ranks, **step)

    def begin_pass(self) -> None:
        assert self._expert_ranks is not None
        self._expert_ranks.begin()

    @torch.inference_mode()
    def finish_pass(self) -> None:
        assert self._expert_ranks is not None
        self._expert_ranks.finish(self.decoder)


def _state_rows(inputs: StepInputs) -> StateRows | None:
    """Return the step's rows for layers with recurrent state, or None if the model has none."""
    if not inputs.state_slots:
        return None
    rows, index = inputs.rows, torch.tensor(inputs.state_slots)
    return StateRows(rows.num_decode, rows.contexts, rows.counts, inputs.state_slots, index)


def _rewind(plan: StepPlan, states: StateRows | None) -> Rewind | None:
    """Return the step's rewind, or None if no row has drafts, so no state may have to be rolled back."""
    if states is None:
        return None
    num_drafted = sum(row.kind is RowKind.DECODE for row in plan.rows) - states.num_decode
    return Rewind(states, num_drafted) if num_drafted else None

"""Owns a model that runs its operations one by one, on tensors made anew in each step.
Never keeps anything of a step but K and V."""

from __future__ import annotations

from collections.abc import Mapping

import torch.nn.functional as F
from torch import Tensor

from engine.inputs import build_inputs
from engine.kv_cache import KVCache
from engine.models.computed import Computed
from engine.models.decoder import Decoder
from engine.step import StepPlan
from kernels.eager import EagerPass
from kernels.ops import Ops


class EagerModel:
    """An engine.models.computed.Model on the operators of `ops`."""

    def __init__(self, decoder: Decoder, ops: Ops, cache: KVCache, block_size: int) -> None:
        self.decoder = decoder
        self.cache = cache
        self._ops = ops
        self._block_size = block_size

    def forward(self, plan: StepPlan, newest: Mapping[str, int]) -> Computed:
        inputs = build_inputs(plan, self._block_size, newest)
        run = EagerPass(
            self._ops,
            token_ids=inputs.token_ids,
            positions=inputs.positions,
            slots=inputs.slots,
            plan=self._ops.prepare_attention(inputs.rows, self.decoder.config.num_kv_heads, self.decoder.dtype),
        )
        hidden: Tensor = self.decoder.forward(run, self.cache)
        return Computed(hidden, self._logits(hidden[inputs.sampled_tokens]), lambda index: self._logits(hidden[index]))

    def _logits(self, hidden: Tensor) -> Tensor:
        """[rows, hidden] -> [rows, vocab]"""
        return F.linear(hidden, self.decoder.weights.lm_head.weight)

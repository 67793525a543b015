"""Owns the assembly of a model, the same on every device: weights, decoder, KV cache, recurrent state, and a runner.
Never chooses a device or kernels, and never checks for memory: the device's start has done so."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, TypeVar

import torch
from torch import Tensor

from engine.build.resolve import torch_dtype
from engine.config import EngineConfig, ResolvedConfig
from engine.models.computed import Model
from engine.models.decoder import Decoder
from engine.models.description import ModelConfig
from engine.models.kv_cache import KVCache, cache_dtype
from engine.models.narrow import Keep
from engine.models.recurrent_state import RecurrentState
from engine.models.weights import CPU, dummy_weights, fill_randomly, load_weights

M_co = TypeVar("M_co", bound=Model, covariant=True)

Runner = Callable[[Decoder, KVCache, RecurrentState | None], M_co]
"""Combines the parts into a model that runs steps with a device's kernels."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelBuilder(Generic[M_co]):
    """Everything a model is built from. Devices and kernels differ only in `runner` and the fields after it."""

    model_dir: Path
    model: ModelConfig
    config: EngineConfig
    resolved: ResolvedConfig
    """The engine's resolved config. A draft model has the limits and types of the model that it drafts for."""
    runner: Runner[M_co]
    device: torch.device = CPU
    """Where weights, KV cache and recurrent state are."""
    keep: Keep = Keep.NOTHING
    """See load_weights."""
    rounded: bool = False
    """See load_weights."""
    round_inputs: bool = False
    """See load_weights."""
    others: Mapping[str, Tensor] = field(default_factory=dict)
    """An encoder's tensors by name, which the checkpoint fills in addition to the decoder's."""

    @property
    def _dtype(self) -> torch.dtype:
        return torch_dtype(self.resolved.dtype)

    def load(self) -> Decoder:
        """Read the weights, or fill them randomly with load_format `dummy`.

        Raises:
            CheckpointError: the checkpoint is broken or not supported.
        """
        if self.config.load_format == "dummy":
            weights = dummy_weights(self.model, self._dtype, device=self.device, rounded=self.rounded)
            fill_randomly(self.others)
        else:
            weights = load_weights(
                self.model_dir,
                self.model,
                self._dtype,
                self.device,
                others=self.others,
                keep=self.keep,
                rounded=self.rounded,
                round_inputs=self.round_inputs,
            )
        return Decoder(self.model, weights, self.resolved.max_model_len)

    def attach(self, decoder: Decoder, num_blocks: int) -> M_co:
        """Give a loaded decoder a KV cache of `num_blocks`, recurrent state if it has any, and a runner."""
        kept, size = cache_dtype(self.config.kv_cache_dtype, self._dtype), self.resolved.block_size
        cache = KVCache.allocate(self.model, num_blocks, size, kept, self.device)
        state = RecurrentState.allocate(self.model, self.resolved, self._dtype, self.device)
        return self.runner(decoder, cache, state)

    def build(self) -> M_co:
        """Load the weights and attach as many KV blocks as were resolved. Raises: as load."""
        return self.attach(self.load(), self.resolved.num_kv_blocks)

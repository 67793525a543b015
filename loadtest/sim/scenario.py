"""Owns what a simulation depends on: the requests, the engines, their steps, how long a start takes.
Never runs anything; a scenario is frozen, and the same one gives the same simulation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from engine.config import ResolvedConfig, SchedulerConfig
from loadtest.sim.executor import EOS, VOCAB_SIZE
from loadtest.sim.step_time import ATTENTION_CONTEXT, StepTime
from loadtest.sim.workload import Job
from loadtest.slo import Goal


def engine_config(**overrides: Any) -> ResolvedConfig:
    """An engine as it is resolved on two cores, but for its KV cache: room for the traces' longest prompts."""
    settings: dict[str, Any] = dict(
        max_model_len=262_144,
        block_size=16,
        num_kv_blocks=16_384,
        max_num_seqs=64,
        max_num_batched_tokens=512,
        max_prefill_tokens=512,
        max_queued_requests=1024,
        enable_prefix_caching=True,
        scheduler=SchedulerConfig(chunk_halving_context=ATTENTION_CONTEXT),
        vocab_size=VOCAB_SIZE,
        eos_token_ids=(EOS,),
        step_trace=False,
        overlap=False,
        num_speculative_tokens=0,
        max_grammar_bytes=2**18,
        grammar_timeout_s=2.0,
        dtype="none",
        device="none",
        kernels="simulated",
        num_threads=1,
        stall_timeout_s=30.0,
    )
    return ResolvedConfig(**{**settings, **overrides})


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """All that a simulation depends on, but for who routes and who scales."""

    jobs: Sequence[Job]
    step_time: StepTime
    goal: Goal
    config: ResolvedConfig = field(default_factory=engine_config)
    replicas: int = 1
    """That run when the first request may come."""
    cold_start_s: float = 30.0
    drain_s: float = 300.0
    num_zones: int = 1
    prefill_tokens_per_s: float = 1000.0
    """What the autoscaler and the router take for an engine's, before it has measured its own."""
    duration_s: float | None = None
    """How long requests come, and are counted, as replicas are; None: until the last arrival, a second at least."""
    seed: int = 0

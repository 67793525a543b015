"""Owns the inputs of a simulation: the requests, the engines, their step times, the time of a start.
Never runs anything. A scenario is frozen, and the same scenario gives the same simulation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from engine.config import ResolvedConfig, SchedulerConfig
from engine.scheduling.step_time import StepCosts
from loadtest.sim.executor import EOS, VOCAB_SIZE
from loadtest.sim.step_time import ATTENTION_CONTEXT, StepTime
from loadtest.sim.workload import Job
from loadtest.slo import Goal


def engine_config(**overrides: Any) -> ResolvedConfig:
    """Return the settings of an engine as resolved on two cores, with a KV cache large enough for the traces' longest
    prompts."""
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
        grammar_mask_timeout_s=0.1,
        grammar_mask_average_s=0.01,
        dtype="none",
        device="none",
        kernels="simulated",
        num_threads=1,
        stall_timeout_s=30.0,
    )
    return ResolvedConfig(**{**settings, **overrides})


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """All inputs of a simulation except the router and the scaler."""

    jobs: Sequence[Job]
    step_time: StepTime
    goal: Goal
    config: ResolvedConfig = field(default_factory=engine_config)
    replicas: int = 1
    """The number of replicas that run at the beginning."""
    cold_start_s: float = 30.0
    drain_s: float = 300.0
    num_zones: int = 1
    prefill_tokens_per_s: float = 1000.0
    """The rate that the autoscaler and the router assume for an engine until it has measured its own."""
    step_deviation: float = 0.0
    """Relative deviation of steps from `step_time`: each takes it times a log-normal factor."""
    slowness: Sequence[float] = (1.0,)
    """How many times as long as `step_time` steps take on each replica, in the order of their starts, over and over."""
    believed: StepCosts | None = None
    """Step costs that engines with targets begin with, as if an earlier start had kept them. None: each measures its
    own."""
    duration_s: float | None = None
    """The time for which requests and replica-hours are counted; None means until the last arrival, at least a
    second."""
    seed: int = 0

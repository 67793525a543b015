"""Describes what replicas are doing now: an engine's load, speed and last steps, and the requests in an ingress.
Never holds a text, a tenant or a key, nor a history: the metrics do that."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from engine.kv_tiers import Tier
from serve_app.admission.gate import GateSnapshot

_DOCUMENTED = {"use_attribute_docstrings": True}  # for the OpenAPI document


@dataclass(frozen=True, slots=True)
class StepActivity:
    __pydantic_config__: ClassVar[dict[str, bool]] = _DOCUMENTED

    id: int
    """Increases by step. An engine that restarts begins again, under another name."""
    decodes: int
    """The number of decode rows, which are streams that got a token."""
    chunks: tuple[int, ...]
    """The tokens of each prefill chunk in the step."""
    waiting: int
    ms: float
    """The time from the step's launch until its results were read back, without a wait for the step before."""
    age_ms: float
    """The time since its results were read back, at the moment of the answer."""
    predicted_ms: float | None = None
    """The time that was predicted from its begin to the next step's; null if the engine predicts none."""


@dataclass(frozen=True, slots=True)
class TierActivity:
    __pydantic_config__: ClassVar[dict[str, bool]] = _DOCUMENTED

    tier: Tier
    used_bytes: int
    """Engines that share a directory report all of it, each."""
    capacity_bytes: int
    hit_tokens: int
    """Prompt tokens that were loaded from it instead of computed, since the engine's start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineActivity:
    __pydantic_config__: ClassVar[dict[str, bool]] = _DOCUMENTED

    engine: str
    """The replica's name, as in `/metrics`."""
    num_running: int
    num_waiting: int
    num_blocks: int
    """The total number of KV blocks."""
    num_held_blocks: int
    """How many of those blocks are held by requests."""
    max_num_seqs: int
    """The most requests that run at a time, and so the most decode rows of a step."""
    max_num_batched_tokens: int
    """The most tokens of a step."""
    tpot_ms: float | None
    """The target between two tokens of a stream; null if there is none."""
    window_s: float
    """The length of the time window of the next four fields, in seconds."""
    prompt_tokens_per_s: float
    """Computed prompt tokens, without those from the prefix cache."""
    generated_tokens_per_s: float
    gap_p50_ms: float | None
    """The time between the tokens of a stream; null if there were none."""
    gap_p99_ms: float | None
    steps: tuple[StepActivity, ...]
    num_loading: int = 0
    """How many of the waiting requests have their KV loaded from a tier."""
    tiers: tuple[TierActivity, ...] = ()
    """The tiers below the KV cache, nearest first."""


@dataclass(frozen=True, slots=True)
class IngressActivity:
    __pydantic_config__: ClassVar[dict[str, bool]] = _DOCUMENTED

    ingress: str
    num_live: int
    """How many requests are between their arrival and the end of their answer."""
    num_waiting: int
    """How many of those wait for a place with the engines."""

    @classmethod
    def of(cls, ingress: str, gate: GateSnapshot) -> IngressActivity:
        return cls(ingress, gate.num_live, gate.num_waiting)


@dataclass(frozen=True, slots=True)
class FleetActivity:
    engines: Sequence[EngineActivity] = ()
    ingresses: Sequence[IngressActivity] = ()
    num_missing: int = 0
    """The number of replicas that did not answer."""

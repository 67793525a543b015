"""Owns the shape of what replicas do just now: an engine's load, pace and last steps, and who waits in an ingress.
Never holds a text, a tenant or a key, and is no history: that is what the metrics are for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from serve_app.admission.gate import GateSnapshot

_DOCUMENTED = {"use_attribute_docstrings": True}  # for the OpenAPI document


@dataclass(frozen=True, slots=True)
class StepActivity:
    __pydantic_config__: ClassVar[dict[str, bool]] = _DOCUMENTED

    id: int
    """Rises; an engine that starts again starts over, with another name."""
    decodes: int
    """Decode rows: streams that got a token."""
    chunks: tuple[int, ...]
    """Tokens of each prefill chunk that shared the step."""
    waiting: int
    ms: float
    """From its launch until it was read back."""
    age_ms: float
    """Since it was read back, at the time of the answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineActivity:
    __pydantic_config__: ClassVar[dict[str, bool]] = _DOCUMENTED

    engine: str
    """The replica, as in `/metrics`."""
    num_running: int
    num_waiting: int
    num_blocks: int
    """KV blocks that there are."""
    num_held_blocks: int
    """Of those, blocks that requests hold."""
    max_num_seqs: int
    """Most requests that run at a time: the most decode rows of a step."""
    max_num_batched_tokens: int
    """Most tokens of a step."""
    window_s: float
    """What the next four are of: the last so many seconds."""
    prompt_tokens_per_s: float
    """Computed; what the prefix cache had is not in it."""
    generated_tokens_per_s: float
    gap_p50_ms: float | None
    """Between the tokens of a stream; null without any."""
    gap_p99_ms: float | None
    steps: tuple[StepActivity, ...]


@dataclass(frozen=True, slots=True)
class IngressActivity:
    __pydantic_config__: ClassVar[dict[str, bool]] = _DOCUMENTED

    ingress: str
    num_live: int
    """Requests from their arrival to their answer's end."""
    num_waiting: int
    """Of those, requests that wait for a place with the engines."""

    @classmethod
    def of(cls, ingress: str, gate: GateSnapshot) -> IngressActivity:
        return cls(ingress, gate.num_live, gate.num_waiting)


@dataclass(frozen=True, slots=True)
class FleetActivity:
    engines: Sequence[EngineActivity] = ()
    ingresses: Sequence[IngressActivity] = ()
    num_missing: int = 0
    """Replicas that did not answer."""

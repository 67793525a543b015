"""Defines the answer to why a request was slow: its wall time by cause.
Never measures or divides anything: serve_app.api.timing does."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Ahead:
    """What was before a request when it came to its engine. Only numbers: whose requests these were is not told."""

    requests: int
    """Requests that waited."""
    prompt_tokens: int
    """The tokens of their prompts, and those left of prompts that were being computed."""


@dataclass(frozen=True, slots=True)
class TimePart:
    """One cause's part of a request's wall time."""

    cause: str
    ms: float
    share: float
    """Its share of the wall time, 0 to 1."""
    without_ms: float
    """What the wall time would have been without it."""
    about: str
    """The cause in words."""


@dataclass(frozen=True, slots=True)
class Timing:
    """Where the wall time of one request went, which is the sum of all parts."""

    id: str | None
    """That of its answer; None if it was refused before it had one."""
    request_id: str
    """Its X-Request-Id."""
    status: Literal["complete", "error", "incomplete", "client_gone"]
    wall_ms: float
    """From the arrival of its headers until the server had sent its last byte."""
    first_token_ms: float | None
    own: tuple[TimePart, ...]
    """Its own work, the largest part first."""
    slowed_by: tuple[TimePart, ...]
    """Everything else, the largest part first."""
    ahead: Ahead | None
    """None if no engine has told."""
    migrations: int
    """How often it went on at another engine."""
    object: Literal["request.timing"] = "request.timing"


@dataclass(frozen=True, slots=True)
class FoundTiming:
    """One ingress replica's answer to a question about a request."""

    timing: Timing | None

"""Owns the words that cross the engine's boundary: sampling parameters in, events out, typed errors.
Never holds state, and imports nothing but the standard library, so that any process can speak it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum


class ErrorCode(StrEnum):
    """Why a request was refused or failed. The server turns each into an HTTP status in one table."""

    EMPTY_PROMPT = "empty_prompt"
    CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded"
    KV_CAPACITY_EXCEEDED = "kv_capacity_exceeded"
    INVALID_PARAMETER = "invalid_parameter"
    QUEUE_FULL = "queue_full"
    DRAINING = "draining"
    DEADLINE_EXCEEDED = "deadline_exceeded"
    STEP_FAILED = "step_failed"
    ENGINE_DEAD = "engine_dead"


class EngineError(Exception):
    """An error with a code. All state is in `args`, so that it survives pickling between processes."""

    def __init__(self, code: ErrorCode, message: str) -> None:
        super().__init__(code, message)
        self.code = code
        self.message = message

    def __str__(self) -> str:
        return self.message


class RequestRejected(EngineError):
    """Raised at submit: the request can never be served as asked, or not now. Nothing was enqueued.

    `param` names the offending field, `limit` the bound it broke and `value` what was given.
    """

    def __init__(
        self,
        code: ErrorCode,
        message: str,
        param: str | None = None,
        limit: float | None = None,
        value: float | None = None,
    ) -> None:
        Exception.__init__(self, code, message, param, limit, value)
        self.code = code
        self.message = message
        self.param = param
        self.limit = limit
        self.value = value


class FinishReason(StrEnum):
    STOP = "stop"
    """An end-of-sequence or stop token was sampled."""
    LENGTH = "length"
    """`max_tokens` or the context limit was reached."""
    ABORT = "abort"
    """The caller asked for it, or went away."""


def _require(ok: bool, param: str, rule: str, value: float) -> None:
    if not ok:
        raise RequestRejected(
            ErrorCode.INVALID_PARAMETER, f"{param} must be {rule}, but it is {value}.", param=param, value=value
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to choose tokens and when to stop. Validated on construction.

    Raises:
        RequestRejected: a value is out of range; the message names field, rule and value.
    """

    temperature: float = 1.0
    """0 is greedy."""
    top_k: int = 0
    """Keep the k most likely tokens; 0 keeps all."""
    top_p: float = 1.0
    """Keep the smallest set of tokens whose probability reaches this."""
    min_p: float = 0.0
    """Drop tokens less likely than this share of the most likely one."""
    seed: int | None = None
    """Key of the counter-based generator; None draws one at submit."""
    max_tokens: int | None = None
    """None: as many as the context holds."""
    min_tokens: int = 0
    """No end-of-sequence or stop token is sampled before this many tokens."""
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    """Stop tokens besides the model's own; a stop token is counted in usage but never emitted."""

    def __post_init__(self) -> None:
        _require(math.isfinite(self.temperature) and self.temperature >= 0, "temperature", ">= 0", self.temperature)
        _require(self.top_k >= 0, "top_k", ">= 0", self.top_k)
        _require(0 < self.top_p <= 1, "top_p", "in (0, 1]", self.top_p)
        _require(0 <= self.min_p <= 1, "min_p", "in [0, 1]", self.min_p)
        _require(self.min_tokens >= 0, "min_tokens", ">= 0", self.min_tokens)
        if self.seed is not None:
            _require(-(2**63) <= self.seed < 2**63, "seed", "a signed 64-bit integer", self.seed)
        if self.max_tokens is not None:
            _require(self.max_tokens >= 1, "max_tokens", ">= 1", self.max_tokens)
            _require(
                self.min_tokens <= self.max_tokens, "min_tokens", f"<= max_tokens ({self.max_tokens})", self.min_tokens
            )


@dataclass(frozen=True, slots=True)
class Submission:
    """One request as the engine takes it: token ids in, token ids out. `request_id` is unique among live requests.

    Raises:
        RequestRejected: a timeout is not a positive number.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    timeout_s: float | None = None
    """Seconds after which the request ends with DEADLINE_EXCEEDED, wherever it is; None: never."""
    queue_timeout_s: float | None = None
    """The same for a request that has not run yet."""

    def __post_init__(self) -> None:
        for name, value in (("timeout_s", self.timeout_s), ("queue_timeout_s", self.queue_timeout_s)):
            if value is not None:
                _require(math.isfinite(value) and value > 0, name, "a positive number of seconds", value)


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one request. `completion_tokens` includes the stop token that ended it, if one did."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


# What a request's sink receives, in this order: Scheduled, Token*, then exactly one of Finished or Failed.


@dataclass(frozen=True, slots=True)
class Scheduled:
    """The request's first chunk is about to run. Sent once, never again after a preemption."""

    request_id: str
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class Token:
    """One sampled token that belongs to the answer."""

    request_id: str
    token_id: int


@dataclass(frozen=True, slots=True)
class Finished:
    """Terminal: the answer is complete, or was aborted. `stop_token_id` is the token that ended it, never emitted."""

    request_id: str
    reason: FinishReason
    usage: Usage
    stop_token_id: int | None = None


@dataclass(frozen=True, slots=True)
class Failed:
    """Terminal: the engine could not go on with this request."""

    request_id: str
    code: ErrorCode
    message: str


Event = Scheduled | Token | Finished | Failed
TERMINAL = (Finished, Failed)


@dataclass(frozen=True, slots=True)
class LoadSnapshot:
    """One engine's load at a moment between two steps. Requests and blocks now held; steps and preemptions so far."""

    num_running: int
    num_waiting: int
    num_queued_tokens: int
    """Tokens still to prefill: of waiting requests, and the rest of prompts that are partly computed."""
    num_blocks: int
    num_held_blocks: int
    num_evictable_blocks: int
    num_steps: int
    num_preemptions: int
    reserve_ratio: float
    """Share of running requests' remaining answers that admission keeps free (`reserve_mode: ratio`)."""

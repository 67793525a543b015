"""Owns the types that cross the engine's boundary: sampling parameters in, events out, typed errors. Long: all of them.
Never holds state, and imports only the standard library, so that any process can use it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal, NamedTuple

from engine.kv_tiers import TierLoad
from engine.multimodal_inputs import SpanInput

MAX_LOGPROBS = 20
"""Maximum number of alternatives with a token's log-probability, as at OpenAI."""
MAX_BIAS = 100
"""Maximum size of a logit bias, as at OpenAI: enough to ban a token or to force one."""
NOTHING_LEFT = "Nothing is left to sample: allowed_token_ids, bad_words and (before min_tokens) stop_token_ids ban all."
"""What is told of a request whose controls ban every token, at once or after some of the answer."""


class ErrorCode(StrEnum):
    """Why a request was refused or failed. The server turns each into an HTTP status in one table."""

    EMPTY_PROMPT = "empty_prompt"
    CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded"
    KV_CAPACITY_EXCEEDED = "kv_capacity_exceeded"
    INVALID_PARAMETER = "invalid_parameter"
    QUEUE_FULL = "queue_full"
    DRAINING = "draining"
    DEADLINE_EXCEEDED = "deadline_exceeded"
    PREPARATION_FAILED = "preparation_failed"
    ADAPTER_UNAVAILABLE = "adapter_unavailable"
    ADAPTER_WITHDRAWN = "adapter_withdrawn"
    GRAMMAR_LIMIT_EXCEEDED = "grammar_limit_exceeded"
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


MAX_TARGET_MS = 24 * 60 * 60 * 1000
"""The longest target that a request or an engine may have. Times are ordered in whole microseconds."""
SURELY_LATE = 2.0
"""A deadline that the predicted time exceeds by this factor cannot be met: predictions are not that wrong."""


def why_late(subject: str, takes_s: float, left_s: float, deadline_s: float | None = None) -> str | None:
    """Return why a deadline in `left_s` cannot be met, as a clause; None if perhaps it can.

    `subject`: what is predicted to take `takes_s`. `deadline_s`: what was asked for, if time has passed since.
    """
    if takes_s <= SURELY_LATE * left_s:
        return None
    takes = f"{subject} takes about {takes_s:.{1 if takes_s >= 0.1 else 3}f} s"
    if deadline_s is None or left_s >= 0.9 * deadline_s:  # little has passed
        return f"{takes}, and its deadline is {deadline_s or left_s:g} s"
    return f"{takes}, and of its deadline of {deadline_s:g} s {max(left_s, 0.0):.3f} s are left"


DraftMethod = Literal["grammar", "ngram", "suffix", "draft_model"]
"""The source of drafted tokens: a grammar forces them, they were looked up in the request's own text, or a smaller
model proposes them."""


class FinishReason(StrEnum):
    STOP = "stop"
    """An end-of-sequence or stop token was sampled, or the caller found the end in the answer's text."""
    LENGTH = "length"
    """`max_tokens` or the context limit was reached."""
    ABORT = "abort"
    """The caller aborted the request or went away."""


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
    """None: as many as the context holds. 0: compute the prompt and stop, in order to score or cache it."""
    min_tokens: int = 0
    """No end-of-sequence or stop token is sampled before this many tokens."""
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    """Stop tokens besides the model's own; a stop token is counted in usage but never emitted."""
    logprobs: int | None = None
    """Return each token's log-probability, and this many alternatives with theirs; None: neither."""
    prompt_logprobs: int | None = None
    """The same for the tokens of the prompt."""
    presence_penalty: float = 0.0
    """Subtracted from the logit of every token that occurs in the answer."""
    frequency_penalty: float = 0.0
    """Subtracted from a token's logit for each of its occurrences in the answer."""
    repetition_penalty: float = 1.0
    """Above 1, tokens of the prompt and of the answer become less likely (Keskar et al., 2019); 1 changes nothing."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token, amount added to its logit), each token once."""
    allowed_token_ids: tuple[int, ...] | None = None
    """No other token is sampled; None allows all."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Token sequences that the answer will not contain."""
    grammar: str | None = None
    """A grammar for the answer's text, in llguidance's notation (Lark, or its JSON); None: any text. It overrides bans:
    if every token that it allows is banned, one of them is sampled nevertheless."""

    def __post_init__(self) -> None:
        _require(math.isfinite(self.temperature) and self.temperature >= 0, "temperature", ">= 0", self.temperature)
        _require(self.top_k >= 0, "top_k", ">= 0", self.top_k)
        _require(0 < self.top_p <= 1, "top_p", "in (0, 1]", self.top_p)
        _require(0 <= self.min_p <= 1, "min_p", "in [0, 1]", self.min_p)
        _require(self.min_tokens >= 0, "min_tokens", ">= 0", self.min_tokens)
        if self.seed is not None:
            _require(-(2**63) <= self.seed < 2**63, "seed", "a signed 64-bit integer", self.seed)
        for name, penalty in (
            ("presence_penalty", self.presence_penalty),
            ("frequency_penalty", self.frequency_penalty),
        ):
            _require(-2 <= penalty <= 2, name, "in -2 to 2", penalty)
        # A logit that is divided by less may become infinite, as if the model had failed.
        _require(
            0.01 <= self.repetition_penalty <= 100, "repetition_penalty", "in 0.01 to 100", self.repetition_penalty
        )
        for _, bias in self.logit_bias:
            _require(-MAX_BIAS <= bias <= MAX_BIAS, "logit_bias", f"in -{MAX_BIAS} to {MAX_BIAS}", bias)
        for name, count in (("logprobs", self.logprobs), ("prompt_logprobs", self.prompt_logprobs)):
            if count is not None:
                _require(0 <= count <= MAX_LOGPROBS, name, f"in 0 to {MAX_LOGPROBS}", count)
        if self.max_tokens is not None:
            _require(self.max_tokens >= 0, "max_tokens", ">= 0", self.max_tokens)
            _require(
                self.min_tokens <= self.max_tokens, "min_tokens", f"<= max_tokens ({self.max_tokens})", self.min_tokens
            )


@dataclass(frozen=True, slots=True)
class AdapterRef:
    """The LoRA adapter (arXiv 2106.09685) of a request, with all that an engine needs to load it."""

    name: str
    """The adapter's name for clients."""
    path: str
    """A directory in PEFT's format on the engine's machine."""
    digest: str
    """The digest of its files: other weights under the same name or path are another adapter."""


@dataclass(frozen=True, slots=True)
class Submission:
    """One request to the engine: token ids in, token ids out. `request_id` is unique among live requests.

    Raises:
        RequestRejected: a timeout or a target is not a positive number, or the spans are not in order.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    timeout_s: float | None = None
    """Seconds after which the request ends with DEADLINE_EXCEEDED, wherever it is; None: never."""
    queue_timeout_s: float | None = None
    """The same for a request that has not run yet."""
    priority: int = 0
    """A lower number is served before a higher one, within the age bound of `priority_age_ms`."""
    tenant: str = ""
    """The tenant of the request. Tenants of one priority share the engine evenly."""
    atomic_spans: tuple[tuple[int, int], ...] = ()
    """[start, end) of prompt positions that are computed together, such as an image: no chunk ends inside one."""
    num_answer_tokens: int = 0
    """Number of tokens at the prompt's end that belong to the answer: another engine sampled them, and this one
    continues."""
    cache_salt: str = ""
    """Prefixes are shared only among requests with the same salt."""
    pooling: Literal["mean", "last"] | None = None
    """Return the final hidden states of the prompt as one vector: the mean of all positions, or that of the last."""
    inputs: tuple[SpanInput, ...] = ()
    """The contents of spans of the prompt that are not text, such as images."""
    adapter: AdapterRef | None = None
    """None means the model without an adapter."""
    session: str = ""
    """Names the conversation that the request belongs to, within its tenant; "" if nobody said. Its KV is kept for its
    next turn."""
    tpot_ms: float | None = None
    """The request's own target between two tokens, in milliseconds, instead of the engine's; see Targets."""
    ttft_ms: float | None = None
    """The request's own target from its arrival to its first token, likewise."""

    def __post_init__(self) -> None:
        num_tokens = len(self.prompt_token_ids)
        if self.pooling is not None:
            most = -1 if self.sampling.max_tokens is None else self.sampling.max_tokens
            _require(most == 0, "max_tokens", "0 where the prompt is pooled", most)
        _require(
            0 <= self.num_answer_tokens <= num_tokens,
            "num_answer_tokens",
            f"in 0 to {num_tokens}, the prompt's tokens",
            self.num_answer_tokens,
        )
        for name, value in (("timeout_s", self.timeout_s), ("queue_timeout_s", self.queue_timeout_s)):
            if value is not None:
                _require(math.isfinite(value) and value > 0, name, "a positive number of seconds", value)
        for name, target in (("tpot_ms", self.tpot_ms), ("ttft_ms", self.ttft_ms)):
            if target is not None:
                _require(math.isfinite(target) and target > 0, name, "a positive number of milliseconds", target)
                _require(target <= MAX_TARGET_MS, name, f"at most {MAX_TARGET_MS} milliseconds, a day", target)
        _check_spans("atomic_spans", self.atomic_spans, num_tokens)
        _check_spans("inputs", [(span.start, span.end) for span in self.inputs], num_tokens)


def _check_spans(name: str, spans: Iterable[tuple[int, int]], num_tokens: int) -> None:
    low = 0
    for start, end in spans:
        _require(low <= start < end, name, f"[start, end) in order and apart, from {low} on", start)
        low = end
    _require(low <= num_tokens, name, "inside the prompt", low)


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one request. `completion_tokens` includes the stop token that ended it, if one did."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural log-probability of a token under the model's own distribution, before temperature and filters."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    """The most likely tokens with their log-probabilities, best first, as many as requested."""
    rank: int | None = None
    """Rank of a prompt token; 1 means that no token is more likely, and ties go to the lower id. None for other
    tokens."""


class TimeCause(StrEnum):
    """What a request's time in an engine was spent on, or lost to."""

    ADAPTER = "adapter"
    """Its adapter was loaded."""
    GRAMMAR = "grammar"
    """Its grammar was compiled, or a step waited for a grammar's mask."""
    INPUTS = "inputs"
    """Inputs such as images were prepared or encoded, its own or, in the same steps, others'."""
    QUEUE = "queue"
    """It waited for its turn: others were before it."""
    MEMORY = "memory"
    """It waited because the KV cache had no room."""
    KV_LOAD = "kv_load"
    """KV of its prompt was loaded from a tier below the KV cache."""
    PREFILL = "prefill"
    """Its own prompt was computed."""
    PREFILL_BESIDE_PROMPTS = "prefill_beside_prompts"
    """Meanwhile, chunks of other prompts."""
    PREFILL_BESIDE_ANSWERS = "prefill_beside_answers"
    """Meanwhile, tokens of answers."""
    DECODE = "decode"
    """Its own answer, as long as it would take alone."""
    DECODE_BESIDE_PROMPTS = "decode_beside_prompts"
    """What prompts in the same steps added."""
    DECODE_BESIDE_ANSWERS = "decode_beside_answers"
    """What other answers in the same steps added."""
    PREEMPTION = "preemption"
    """It lost its memory, and waited until as much was computed again."""
    SLOW_STEPS = "slow_steps"
    """Steps took longer than their work explains, or failed."""


@dataclass(frozen=True, slots=True)
class EngineTimes:
    """Where a request's wall time in an engine went."""

    seconds: Mapping[TimeCause, float]
    """Their sum is the time from the submission to the terminal event. Causes without time are left out."""
    requests_ahead: int = 0
    """Requests that waited when it came."""
    tokens_ahead: int = 0
    """Their prompts' tokens, and those of prompts that were being computed."""


# A request's sink receives, in this order: Scheduled, then PromptLogprobs and Pooled if they were requested and the
# prompt was computed, Token*, then exactly one of Finished or Failed.


@dataclass(frozen=True, slots=True)
class Scheduled:
    """The request's first chunk is about to run. Sent once, never again after a preemption."""

    request_id: str
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """The prompt is computed. Sent once, never again after a preemption."""

    request_id: str
    logprobs: tuple[TokenLogprobs, ...]
    """Log-probabilities of the prompt's second to last tokens: nothing predicts the first."""


@dataclass(frozen=True, slots=True)
class Pooled:
    """The prompt is computed, and this is its vector (see Submission.pooling). Sent once."""

    request_id: str
    values: tuple[float, ...]
    """[hidden size]; not normalised."""


class Token(NamedTuple):
    """One sampled token that belongs to the answer. A tuple, because every step makes one for each stream."""

    request_id: str
    token_id: int
    logprobs: TokenLogprobs | None = None
    """Set if and only if SamplingParams.logprobs is."""


@dataclass(frozen=True, slots=True)
class Finished:
    """Terminal: the answer is complete, or was aborted. `stop_token_id` is the token that ended it, never emitted."""

    request_id: str
    reason: FinishReason
    usage: Usage
    stop_token_id: int | None = None
    stop_logprobs: TokenLogprobs | None = None
    """Log-probabilities of the stop token, if they were requested."""
    times: EngineTimes | None = field(default=None, compare=False)
    """None if the engine does not know."""


@dataclass(frozen=True, slots=True)
class Failed:
    """Terminal: the engine could not continue this request."""

    request_id: str
    code: ErrorCode
    message: str
    times: EngineTimes | None = field(default=None, compare=False)
    """As in Finished."""


Event = Scheduled | PromptLogprobs | Pooled | Token | Finished | Failed
TERMINAL = (Finished, Failed)


@dataclass(frozen=True, slots=True)
class StepCorrection:
    """How the step time model corrects what was measured at start; see engine.scheduling.step_prediction."""

    scale: float
    """What measured times are multiplied by."""
    extra_s: float
    """What is added to each step."""
    deviation: float
    """Recent relative deviation of steps from their predictions."""


@dataclass(frozen=True, slots=True)
class PrefillCosts:
    """What prefill takes at present, in wall time: a step also computes the rows that decode, which have a target."""

    token_s: float
    """Seconds for each token."""
    pair_s: float
    """Seconds for each pair of a token and a position that it attends to."""

    def seconds(self, start: int, end: int) -> float:
        """Return how long the positions [start, end) of a prompt take."""
        return self.token_s * (end - start) + self.pair_s * num_pairs(start, end)


def num_pairs(start: int, end: int) -> int:
    """Return the sum, over the positions [start, end), of the positions that each attends to."""
    return (end - start) * (start + end + 1) // 2


@dataclass(frozen=True, slots=True)
class LoadSnapshot:
    """One engine's load between two steps. Requests and blocks are current; steps and preemptions are totals so far."""

    num_running: int
    num_waiting: int
    num_preparing: int
    """Waiting requests whose prompt is still being prepared."""
    num_waiting_preempted: int
    """Waiting requests that ran before and were preempted."""
    wait_reason: str | None
    """Why the first request in the queue was not admitted in the last step; None if none waits."""
    num_queued_tokens: int
    """Tokens still to prefill: those of waiting requests, and the rest of partly computed prompts."""
    num_blocks: int
    num_held_blocks: int
    num_evictable_blocks: int
    num_reserved_blocks: int
    """Blocks that admission keeps free for the expected growth of running requests."""
    num_steps: int
    num_preemptions: int
    reserve_ratio: float
    """Share of running requests' remaining answers that admission keeps free (`reserve_mode: ratio`)."""
    reserve_margin: float
    """Standard deviations of expected memory that admission keeps free (`reserve_mode: learned`); 0 in other modes."""
    step_times: StepCorrection | None = None
    """Set if the engine predicts step times, which it does where it has targets. So are the next three."""
    queued_prefill_s: float | None = None
    """Predicted seconds until the prompts that wait or are partly computed are prefilled. Memory or seats that they
    have to wait for are not part of it."""
    prefill_costs: PrefillCosts | None = None
    """By these, others predict how long a new prompt takes here."""
    idle_prefill_costs: PrefillCosts | None = None
    """By these, how long it takes if the engine does nothing else: the least that it can take."""
    graph_hits: Mapping[str, int] = field(default_factory=dict)
    """Steps that replayed a captured graph, by graph; empty for executors without graphs."""
    graph_misses: Mapping[str, int] = field(default_factory=dict)
    """Steps for which no graph fitted, by reason."""
    tiers: tuple[TierLoad, ...] = ()
    """The tiers below the device's memory, nearest first."""
    num_loading: int = 0
    """Waiting requests whose KV is being loaded from a tier."""
    rank_late_s: tuple[float, ...] = ()
    """Seconds that the other ranks have waited for each rank so far; empty if one computes the model."""

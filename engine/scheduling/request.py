"""Owns one request's progress: its tokens, cursors and blocks, and the checks it passed on entry. What few requests
have is one separate object each (`request_parts`).
Never decides what runs next; the planner does."""

from __future__ import annotations

import math
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from engine.config import ResolvedConfig
from engine.multimodal_inputs import SpanInput, place_inputs
from engine.prefix import ROOT, extend_chain, root_of
from engine.protocol import NOTHING_LEFT, ErrorCode, RequestRejected, SamplingParams, Submission, Usage
from engine.scheduling.input_checks import atomic_spans, check_inputs
from engine.scheduling.request_parts import Drafts, Loading, MemoryLack, Pooling, PromptSpans, Scoring, TierMatch
from engine.scheduling.retention import session_key
from engine.step import PENDING_TOKEN, LogitControls, PromptScoring, RowSampling


@dataclass(slots=True, eq=False, kw_only=True)
class Request:
    """A live request.

        0 ........... cached ........ computed ....... scheduled ...... target     len(token_ids)
        | prefix hit  | KV present    | in flight      | still to do    |          | + sampled tokens

    Progress is one number, `computed`, which chases `target`; there is no separate prefill phase. Without overlap and
    drafts, `scheduled` and `computed` are equal between steps.
    """

    request_id: str
    arrival_index: int
    """Arrival order, kept for life."""
    token_ids: list[int]
    prompt_len: int
    max_tokens: int
    """Most tokens to sample."""
    sampling: SamplingParams
    row_sampling: RowSampling
    stop_token_ids: frozenset[int]
    answer_start: int
    """Where the answer begins in `token_ids`: before `prompt_len` if another engine began the answer."""
    priority: int = 0
    tenant: str = ""
    target: int = 0
    """len(token_ids), frozen at admission."""
    cached: int = 0
    """Prompt tokens found in the prefix cache when the request was first admitted."""
    computed: int = 0
    scheduled: int = 0
    num_pending: int = 0
    """Rows in flight that sample: 1 between such a step and its results."""
    epoch: int = 0
    """Changes when the request loses its memory: results of rows launched before that are no longer its own."""
    block_ids: tuple[int, ...] = ()
    block_hashes: list[bytes] = field(default_factory=list)
    prefix_root: bytes = ROOT
    """What the hash of the first block builds on."""
    num_published: int = 0
    place: tuple[int, int] = (0, 0)
    """Among the requests of one priority and tenant, the lowest is served first. It is (arrival_index, 0), or by time
    (`time_order`), unless a preemption moved it. No two are equal, and it does not change while the request is in the
    queue."""
    was_scheduled: bool = False
    """Whether the Scheduled event was sent. A preemption does not send it again."""
    arrived: float = 0.0
    """Monotonic seconds of the arrival."""
    expected_cached: int = 0
    """Prompt tokens that the prefix cache had when the request came; 0 if steps are not predicted."""
    prefill_s: float = 0.0
    """How long the rest was predicted to take alone; 0 if nobody needs to know."""
    waiting_since: float = 0.0
    """Monotonic seconds of the arrival or the last chunk, which tell how long this prompt has made no progress."""
    last_turn: float = 0.0
    """Monotonic seconds of the last chunk for which this prompt did not step aside (`long_prefill_defer_tokens`)."""
    prefix_match: tuple[int, tuple[int, ...]] = (-1, ())
    """(epoch of the caches, matched blocks): a waiting request looks up its prefix once an epoch, not once a step."""

    tier_match: TierMatch | None = None
    """Likewise; None: not looked up yet."""

    memory_lack: MemoryLack | None = None
    """None: it did not lack any."""

    # What few requests have: a value, or an object if several belong together.
    early_sampling: RowSampling | None = None
    """Used before `min_tokens`: stop tokens are banned. None if there is no such limit."""
    timeout_s: float | None = None
    queue_timeout_s: float | None = None
    tpot_s: float = math.inf
    """Target between two tokens; see engine.config.Targets."""
    ttft_s: float = math.inf
    """Target from the arrival to the first token."""
    num_overtakes: int = 0
    """Requests behind this one that were admitted before it (`admission_order: bypass`)."""
    adapter: str = ""
    """The digest of the request's adapter; "" for none."""
    spans: PromptSpans | None = None
    scoring: Scoring | None = None
    """None if nobody asked for scores, or once they were sent."""
    pooling: Pooling | None = None
    drafts: Drafts | None = None
    """For the next decode row, or of the row in flight."""
    session: str = ""
    """The conversation that it belongs to, by `session_key`; "" if nobody said."""
    num_loads: int = 0
    """Times that it has waited for KV from a lower tier."""
    loading: Loading | None = None
    """Set while it does."""
    awaits_token: bool = False
    """Whether no row is planned before the token in flight is read, because drafts after it are expected to pay
    (overlap). The next row ends that."""

    @property
    def num_output(self) -> int:
        return len(self.token_ids) - self.prompt_len

    @property
    def lifetime_tokens(self) -> int:
        """Positions whose KV is ever written. The last sampled token is not fed back."""
        return self.prompt_len + max(self.max_tokens, 1) - 1

    @property
    def num_decode_tokens(self) -> int:
        """Tokens of the next decode row; 0 if the tokens in flight are the last, or if it stands aside."""
        left = self.prompt_len + self.max_tokens - len(self.token_ids) - self.num_pending
        if left <= 0:
            return 0
        if self.num_pending:  # overlap
            return 0 if self.stands_aside else 1
        return 1 if self.drafts is None else 1 + len(self.drafts.token_ids)

    @property
    def stands_aside(self) -> bool:
        """Whether its next row is unknown before a step in flight is read back (overlap): where it starts, because the
        step verifies drafts, or which drafts it has, because they are to follow a token of the step."""
        return self.num_pending > 0 and (self.drafts is not None or self.awaits_token)

    @property
    def most_drafts(self) -> int:
        """Most drafts of a row: as many tokens as the answer may still have, less the last, which is never drafted."""
        early = self.num_output < self.sampling.min_tokens  # stop tokens are banned at one position a row
        return 0 if early else self.max_tokens - self.num_output - 1

    def usage(self, *, stop_token: bool) -> Usage:
        return Usage(self.prompt_len, self.num_output + stop_token, self.cached)

    def next_sampling(self) -> RowSampling | None:
        """Return how the next token is chosen, or None for a request that only has its prompt computed."""
        if not self.max_tokens:
            return None
        if self.early_sampling is None:
            return self.row_sampling
        early = self.num_output + self.num_pending < self.sampling.min_tokens
        return self.early_sampling if early else self.row_sampling

    def answer(self) -> tuple[int, ...]:
        """Return the answer's tokens so far, up to the one in flight."""
        return (*self.token_ids[self.answer_start :], *(PENDING_TOKEN,) * self.num_pending)

    def next_tokens(self, count: int) -> tuple[int, ...]:
        """Return `count` tokens from `scheduled` on: known ones, then the one in flight or the drafts."""
        known = tuple(self.token_ids[self.scheduled : self.scheduled + count])
        if len(known) == count:
            return known
        if not known:
            return (PENDING_TOKEN,)
        return known if self.drafts is None else (known + self.drafts.token_ids)[:count]

    @property
    def num_reusable(self) -> int:
        """Tokens that a prefix hit may cover. The last one is computed for its logits, as are those that are not scored
        or summed yet."""
        count = len(self.token_ids) - 1
        if self.scoring is not None:
            count = min(count, len(self.scoring.logprobs))
        if self.pooling is not None and self.pooling.method == "mean":
            count = min(count, self.pooling.num_summed)
        return count

    def to_score(self, end: int) -> PromptScoring | None:
        """Return the prompt tokens that the next positions, up to `end`, predict and that lack a log-probability."""
        if self.scoring is None:
            return None
        return self.scoring.of_chunk(self.token_ids, self.prompt_len, self.scheduled, end)

    def extend_hashes(self, num_tokens: int, block_size: int) -> None:
        """Hash the full blocks within the first `num_tokens` tokens that are not hashed yet."""
        inputs = () if self.spans is None else self.spans.inputs
        extend_chain(self.block_hashes, self.token_ids, num_tokens // block_size, block_size, self.prefix_root, inputs)


def create_request(submission: Submission, config: ResolvedConfig, arrival_index: int) -> Request:
    """Check a submission against what this engine can ever serve, and make its request.

    The prompt is hashed here, on the submitter's time: that takes milliseconds, and a step must not wait for it.

    Raises:
        RequestRejected: names the field, the limit and the value.
    """
    prompt, params = submission.prompt_token_ids, submission.sampling
    if config.headless and submission.pooling is None:
        text = "This model has no LM head: it makes embeddings alone, and answers no prompt."
        raise RequestRejected(ErrorCode.INVALID_PARAMETER, text, "model")
    _check_prompt(prompt, params, config)
    inputs = check_inputs(submission, config)
    atomic = tuple(sorted((*submission.atomic_spans, *atomic_spans(inputs, config))))
    _check_spans(atomic, config)
    _check_ids("stop_token_ids", params.stop_token_ids, config.vocab_size)
    max_tokens = _resolve_max_tokens(len(prompt), params.max_tokens, config)
    stops = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else frozenset(config.eos_token_ids))
    _check_controls(params, stops, config.vocab_size)
    adapter = "" if submission.adapter is None else submission.adapter.digest
    root = root_of(submission.cache_salt, adapter)
    row_sampling = RowSampling(
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
        seed=secrets.randbits(63) if params.seed is None else params.seed,
        num_logprobs=params.logprobs,
        controls=_controls(submission),
    )
    request = Request(
        request_id=submission.request_id,
        arrival_index=arrival_index,
        token_ids=list(prompt),
        prompt_len=len(prompt),
        max_tokens=max_tokens,
        place=(arrival_index, 0),
        timeout_s=submission.timeout_s,
        queue_timeout_s=submission.queue_timeout_s,
        tpot_s=_target_s("tpot_ms", submission.tpot_ms, config.targets.tpot_ms),
        ttft_s=_target_s("ttft_ms", submission.ttft_ms, config.targets.ttft_ms),
        sampling=params,
        row_sampling=row_sampling,
        early_sampling=replace(row_sampling, banned_token_ids=tuple(sorted(stops))) if params.min_tokens else None,
        stop_token_ids=stops,
        answer_start=len(prompt) - submission.num_answer_tokens,
        priority=submission.priority,
        tenant=submission.tenant,
        prefix_root=root,
        session=session_key(submission.tenant, submission.cache_salt, submission.session),
        adapter=adapter,
        spans=_spans(atomic, inputs, root),
        scoring=None if params.prompt_logprobs is None else Scoring(params.prompt_logprobs),
        pooling=None if submission.pooling is None else Pooling(submission.pooling),
    )
    request.extend_hashes(len(prompt), config.block_size)
    return request


def _spans(atomic: tuple[tuple[int, int], ...], inputs: tuple[SpanInput, ...], root: bytes) -> PromptSpans | None:
    """Return the prompt's spans, or None for text alone, which can be cut anywhere."""
    return PromptSpans(atomic, inputs, place_inputs(inputs, root)) if atomic or inputs else None


def _target_s(param: str, asked_ms: float | None, engine_ms: float | None) -> float:
    """Return a request's target in seconds; infinite if there is none. It cannot be shorter than the engine's own:
    all others would pay for that."""
    if asked_ms is None:
        return math.inf if engine_ms is None else engine_ms / 1000
    if engine_ms is None:
        raise RequestRejected(
            ErrorCode.INVALID_PARAMETER,
            f"{param} is {asked_ms:g}, but this server schedules by no such target (targets.{param}).",
            param,
        )
    if asked_ms < engine_ms:
        raise RequestRejected(
            ErrorCode.INVALID_PARAMETER,
            f"{param} must be >= {engine_ms:g}, this server's own target, but it is {asked_ms:g}.",
            param,
            engine_ms,
            asked_ms,
        )
    return asked_ms / 1000


def _check_prompt(prompt: Sequence[int], params: SamplingParams, config: ResolvedConfig) -> None:
    if not prompt:
        raise RequestRejected(ErrorCode.EMPTY_PROMPT, "The prompt has no tokens.", "prompt", 1, 0)
    _check_ids("prompt", prompt, config.vocab_size)
    longest = config.max_model_len - (params.max_tokens != 0)
    if len(prompt) > longest:
        raise RequestRejected(
            ErrorCode.CONTEXT_LENGTH_EXCEEDED,
            f"This model's maximum context length is {config.max_model_len} tokens, prompt and answer together. "
            f"However, your prompt contains {len(prompt)} input tokens.",
            "prompt",
            config.max_model_len,
            len(prompt),
        )


def _check_controls(params: SamplingParams, stops: frozenset[int], vocab_size: int) -> None:
    """Check that every id is in the vocabulary, something is left to sample, and a grammar's end can end the answer."""
    if params.grammar is not None and params.ignore_eos:
        raise RequestRejected(
            ErrorCode.INVALID_PARAMETER,
            "ignore_eos cannot be combined with a grammar: where the grammar's text ends, the answer does.",
            "ignore_eos",
        )
    _check_ids("logit_bias", [token for token, _ in params.logit_bias], vocab_size)
    _check_ids("allowed_token_ids", params.allowed_token_ids or (), vocab_size)
    for word in params.bad_words:
        _check_ids("bad_words", word, vocab_size)
    banned = {word[0] for word in params.bad_words if len(word) == 1} | (stops if params.min_tokens else set())
    allowed = params.allowed_token_ids
    if len(banned) >= vocab_size if allowed is None else banned.issuperset(allowed):
        param = "stop_token_ids" if allowed is None and not params.bad_words else "allowed_token_ids"
        raise RequestRejected(
            ErrorCode.INVALID_PARAMETER,
            NOTHING_LEFT,
            param,
            vocab_size - 1 if allowed is None else None,
            len(banned),
        )


def _controls(submission: Submission) -> LogitControls | None:
    """Return the controls, or None if the logits stay as they are."""
    params = submission.sampling
    repeats = params.repetition_penalty != 1.0
    controls = LogitControls(
        allowed_token_ids=params.allowed_token_ids,
        logit_bias=params.logit_bias,
        repetition_penalty=params.repetition_penalty,
        prompt_token_ids=tuple(dict.fromkeys(submission.prompt_token_ids)) if repeats else (),
        frequency_penalty=params.frequency_penalty,
        presence_penalty=params.presence_penalty,
        bad_words=params.bad_words,
        grammar=params.grammar,
    )
    return None if controls == LogitControls() else controls


def _check_spans(spans: Sequence[tuple[int, int]], config: ResolvedConfig) -> None:
    longest = max((end - start for start, end in spans), default=0)
    if spans and longest > config.max_atomic_span:
        raise RequestRejected(
            ErrorCode.INVALID_PARAMETER,
            f"atomic_spans holds a span of {longest} tokens, and this engine computes at most {config.max_atomic_span} "
            "in one piece.",
            "atomic_spans",
            config.max_atomic_span,
            longest,
        )


def _check_ids(param: str, token_ids: Sequence[int], vocab_size: int) -> None:
    if token_ids and not (min(token_ids) >= 0 and max(token_ids) < vocab_size):
        bad = next(token for token in token_ids if not 0 <= token < vocab_size)
        raise RequestRejected(
            ErrorCode.INVALID_PARAMETER,
            f"{param} holds token id {bad}, which is out of vocabulary: ids run from 0 to {vocab_size - 1}.",
            param,
            vocab_size - 1,
            bad,
        )


def _resolve_max_tokens(prompt_len: int, asked: int | None, config: ResolvedConfig) -> int:
    max_tokens = config.max_request_tokens - prompt_len if asked is None else asked
    if prompt_len + max_tokens > config.max_model_len:
        raise RequestRejected(
            ErrorCode.CONTEXT_LENGTH_EXCEEDED,
            f"This model's maximum context length is {config.max_model_len} tokens. However, you requested "
            f"{prompt_len + max_tokens} tokens: {prompt_len} in the prompt and {max_tokens} for the answer "
            "(max_tokens).",
            "max_tokens",
            config.max_model_len - prompt_len,
            max_tokens,
        )
    answer = max(max_tokens, 0 if asked == 0 else 1)
    kept = prompt_len + max(answer, 1) - 1  # the last token's KV is never written
    longest = config.max_request_tokens - (asked == 0)  # without an answer there is no such token
    if max_tokens < answer or kept > config.num_kv_blocks * config.block_size:
        raise RequestRejected(
            ErrorCode.KV_CAPACITY_EXCEEDED,
            f"The KV cache of this engine holds requests of up to {longest} tokens. However, you "
            f"requested {prompt_len + answer}: {prompt_len} in the prompt and {answer} for the answer (max_tokens).",
            "prompt" if asked == 0 else "max_tokens",
            longest if asked == 0 else longest - prompt_len,
            prompt_len if asked == 0 else max_tokens,
        )
    return max_tokens

"""Owns the interface between scheduling and execution: what one step computes, and what it returns. Long: every part.
Never holds a tensor or a reference to a live request: a plan is a frozen snapshot that later changes cannot affect."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple, Protocol

from engine.kv_tiers import BlockMove, KvMover, Tier
from engine.lockstep.shape import StepShape
from engine.multimodal_inputs import EncodeJob, PlacedInput
from engine.protocol import ErrorCode, TokenLogprobs

PENDING_TOKEN = -1
"""In a row's token ids: the token that this request sampled in the previous step, which is not read back yet
(overlap). That step's row had no drafts: how many are right decides where the next row starts."""
DRAFT_TOKEN = -2
"""In a decode row's token ids, after the first: a token that the draft model proposes within the step."""


class RowKind(Enum):
    """The explicit kind of a row: a last chunk of one token is not a decode row, though both have length 1."""

    MIDDLE = "middle"
    """A chunk that leaves part of the prompt to compute: samples nothing."""
    LAST = "last"
    """The chunk that completes the prompt: samples the first token, unless max_tokens is 0."""
    DECODE = "decode"
    """Feeds the newest token and its drafts, and samples what follows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitControls:
    """Changes to a row's logits before a token is chosen; `kernels.reference.control_logits` defines them."""

    allowed_token_ids: tuple[int, ...] | None = None
    """No other token is sampled; None allows all."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token, what is added to its logit), each token once."""
    repetition_penalty: float = 1.0
    """The positive logit of a token in the prompt or answer is divided by this, and a negative one multiplied."""
    prompt_token_ids: tuple[int, ...] = ()
    """The tokens that occur in the prompt, each once; empty if nothing depends on them."""
    frequency_penalty: float = 0.0
    """Subtracted for each occurrence of the token in the answer."""
    presence_penalty: float = 0.0
    """Subtracted once if the token occurs in the answer."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Token sequences that the answer may not contain."""
    grammar: str | None = None
    """A grammar for the answer's text, in llguidance's notation. It overrides all of the above."""

    @property
    def penalizes(self) -> bool:
        return self.repetition_penalty != 1.0 or self.frequency_penalty != 0.0 or self.presence_penalty != 0.0

    @property
    def looks_back(self) -> bool:
        """Whether the controls depend on the answer so far."""
        return self.penalizes or self.grammar is not None or any(len(word) > 1 for word in self.bad_words)


@dataclass(frozen=True, slots=True)
class RowSampling:
    """How to choose a token. The random number depends only on (seed, position)."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    banned_token_ids: tuple[int, ...] = ()
    """Never sampled in this step (stop tokens before `min_tokens`)."""
    num_logprobs: int | None = None
    """Number of alternatives to return with the token's log-probability; None: no log-probability."""
    controls: LogitControls | None = None


@dataclass(frozen=True, slots=True)
class PromptScoring:
    """Log-probabilities of prompt tokens that a chunk must return.

        0 .... start .... first .......... first + n ... end        n = len(token_ids)
                          | predicts token_ids |

    Position `first + i` predicts `token_ids[i]`, which is the prompt's token at `first + i + 1`: the first token of a
    prompt has no prediction, and the first of a chunk is predicted by the chunk before.
    """

    first: int
    token_ids: tuple[int, ...]
    num_logprobs: int
    """Number of alternatives to return with each."""


@dataclass(frozen=True, slots=True)
class StateUse:
    """The places of the recurrent state of a hybrid model's row. The state covers every position below `start`."""

    slot: int
    """Read before the row and written after it. A row that starts at 0 starts from the zero state."""
    restore: int | None = None
    """A snapshot to copy into `slot` before any row of the step runs."""
    save: int | None = None
    """Where to copy the state to when all rows of the step have run."""


@dataclass(frozen=True, slots=True)
class RowInputs:
    """The inputs besides text in a row, and their effect on its positions."""

    placed: tuple[PlacedInput, ...]
    """Inputs with tokens in the row, in order. Each was encoded by this step or an earlier one, and not dropped."""
    shift: int = 0
    """The rotary position of the row's start minus the start, if no input covers it."""


class DraftContext(NamedTuple):
    """The part of a request's text that the draft model reads in a step. It already has K and V of all positions
    before.

        0 ......... start .............. end          end = start + len(token_ids)
        | read before | token_ids        |

    If the part reaches the row's newest token, the draft model continues from there.
    """

    start: int
    token_ids: tuple[int, ...]

    @property
    def end(self) -> int:
        return self.start + len(self.token_ids)


class ScheduledRequest(NamedTuple):
    """A row of the step: compute positions [start, start + len(token_ids)) of one request.

    0 ........ start ................. end          end = start + len(token_ids)
    | KV present | token_ids, KV written |
    | block_ids: ceil(end / block_size) or more |

    A row that samples chooses the token at position `end`. A decode row with drafts, [newest, draft 1, ... draft k],
    chooses one for each position from `start + 1` to `end`, up to the first that differs from its draft.

    A tuple, because a step makes hundreds: a frozen dataclass took three times as long, more than half of `commit`.
    """

    request_id: str
    kind: RowKind
    start: int
    token_ids: tuple[int, ...]
    block_ids: tuple[int, ...]
    sampling: RowSampling | None
    """None: nothing is sampled, as for every MIDDLE row."""
    # Only few rows have these.
    scoring: PromptScoring | None = None
    state: StateUse | None = None
    pool_from: int | None = None
    """Return the sum of the final hidden states at positions [pool_from, end); None means no sum."""
    answer: tuple[int, ...] = ()
    """The answer's tokens before this row's drafts, if its controls look back; the last may be PENDING_TOKEN."""
    inputs: RowInputs | None = None
    """None if the row and everything before it is text."""
    adapter: str = ""
    """The digest of the row's adapter, which the executor has; "" means the model without an adapter."""
    draft_context: DraftContext | None = None
    """What the draft model reads before a decode row is computed; with DRAFT_TOKENs, up to the newest token."""

    @property
    def end(self) -> int:
        return self.start + len(self.token_ids)


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One forward pass, with decode rows first, then prefill chunks; and the encoding that its rows need before."""

    step_id: int
    rows: tuple[ScheduledRequest, ...]
    state_moves: tuple[tuple[int, int], ...] = ()
    """(from, to) state slots to copy, in this order, before anything else in the step."""
    dropped: tuple[bytes, ...] = ()
    """Digests of contents whose embeddings are no longer needed; this step may encode them again."""
    encodes: tuple[EncodeJob, ...] = ()
    """Contents to encode, after `dropped` and before the rows. Their embeddings are kept until they are dropped."""
    moves: tuple[BlockMove, ...] = ()
    """Blocks to copy to and from lower tiers, beside the step. The core hands them to the KvMover before the launch; an
    executor does not look at them."""
    tier_drops: tuple[tuple[Tier, bytes], ...] = ()
    """Blocks that tiers forget before these moves."""
    cancelled: tuple[int, ...] = ()
    """Loads of earlier plans that must not write any more when the rows do."""
    joint: StepShape | None = None
    """In lockstep with other ranks: the shape that this forward pass has on all of them. None: the engine is alone."""

    @property
    def num_tokens(self) -> int:
        return sum(len(row.token_ids) for row in self.rows)


@dataclass(frozen=True, slots=True)
class GraphUse:
    """Whether a step replayed a captured graph. `name` is the graph, or the reason why none fitted."""

    hit: bool
    name: str


@dataclass(frozen=True, slots=True)
class RowFailure:
    """Why a row failed alone: its request ends with this code and message."""

    message: str
    code: ErrorCode = ErrorCode.STEP_FAILED


@dataclass(frozen=True, slots=True)
class StepOutput:
    """The results of a step. The mappings are from a row's number to the results that the row asked for."""

    step_id: int
    sampled: tuple[tuple[int, ...], ...]
    """Row i's new tokens: empty for a row that samples nothing and for one that failed."""
    failed: tuple[tuple[int, RowFailure], ...] = ()
    """(row, failure) of rows that failed alone, in row order; the other rows are good."""
    logprobs: Mapping[int, tuple[TokenLogprobs, ...]] = field(default_factory=dict)
    """One for each sampled token."""
    prompt_logprobs: Mapping[int, tuple[TokenLogprobs, ...]] = field(default_factory=dict)
    """One for each token of the row's `scoring`."""
    pooled: Mapping[int, tuple[float, ...]] = field(default_factory=dict)
    """[hidden size], for each row with `pool_from`."""
    drafts: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    """Tokens that may follow the sampled ones, for the next step to verify."""
    graph: GraphUse | None = None
    """None: the executor has no graphs."""
    grammar_s: float = field(default=0.0, compare=False)
    """How long the step waited for grammars, beyond its other work."""


@dataclass(frozen=True, slots=True)
class GrammarRow:
    """A row whose tokens a grammar limits."""

    request_id: str
    grammar: str
    answer: tuple[int, ...]
    """The whole answer before the row's drafts."""
    drafts: tuple[int, ...] = ()


class GrammarError(Exception):
    """A text is not a grammar, or is too complex for the limits. The message is for its author."""


def grammar_rows(plan: StepPlan, newest: Mapping[str, int]) -> list[tuple[int, GrammarRow]]:
    """Return (row number, GrammarRow) for each row with a grammar. `newest` has the token behind each request's
    PENDING_TOKEN. A row that continues from a token that was never sampled has failed, and is left out."""
    grammars = []
    for number, row in enumerate(plan.rows):
        controls = row.sampling.controls if row.sampling is not None else None
        if controls is None or controls.grammar is None:
            continue
        if PENDING_TOKEN in row.answer[-1:] and row.request_id not in newest:
            continue
        drafts = row.token_ids[1:] if row.kind is RowKind.DECODE else ()
        grammars.append((number, GrammarRow(row.request_id, controls.grammar, answer_tokens(row, newest), drafts)))
    return grammars


def answer_tokens(row: ScheduledRequest, newest: Mapping[str, int]) -> tuple[int, ...]:
    """Return `row.answer` with PENDING_TOKEN replaced by the token that was in flight."""
    if row.answer[-1:] != (PENDING_TOKEN,):
        return row.answer
    return (*row.answer[:-1], newest.get(row.request_id, 0))  # a lost row fails alone


class AdapterError(Exception):
    """A directory has no adapter that this model and this engine can use. The message is for the user who named it."""


class AdapterHost(Protocol):
    """An executor's adapters. Any thread may call it while steps run."""

    def read(self, path: str) -> tuple[str, Any]:
        """Read a directory on this machine and return (digest, weights), ready for `keep`.

        Raises:
            AdapterError: it has no usable adapter.
        """

    def keep(self, digest: str, weights: Any) -> None:
        """Keep an adapter's weights, so that rows may name it."""

    def drop(self, digest: str) -> None:
        """Drop an adapter. No row of a later plan names it."""


class RankStatus(Protocol):
    """Several ranks that compute a model together. Any thread may ask."""

    def why_lost(self) -> str | None:
        """Say which rank's process has ended, and how, so that no step can run any more; None while all run."""

    def late_s(self) -> Sequence[float]:
        """Return how many seconds the others have waited for each rank so far, by rank."""


class GrammarCompiler(Protocol):
    """Makes grammars ready before a step needs them. Any thread may call it."""

    def is_compiled(self, grammar: str) -> bool:
        """Return at once whether steps can use the grammar now. If so, it is the latest used of those that are kept."""
        ...

    def compile(self, grammar: str) -> None:
        """Raises:
        GrammarError: it is none, or too complex; the text is for whoever wrote it.
        """
        ...


class TokenMasks(GrammarCompiler, Protocol):
    """What an executor needs of grammars; `engine.batch.grammar.Grammars` implements it."""

    def masks(self, rows: Sequence[GrammarRow]) -> tuple[Any, dict[int, RowFailure]]: ...

    def forced(self, request_id: str, tokens: Sequence[int]) -> tuple[int, ...]: ...

    def forget(self, request_id: str) -> None: ...


class ExecutorFatalError(Exception):
    """Raised by an executor that can run no further step. The engine fails all live requests and becomes unhealthy."""


class RanksEndedError(ExecutorFatalError):
    """Raised once a rank that this one shares a mixture's experts with is lost. The message names it."""


class ExecutorOutOfMemoryError(Exception):
    """Raised by `launch` if memory for a step's activations is lacking. Nothing was computed; a smaller step may
    fit."""


class PaddedSizes(NamedTuple):
    """The numbers of tokens that steps are padded to, ascending, as those of captured CUDA graphs. A step of more
    tokens than the last size is not padded."""

    decode: tuple[int, ...] = ()
    """For steps whose rows are all decode rows of one token."""
    mixed: tuple[int, ...] = ()
    """For all other steps."""

    def padded(self, tokens: int, *, mixed: bool) -> int:
        """Return how many tokens a step of so many computes."""
        sizes = self.mixed if mixed else self.decode
        index = bisect_left(sizes, tokens)
        return sizes[index] if tokens and index < len(sizes) else tokens


UNPADDED = PaddedSizes()


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What an executor can do. A config that needs more is refused at start, not served by something slower."""

    mixed_rows: bool = True
    """Runs decode rows and prefill chunks in one step."""
    overlap: bool = False
    """Accepts PENDING_TOKEN: a step may be launched before the previous one is collected."""
    drafts: bool = False
    """Verifies several tokens in one row, and proposes those that a grammar forces."""
    draft_model: bool = False
    """Has a draft model, which reads `ScheduledRequest.draft_context` and proposes the tokens for DRAFT_TOKEN."""
    recurrent_state: bool = False
    """The model has state besides KV, and the executor follows `StateUse`."""
    grammars: GrammarCompiler | None = None
    """None: it has no grammars."""
    adapters: AdapterHost | None = None
    """None: it has no adapters."""
    sizes: PaddedSizes = UNPADDED
    """What its steps are padded to."""
    kv_mover: KvMover | None = None
    """Moves KV between the device and lower tiers. None: there are no lower tiers."""
    ranks: RankStatus | None = None
    """How the ranks fare that compute the model. None: there is one."""
    lockstep: bool = False
    """Makes the exchanges of `StepPlan.joint`, with rows or without."""


class Executor(Protocol):
    """Runs steps in order. `launch` may return before the work is done; `collect` waits for the oldest launched step.

    A row fails alone if it continues from a failed row of a step that was not read back in time. A plan's `state_moves`
    and restores are done even if the step then fails: they are not requested again. An ordinary exception from either
    method fails only the rows of that plan. After ExecutorOutOfMemoryError, a step with prefill is retried once with
    half of it. ExecutorFatalError ends the engine.

    In lockstep, every plan has a `joint` shape, and `launch` makes all exchanges of that shape, neither more nor fewer:
    also for a plan of no rows, which has no output to collect, and before it raises an ordinary exception. If it cannot
    do so, it raises ExecutorFatalError, and the exchanges of the other ranks fail, as they do after `shutdown`.
    """

    @property
    def capabilities(self) -> Capabilities: ...

    def launch(self, plan: StepPlan) -> None: ...

    def collect(self) -> StepOutput: ...

    def forget(self, request_ids: Sequence[str]) -> None:
        """Drop whatever is kept for these requests, which are gone. The next plan may reuse their blocks."""

    def shutdown(self) -> None: ...

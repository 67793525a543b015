"""Owns the seam between scheduling and execution: what one step computes, and what it returns.
Never holds a tensor or a reference to a live request: a plan is a frozen picture that later mutation cannot change."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from enum import Enum
from typing import Any, NamedTuple, Protocol

from engine.multimodal_inputs import EncodeJob, PlacedInput
from engine.protocol import ErrorCode, TokenLogprobs

PENDING_TOKEN = -1
"""In a row's token ids: what this request sampled in the step before, which is not read back yet (overlap)."""
DRAFT_TOKEN = -2
"""In a decode row's token ids, after its first: what the draft model will propose there, in the step itself."""


class RowKind(Enum):
    """What a row is, said explicitly: a last chunk of one token is not a decode, though both have length 1."""

    MIDDLE = "middle"
    """A chunk that leaves part of the prompt to compute: samples nothing."""
    LAST = "last"
    """The chunk that completes the prompt: samples the first token, unless none was asked for."""
    DECODE = "decode"
    """Feeds the newest token, and what is drafted to follow it, and samples what comes next."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitControls:
    """What is done to a row's logits before a token is chosen; `kernels.reference.control_logits` says how."""

    allowed_token_ids: tuple[int, ...] | None = None
    """No other token is sampled; None: every token may be."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token, what is added to its logit), each token once."""
    repetition_penalty: float = 1.0
    """Divides the logit of a token of prompt or answer where it is positive, and multiplies it where it is not."""
    prompt_token_ids: tuple[int, ...] = ()
    """Which tokens the prompt holds, each once; empty where nothing depends on it."""
    frequency_penalty: float = 0.0
    """Subtracted for each time that the answer holds the token."""
    presence_penalty: float = 0.0
    """Subtracted once where the answer holds the token."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Token sequences that the answer may not contain."""
    grammar: str | None = None
    """What the answer's text may be, in llguidance's notation. It has the last word over all of the above."""

    @property
    def penalizes(self) -> bool:
        return self.repetition_penalty != 1.0 or self.frequency_penalty != 0.0 or self.presence_penalty != 0.0

    @property
    def looks_back(self) -> bool:
        """Whether the answer so far matters."""
        return self.penalizes or self.grammar is not None or any(len(word) > 1 for word in self.bad_words)


@dataclass(frozen=True, slots=True)
class RowSampling:
    """How to choose a token. The random number depends on (seed, position) and nothing else."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    banned_token_ids: tuple[int, ...] = ()
    """Never sampled in this step (stop tokens before `min_tokens`)."""
    num_logprobs: int | None = None
    """Alternatives to return with the token's log-probability; None: no log-probability."""
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
    """Alternatives to return with each."""


@dataclass(frozen=True, slots=True)
class StateUse:
    """Where a row of a hybrid model keeps its recurrent state, which has consumed every position below `start`."""

    slot: int
    """Read before the row and written after it. A row that starts at 0 starts from the zero state."""
    restore: int | None = None
    """A snapshot to copy into `slot` before any row of the step runs."""
    save: int | None = None
    """Where to copy the state to when all rows of the step have run."""


@dataclass(frozen=True, slots=True)
class RowInputs:
    """What stands in a row besides text, and before it."""

    placed: tuple[PlacedInput, ...]
    """Those with tokens in the row, in order; each was encoded by this step or one before, and not dropped."""
    shift: int = 0
    """The rotary position of the row's start less the start, where no input covers it."""


class DraftContext(NamedTuple):
    """What the draft model reads of a request's text in a step; its K and V of all that is before are there.

        0 ......... start .............. end          end = start + len(token_ids)
        | read before | token_ids        |

    Where it reaches the row's newest token, the draft model goes on from there.
    """

    start: int
    token_ids: tuple[int, ...]

    @property
    def end(self) -> int:
        return self.start + len(self.token_ids)


@dataclass(frozen=True, slots=True)
class ScheduledRequest:
    """A row of the step: compute positions [start, start + len(token_ids)) of one request.

    0 ........ start ................. end          end = start + len(token_ids)
    | KV present | token_ids, KV written |
    | block_ids: ceil(end / block_size) or more |

    A row that samples chooses the token at position `end`. A decode row with drafts, [newest, draft 1, ... draft k],
    chooses one for each position from `start + 1` to `end`, up to the first that is not what was drafted for it.
    """

    request_id: str
    kind: RowKind
    start: int
    token_ids: tuple[int, ...]
    block_ids: tuple[int, ...]
    sampling: RowSampling | None
    """None: nothing is sampled, as for every MIDDLE row."""
    _: KW_ONLY
    # What few rows have.
    scoring: PromptScoring | None = None
    state: StateUse | None = None
    pool_from: int | None = None
    """Return the sum of the final hidden states at positions [pool_from, end); None: of none."""
    answer: tuple[int, ...] = ()
    """The answer's tokens before this row's drafts, where its controls look back; the last may be PENDING_TOKEN."""
    inputs: RowInputs | None = None
    """None: the row is text, and so is all before it."""
    adapter: str = ""
    """The digest of the adapter that computes it, which the executor keeps; "": the model as it is."""
    draft_context: DraftContext | None = None
    """Of a decode row, for the draft model, before the row is computed; with DRAFT_TOKENs, up to the newest token."""

    @property
    def end(self) -> int:
        return self.start + len(self.token_ids)


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One forward pass: decode rows first, then prefill chunks; and before it, what its rows need encoded."""

    step_id: int
    rows: tuple[ScheduledRequest, ...]
    state_moves: tuple[tuple[int, int], ...] = ()
    """(from, to) state slots to copy, in this order, before anything else of the step."""
    dropped: tuple[bytes, ...] = ()
    """Digests of contents whose embeddings are not needed any more; they may be encoded again by this step."""
    encodes: tuple[EncodeJob, ...] = ()
    """Contents to have embeddings ready of, after `dropped` and before the rows; kept until they are dropped."""

    @property
    def num_tokens(self) -> int:
        return sum(len(row.token_ids) for row in self.rows)


@dataclass(frozen=True, slots=True)
class GraphUse:
    """Whether a step replayed a captured graph, and which, or why none fitted."""

    hit: bool
    name: str


@dataclass(frozen=True, slots=True)
class RowFailure:
    """Why a row failed alone: its request ends with this code and message."""

    message: str
    code: ErrorCode = ErrorCode.STEP_FAILED


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What a step returns. The mappings are from a row's number to what that row asked for."""

    step_id: int
    sampled: tuple[tuple[int, ...], ...]
    """Row i's new tokens: empty for a row that samples nothing and for one that failed."""
    failed: tuple[tuple[int, RowFailure], ...] = ()
    """(row, why) of rows that failed alone, in row order; the others are good."""
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


@dataclass(frozen=True, slots=True)
class GrammarRow:
    """A row whose tokens a grammar limits."""

    request_id: str
    grammar: str
    answer: tuple[int, ...]
    """All of the answer before the row's drafts."""
    drafts: tuple[int, ...] = ()


class GrammarError(Exception):
    """A text is no grammar, or more complex than the limits allow. The message is for whoever wrote it."""


def grammar_rows(plan: StepPlan, newest: Mapping[str, int]) -> list[tuple[int, GrammarRow]]:
    """(row, what its grammar needs to know). `newest`: the token that a request's PENDING_TOKEN stands for; a row that
    goes on from a token which was never sampled has failed, and is left out."""
    found = []
    for number, row in enumerate(plan.rows):
        controls = row.sampling.controls if row.sampling is not None else None
        if controls is None or controls.grammar is None:
            continue
        if PENDING_TOKEN in row.answer[-1:] and row.request_id not in newest:
            continue
        drafts = row.token_ids[1:] if row.kind is RowKind.DECODE else ()
        found.append((number, GrammarRow(row.request_id, controls.grammar, answer_tokens(row, newest), drafts)))
    return found


def answer_tokens(row: ScheduledRequest, newest: Mapping[str, int]) -> tuple[int, ...]:
    """The answer so far, as `row.answer` has it, with the token that was in flight."""
    if row.answer[-1:] != (PENDING_TOKEN,):
        return row.answer
    return (*row.answer[:-1], newest.get(row.request_id, 0))  # a lost row fails alone


class AdapterError(Exception):
    """A directory holds no adapter that this model and this engine can use. The message is for whoever named it."""


class AdapterHost(Protocol):
    """An executor's adapters: any thread may call it, beside the steps."""

    def read(self, path: str) -> tuple[str, Any]:
        """(the digest, the weights) of a directory on this machine, ready to be kept.

        Raises:
            AdapterError: it holds none that can be used.
        """

    def keep(self, digest: str, weights: Any) -> None:
        """From now on rows may name it."""

    def drop(self, digest: str) -> None:
        """No row of a later plan names it."""


class TokenMasks(Protocol):
    """What an executor asks of grammars; `engine.batch.grammar.Grammars` is the one there is."""

    def compile(self, grammar: str) -> None: ...

    def masks(self, rows: Sequence[GrammarRow]) -> tuple[Any, dict[int, RowFailure]]: ...

    def forced(self, request_id: str, tokens: Sequence[int]) -> tuple[int, ...]: ...

    def forget(self, request_id: str) -> None: ...


class ExecutorFatalError(Exception):
    """Raised by an executor that can run no further step; the engine fails what is live and turns unhealthy."""


class ExecutorOutOfMemoryError(Exception):
    """Raised by `launch` for want of memory for a step's activations: nothing was computed; a smaller step may fit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What an executor can do. A config that needs more is refused at start, not served by something slower."""

    mixed_rows: bool = True
    """Decode rows and prefill chunks in one step."""
    overlap: bool = False
    """PENDING_TOKEN: a step may be launched before the one before it is collected."""
    drafts: bool = False
    """Verifies several tokens in one row, and proposes those that a grammar forces."""
    draft_model: bool = False
    """Has a draft model, which follows `ScheduledRequest.draft_context` and proposes what stands for DRAFT_TOKEN."""
    recurrent_state: bool = False
    """The model has state besides KV, which follows `StateUse`."""
    compile_grammar: Callable[[str], None] | None = None
    """Has a grammar ready before a step needs it, on any thread, or raises GrammarError. None: it keeps to none."""
    adapters: AdapterHost | None = None
    """None: every row is computed by the model as it is."""


class Executor(Protocol):
    """Runs steps in order. `launch` may return before the work is done; `collect` waits for the oldest launched step.

    A row that builds on one that failed, of a step that was not read back in time, fails alone like it.
    A plan's `state_moves` and restores are done whatever then becomes of the step: nobody asks for them again.
    An ordinary exception from either fails the rows of that plan only; after ExecutorOutOfMemoryError a step with
    prefill is tried once more with half of it; ExecutorFatalError ends the engine.
    """

    @property
    def capabilities(self) -> Capabilities: ...

    def launch(self, plan: StepPlan) -> None: ...

    def collect(self) -> StepOutput: ...

    def forget(self, request_ids: Sequence[str]) -> None:
        """These requests are gone: drop whatever is kept for them. Their blocks may be reused by the next plan."""

    def shutdown(self) -> None: ...

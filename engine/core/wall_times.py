"""Owns where each request's wall time in the engine goes, by cause: every step's time is split once, and a request's
phase says what a share of that means for it.
Never reads a clock, and costs nothing for a row that decodes: what many requests share is one sum."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import reduce
from itertools import takewhile
from typing import NamedTuple

from engine.protocol import EngineTimes, TimeCause
from engine.scheduling.planner import PlannedRow
from engine.scheduling.step_prediction import Prediction
from engine.scheduling.step_time import StepWork, chunk_work
from engine.step import RowKind

ORDINARY, LEAST_DEVIATION = 2.5, 0.01
"""Deviations of the prediction by which a step may be late before something else must have slowed it down."""
ASSUMED_WEIGHTS = 32
"""Where nothing was measured, a step is taken to read the weights in the time of so many tokens. A processor needs
less, a GPU more."""
LEAST_S = 1e-6
"""A cause with less time is a rounding error."""


class Shares(NamedTuple):
    """Seconds by what they went to. A step's time is the sum of its shares; the last two are for requests that wait,
    and count the same seconds once more."""

    prompts: float = 0.0
    """Chunks of prompts."""
    answer: float = 0.0
    """One decode row, as if it were the only row."""
    answers: float = 0.0
    """What the other decode rows add."""
    inputs: float = 0.0
    """Encoding inputs, such as images."""
    grammar: float = 0.0
    """Waiting for grammars to say which tokens are allowed."""
    excess: float = 0.0
    """What no row explains: the step took longer than predicted, or failed."""
    for_turn: float = 0.0
    """Time in which the first waiting request was not admitted because others were."""
    for_memory: float = 0.0
    """The same, for lack of memory."""

    def beside_waiting(self, *, for_memory: bool) -> Shares:
        """Return the shares of a step during which requests waited, if any did. `for_memory`: the first of them did.
        What slowed the step down slowed them down as well."""
        seconds = sum(self) - self.excess
        return self._replace(for_memory=seconds) if for_memory else self._replace(for_turn=seconds)

    def plus(self, other: Shares) -> Shares:
        return Shares(*map(sum, zip(self, other, strict=True)))

    def since(self, before: Shares) -> Shares:
        return Shares(*(now - then for now, then in zip(self, before, strict=True)))


class Chunk(NamedTuple):
    """A prompt's chunk in a step."""

    request_id: str
    work: StepWork
    end: int
    """Its end in the prompt."""
    is_last: bool
    """Whether it completes the prompt, after a preemption with the answer so far."""

    @property
    def in_flight(self) -> Chunk:
        """The chunk in a call that launches it alone: its part of the time, while its prompt is as far as before."""
        return self._replace(end=-1, is_last=False)


def chunks_of(rows: Sequence[PlannedRow], epochs: Sequence[int]) -> list[Chunk]:
    """Return the chunks of a step whose requests still have what was computed. `epochs`: those of the rows' requests
    when the step was launched. Takes O(chunks): they stand behind the decode rows."""
    chunks = takewhile(
        lambda pair: pair[0].kind is not RowKind.DECODE, zip(reversed(rows), reversed(epochs), strict=True)
    )
    return [
        Chunk(
            row.request.request_id,
            chunk_work(row.start, row.num_tokens, last=row.kind is RowKind.LAST),
            row.start + row.num_tokens,
            row.kind is RowKind.LAST,
        )
        for row, epoch in chunks
        if row.request.epoch == epoch
    ]


class Phase(Enum):
    PREPARING = "preparing"
    WAITING = "waiting"
    LOADING = "loading"
    PREFILL = "prefill"
    DECODE = "decode"
    PREEMPTED = "preempted"
    """From a preemption until as much is computed again as there was."""


@dataclass(slots=True)
class _Prefill:
    """Seconds of the steps that had a chunk of a request's prompt."""

    own: float = 0.0
    """What its chunks would take alone."""
    beside_prompts: float = 0.0
    beside_answers: float = 0.0
    prompts: float = 0.0
    """`Shares.prompts` of those steps."""
    answers: float = 0.0
    """`Shares.answer` and `Shares.answers` of those steps."""

    def add(self, took: Shares, costs: Costs, number: int) -> None:
        """Add a step, in which chunk `number` is the request's."""
        prompts, answers = took.prompts, took.answer + took.answers
        own = min(costs.chunks[number], costs.whole) / costs.whole if costs.whole > 0 else 1.0
        others = sum(costs.chunks) - costs.chunks[number]
        share = others / (others + costs.rows) if others + costs.rows > 0 else 0.0
        self.own += (prompts + answers) * own
        self.beside_prompts += (prompts + answers) * (1 - own) * share
        self.beside_answers += (prompts + answers) * (1 - own) * (1 - share)
        self.prompts += prompts
        self.answers += answers


@dataclass(slots=True)
class _Account:
    """One live request. Times are seconds of one clock."""

    phase: Phase
    since: float
    """When the phase began."""
    before: Shares
    """The sums at that time."""
    seconds: dict[TimeCause, float]
    """What the earlier phases went to."""
    requests_ahead: int
    tokens_ahead: int
    prefill: _Prefill = field(default_factory=_Prefill)
    aside: Shares = field(default_factory=Shares)
    """Those of the steps in which it had no row because its drafts, or the token before them, were in flight."""
    regained_at: int = 0
    """The end of what a preemption lost, in tokens of the request."""


@dataclass(slots=True)
class WallTimes:
    """The accounts of all live requests, and the shares of all steps so far.

    A change of phase costs O(1), and a step O(its chunks and the rows that stood aside). The time of a phase is exact;
    shares of it are those of the steps in it, each of which may begin a step early or late.
    """

    _sum: Shares = field(default_factory=Shares)
    _last: tuple[float, Shares] = (-math.inf, Shares())
    """When the last step ended, and the sums before it."""
    _accounts: dict[str, _Account] = field(default_factory=dict)

    def open(
        self,
        request_id: str,
        since: float,
        *,
        prepared: bool,
        ahead: tuple[int, int],
        spent: Mapping[TimeCause, float],
    ) -> None:
        """Begin an account. `since`: when the request was handed over. `ahead`: requests and prompt tokens before it.
        `spent`: what was spent on it before `since`."""
        phase = Phase.WAITING if prepared else Phase.PREPARING
        ended, before = self._last
        if since >= ended:  # or else it came while the last step ran, and waited for its end
            before = self._sum
        self._accounts[request_id] = _Account(phase, since, before, dict(spent), *ahead)

    def prepared(self, request_id: str, now: float) -> None:
        """Note that the request waits for its turn from now on. Does nothing for unknown requests."""
        if (account := self._accounts.get(request_id)) is not None and account.phase is Phase.PREPARING:
            self._turn(account, Phase.WAITING, now)

    def loads(self, request_id: str, now: float) -> None:
        """Note that KV of the request's prompt is being loaded. After a preemption that is a part of regaining."""
        account = self._accounts[request_id]
        if account.phase is not Phase.PREEMPTED:
            self._turn(account, Phase.LOADING, now)

    def loaded(self, request_id: str, now: float) -> None:
        """Note that the request waits for its turn again, with its KV or without. Does nothing for unknown requests."""
        if (account := self._accounts.get(request_id)) is not None and account.phase is Phase.LOADING:
            self._turn(account, Phase.WAITING, now)

    def admitted(self, request_id: str, now: float) -> None:
        """Note that the request's first chunk is about to run. After a preemption it only goes on regaining."""
        account = self._accounts[request_id]
        if account.phase is not Phase.PREEMPTED:
            self._turn(account, Phase.PREFILL, now)

    def preempted(self, request_id: str, num_computed: int, now: float) -> None:
        """Note that the request lost what was computed of it, `num_computed` tokens."""
        account = self._accounts[request_id]
        account.regained_at = max(account.regained_at, num_computed)
        self._turn(account, Phase.PREEMPTED, now)

    def step(self, took: Shares, chunks: Sequence[Chunk], costs: Costs, now: float, aside: Sequence[str] = ()) -> None:
        """Add a step that ended now, by its shares and by what its parts were predicted to cost. `aside`: the requests
        that had no row in it for the sake of their own drafts."""
        self._last = now, self._sum
        self._sum = self._sum.plus(took)
        for request_id in aside:
            if (stood := self._accounts.get(request_id)) is not None:
                stood.aside = stood.aside.plus(took)
        for number, chunk in enumerate(chunks):
            account = self._accounts.get(chunk.request_id)
            if account is None:
                continue
            if account.phase is Phase.PREFILL:
                account.prefill.add(took, costs, number)
            if chunk.is_last:
                self._turn(account, Phase.DECODE, now)
            elif account.phase is Phase.PREEMPTED and chunk.end >= account.regained_at:
                self._turn(account, Phase.PREFILL, now)

    def close(self, request_id: str, now: float) -> EngineTimes | None:
        """End the account, and return where the time went; None if there is no such account."""
        if (account := self._accounts.pop(request_id, None)) is None:
            return None
        self._settle(account, now)
        return EngineTimes(account.seconds, account.requests_ahead, account.tokens_ahead)

    def _turn(self, account: _Account, phase: Phase, now: float) -> None:
        self._settle(account, now)
        account.phase, account.since, account.before = phase, now, self._sum
        account.prefill, account.aside = _Prefill(), Shares()

    def _settle(self, account: _Account, now: float) -> None:
        """Divide the time of the phase by what the steps in it went to."""
        elapsed = max(now - account.since, 0.0)
        found = _meaning(account.phase, self._sum.since(account.before), account.prefill, account.aside)
        total = sum(seconds for _, seconds in found)
        if total <= 0:  # no step has ended in it: the first cause is the phase's own
            found, total = [(found[0][0], 1.0)], 1.0
        for cause, seconds in found:
            if (lasted := elapsed * seconds / total) > LEAST_S:
                account.seconds[cause] = account.seconds.get(cause, 0.0) + lasted


def _meaning(phase: Phase, shares: Shares, prefill: _Prefill, aside: Shares) -> list[tuple[TimeCause, float]]:
    """Return what the shares of the steps in a phase mean to a request in it, the phase's own cause first."""
    if phase is Phase.PREPARING:
        return [(TimeCause.INPUTS, 1.0)]
    if phase is Phase.LOADING:
        return [(TimeCause.KV_LOAD, 1.0)]
    if phase is Phase.PREEMPTED:
        return [(TimeCause.PREEMPTION, 1.0)]
    if phase is Phase.WAITING:
        slow = (TimeCause.SLOW_STEPS, shares.excess)
        return [(TimeCause.QUEUE, shares.for_turn), (TimeCause.MEMORY, shares.for_memory), slow]
    common = [
        (TimeCause.INPUTS, shares.inputs),
        (TimeCause.GRAMMAR, shares.grammar),
        (TimeCause.SLOW_STEPS, shares.excess),
    ]
    if phase is Phase.PREFILL:
        prompts = prefill.beside_prompts + max(shares.prompts - prefill.prompts, 0.0)
        answers = prefill.beside_answers + max(shares.answer + shares.answers - prefill.answers, 0.0)
        return [
            (TimeCause.PREFILL, prefill.own),
            (TimeCause.PREFILL_BESIDE_PROMPTS, prompts),
            (TimeCause.PREFILL_BESIDE_ANSWERS, answers),
            *common,
        ]
    own = aside.prompts + aside.answers  # others ran, but it stood aside for its own drafts
    return [
        (TimeCause.DECODE, shares.answer + own),
        (TimeCause.DECODE_BESIDE_PROMPTS, max(shares.prompts - aside.prompts, 0.0)),
        (TimeCause.DECODE_BESIDE_ANSWERS, max(shares.answers - aside.answers, 0.0)),
        *common,
    ]


class Costs(NamedTuple):
    """What a step and its parts were predicted to take: in seconds, or in any other unit where nothing was measured."""

    whole: float
    """All rows."""
    inputs: float
    """Encoding, besides the rows."""
    rows: float
    """The decode rows, if the step had no others; 0 if there are none."""
    answer: float
    """One of them alone, with one token."""
    chunks: tuple[float, ...]
    """Each chunk alone."""
    most: float = math.inf
    """As long as that, in seconds, is within the prediction's own uncertainty."""
    encodes: bool = False
    """Whether it encodes inputs at a cost that nobody has measured: what is not explained went to that."""


def predict(works: Sequence[StepWork], chunks: Sequence[Chunk], prediction: Prediction | None) -> Costs:
    """Predict the parts of a step. `works`: of the step, or of the steps that were read back together; none if it ran
    out of memory. `chunks`: the prompts' part."""
    if not works:
        return Costs(0.0, 0.0, 0.0, 0.0, (), 0.0)
    cost = _assumed if prediction is None else prediction.seconds
    work = reduce(StepWork.plus, works)
    decodes = reduce(StepWork.minus, (chunk.work for chunk in chunks), work)._replace(encoded=0)
    whole = cost(work._replace(encoded=0))
    inputs = cost(work) - whole
    rows = answer = 0.0
    if decodes.tokens:
        count = max(decodes.samples, 1)
        rows = min(cost(decodes), whole) if chunks else whole
        answer = min(cost(StepWork(1, 1, decodes.keys // count, decodes.attended // count)), rows)
    parts = tuple(cost(chunk.work) for chunk in chunks)
    most = math.inf
    if prediction is not None:
        most = (whole + inputs) * (1 + ORDINARY * max(prediction.deviation, LEAST_DEVIATION))
    return Costs(whole, inputs, rows, answer, parts, most, work.encoded > 0 and inputs <= 0)


def split(seconds: float, costs: Costs, *, grammar_s: float = 0.0) -> Shares:
    """Divide a step's time as its parts were predicted. What it takes beyond `costs.most` is excess."""
    grammar_s = min(grammar_s, seconds)
    took, told = seconds - grammar_s, costs.whole + costs.inputs
    excess = took - told if took > costs.most else 0.0
    if told <= 0:
        return Shares(grammar=grammar_s, excess=took)
    scale = (took - excess) / told
    return Shares(
        prompts=(costs.whole - costs.rows) * scale,
        answer=costs.answer * scale,
        answers=(costs.rows - costs.answer) * scale,
        inputs=costs.inputs * scale + (excess if costs.encodes else 0.0),
        grammar=grammar_s,
        excess=0.0 if costs.encodes else excess,
    )


def _assumed(work: StepWork) -> float:
    """The cost of work where nothing was measured, in tokens."""
    return float(ASSUMED_WEIGHTS + work.tokens + work.encoded)

"""Owns a scripted executor: tokens without weights, for tests and demos. Long, because it does all that an executor
can.
Never needs torch. Its KV slots remember what was written, so that a scheduling bug is an error, not odd text."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, MutableSequence, Sequence
from dataclasses import dataclass, replace
from typing import Any

from engine.config import FakeConfig
from engine.fake.adapters import FakeAdapters
from engine.fake.draft_model import FakeDraftModel
from engine.fake.encoder import FakeEncoder
from engine.fake.kv_mover import FakeMover
from engine.protocol import TokenLogprobs
from engine.step import (
    PENDING_TOKEN,
    Capabilities,
    GraphUse,
    RowFailure,
    RowKind,
    RowSampling,
    ScheduledRequest,
    StepOutput,
    StepPlan,
    TokenMasks,
    grammar_rows,
)

_MASK = (1 << 64) - 1


def mix64(value: int) -> int:
    """SplitMix64's finaliser (Steele, Lea, Flood 2014): 64 bits in, 64 well-mixed bits out."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


_CLOSING = tuple(b'",]}')
"""Tokens that end strings, numbers, lists and objects: without favouring them, answers to a grammar would become
long."""

HIDDEN_SIZE = 8

_Masks = Mapping[str, Sequence[Sequence[int]]]
"""Request id -> one mask's words for each sampled position; see TokenMasks."""


class KvMismatchError(Exception):
    """A row builds on KV that is not its own prefix, or that nobody can know yet: a fault of the scheduler or block
    manager."""


@dataclass(frozen=True, slots=True)
class _Slot:
    """What a forward pass left in a KV slot. `digest` covers every token up to and including this one."""

    position: int
    number: int
    """The token's id, or a content's number; see FakeEncoder."""
    digest: int


@dataclass(frozen=True, slots=True)
class _State:
    """A recurrent state that has consumed all positions below `position`; `digest` covers them."""

    position: int
    digest: int


_ZERO_STATE = _State(0, 0)


@dataclass(frozen=True, slots=True)
class _Computed:
    """One row's results."""

    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    prompt_logprobs: tuple[TokenLogprobs, ...]
    drafts: tuple[int, ...]
    pooled: tuple[float, ...] = ()


class FakeExecutor:
    """Answers with a hash of (prefix, seed, position), or with a fixed reply followed by `eos_token_id`.

    Hash tokens depend on the whole prefix as read back through the block table, so that any schedule that gives a
    request the wrong KV changes its answer. A recurrent state, where there is one, must have consumed every position
    once and in order, or the row fails.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        alphabet: Sequence[int],
        *,
        reply: Sequence[int] | None = None,
        eos_token_id: int = 0,
        config: FakeConfig | None = None,
        num_drafts: int = 0,
        verifies: bool = False,
        grammars: TokenMasks | None = None,
        graph_sizes: Sequence[int] = (),
        before_step: Callable[[StepPlan], None] | None = None,
        failing: Callable[[ScheduledRequest], str | None] | None = None,
        verify_prefix: bool = False,
        adapters: FakeAdapters | None = None,
        draft_model: FakeDraftModel | None = None,
        mover: Callable[[MutableSequence[Any], int], FakeMover] | None = None,
    ) -> None:
        """alphabet: the tokens that hashes choose from. num_drafts: how many tokens are proposed after each sampled
        one, a quarter of them wrong. verifies: rows may carry drafts even if nothing here proposes any. grammars: of
        byte tokens; rows with a grammar get the tokens that it forces as drafts. graph_sizes: sizes of decode steps
        that count as captured. before_step: may raise or block, to script a step's failure. failing: says why a row
        fails alone. verify_prefix: check every slot that a row builds on (O(context) a row), not just the newest.
        adapters: None if rows have none. draft_model: fills in the drafts that rows leave open, a quarter of them
        wrong. mover: makes the tiers, given the slots and the block size."""
        self._slots: list[_Slot | None] = [None] * (num_blocks * block_size)
        self._block_size = block_size
        self.mover = None if mover is None else mover(self._slots, block_size)
        self._alphabet = tuple(alphabet)
        self._reply = None if reply is None else tuple(reply)
        self._eos_token_id = eos_token_id
        self._config = config or FakeConfig()
        self._num_drafts = num_drafts
        self._verifies = verifies
        self._grammars = grammars
        self._graph_sizes = sorted(graph_sizes)
        self._before_step = before_step
        self._failing = failing or (lambda row: None)
        self._verify_prefix = verify_prefix
        self._adapters = adapters
        self.draft_model = draft_model
        self._prompt_ends: dict[str, int] = {}  # request id -> position of its first sampled token
        self._newest: dict[str, int] = {}  # request id -> what it sampled last
        self.encoder = FakeEncoder()
        self._states: dict[int, _State] = {}  # by state slot
        self._snapshots: dict[int, _State] = {}
        self._broken: set[str] = set()  # requests with a failed row: rows that build on it fail, too
        self._outputs: deque[StepOutput] = deque()
        self._unread: deque[frozenset[str]] = deque()  # by step in flight, the requests whose drafts it verifies

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(
            overlap=True,
            drafts=self._num_drafts > 0 or self._verifies or self._grammars is not None or self.draft_model is not None,
            draft_model=self.draft_model is not None,
            recurrent_state=self._config.recurrent_state,
            grammars=self._grammars,
            adapters=self._adapters,
            kv_mover=self.mover,
        )

    def launch(self, plan: StepPlan) -> None:
        delay_ms = self._config.step_delay_ms + self._config.token_delay_ms * plan.num_tokens
        if delay_ms:
            time.sleep(delay_ms / 1000)
        self._place_states(plan)
        if self._before_step:
            self._before_step(plan)
        self.encoder.prepare(plan)
        if self.draft_model is not None:
            plan = self.draft_model.fill(plan, self._propose)
        begun = time.perf_counter()
        masks, unmatched = self._read_grammars(plan)
        grammar_s = time.perf_counter() - begun if masks else 0.0
        results = [
            self._fails(row) or unmatched.get(row.request_id) or self._compute(row, masks.get(row.request_id, ()))
            for row in plan.rows
        ]
        self._save_states(plan)
        self._outputs.append(replace(self._output(plan, results), grammar_s=grammar_s))
        drafted = (row.request_id for row in plan.rows if row.kind is RowKind.DECODE and len(row.token_ids) > 1)
        self._unread.append(frozenset(drafted))

    def collect(self) -> StepOutput:
        self._unread.popleft()
        return self._outputs.popleft()

    def forget(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            self._prompt_ends.pop(request_id, None)
            self._newest.pop(request_id, None)
            self._broken.discard(request_id)
            if self._grammars is not None:
                self._grammars.forget(request_id)

    def shutdown(self) -> None:
        if self.mover is not None:
            self.mover.shutdown()
        self._slots.clear()

    def _fails(self, row: ScheduledRequest) -> RowFailure | None:
        if row.request_id in self._broken:
            return RowFailure("The row before it failed.")
        why = self._failing(row)
        if why is None:
            return None
        self._broken.add(row.request_id)
        return RowFailure(why)

    def _output(self, plan: StepPlan, results: Sequence[RowFailure | _Computed]) -> StepOutput:
        done = {i: result for i, result in enumerate(results) if isinstance(result, _Computed)}
        return StepOutput(
            plan.step_id,
            sampled=tuple(done[i].tokens if i in done else () for i in range(len(results))),
            failed=tuple((i, result) for i, result in enumerate(results) if isinstance(result, RowFailure)),
            logprobs={i: row.logprobs for i, row in done.items() if row.logprobs},
            prompt_logprobs={i: row.prompt_logprobs for i, row in done.items() if row.prompt_logprobs},
            pooled={i: row.pooled for i, row in done.items() if row.pooled},
            drafts={i: row.drafts for i, row in done.items() if row.drafts},
            graph=self._graph(plan) if self._graph_sizes else None,
        )

    def _graph(self, plan: StepPlan) -> GraphUse:
        """Count as a GPU executor does: decode steps replay the smallest captured size that holds them."""
        if any(row.kind is not RowKind.DECODE for row in plan.rows):
            return GraphUse(False, "prefill rows")
        size = next((size for size in self._graph_sizes if size >= len(plan.rows)), None)
        return (
            GraphUse(False, f"more than {self._graph_sizes[-1]} rows")
            if size is None
            else GraphUse(True, f"decode {size}")
        )

    # --- KV ---------------------------------------------------------------------------------------------------------

    def _compute(self, row: ScheduledRequest, masks: Sequence[Sequence[int]]) -> _Computed:
        if row.kind is RowKind.DECODE and any(row.request_id in drafted for drafted in self._unread):
            raise KvMismatchError(f"{row.request_id}: where the row starts depends on drafts that are in flight")
        digest = self._read_prefix(row)
        token_ids = row.token_ids if row.token_ids != (PENDING_TOKEN,) else (self._newest[row.request_id],)
        digests = []
        numbers = self.encoder.numbers(row, token_ids)
        if self._adapters is not None:
            numbers = self._adapters.numbers(row, numbers)
        for position, number in enumerate(numbers, row.start):
            digest = mix64(digest ^ mix64(number))
            digests.append(digest)
            self._slots[self._slot_index(row, position)] = _Slot(position, number, digest)
        self._check_state(row)
        computed = self._answer(row, token_ids, digests, masks)
        if row.state is not None:  # it never consumes a rejected draft
            count = len(computed.tokens) if row.kind is RowKind.DECODE else len(digests)
            self._states[row.state.slot] = _State(row.start + count, digests[count - 1])
        return (
            computed if row.pool_from is None else replace(computed, pooled=_pool(digests[row.pool_from - row.start :]))
        )

    def _slot_index(self, row: ScheduledRequest, position: int) -> int:
        return row.block_ids[position // self._block_size] * self._block_size + position % self._block_size

    def _read_prefix(self, row: ScheduledRequest) -> int:
        """Read the KV below `start` through the block table, as attention would, and return its digest."""
        if not self._verify_prefix:
            return self._read_slot(row, row.start - 1).digest if row.start else 0
        digest = 0
        for position in range(row.start):
            slot = self._read_slot(row, position)
            digest = mix64(digest ^ mix64(slot.number))
            if digest != slot.digest:
                raise KvMismatchError(f"{row.request_id}: position {position} was computed after another prefix")
        return digest

    def _read_slot(self, row: ScheduledRequest, position: int) -> _Slot:
        slot = self._slots[self._slot_index(row, position)]
        if slot is None or slot.position != position:
            raise KvMismatchError(f"{row.request_id}: position {position} holds {slot}")
        return slot

    # --- recurrent state --------------------------------------------------------------------------------------------

    def _place_states(self, plan: StepPlan) -> None:
        """Make the copies that come before all else, and that stay even if the step then fails."""
        for source, target in plan.state_moves:
            self._states[target] = self._states.get(source, _ZERO_STATE)
        for row in plan.rows:
            if row.state is not None and row.state.restore is not None:
                self._states[row.state.slot] = self._snapshots[row.state.restore]

    def _check_state(self, row: ScheduledRequest) -> None:
        if row.state is None:
            return
        state = self._states[row.state.slot] if row.start else _ZERO_STATE
        kept = self._read_slot(row, row.start - 1).digest if row.start else 0
        if (state.position, state.digest) != (row.start, kept):
            raise KvMismatchError(
                f"{row.request_id}: the state of slot {row.state.slot} is {state}, not at {row.start}"
            )

    def _save_states(self, plan: StepPlan) -> None:
        for row in plan.rows:
            if row.state is not None and row.state.save is not None:
                self._snapshots[row.state.save] = self._states.get(row.state.slot, _ZERO_STATE)

    # --- answers ----------------------------------------------------------------------------------------------------

    def _answer(
        self,
        row: ScheduledRequest,
        token_ids: Sequence[int],
        digests: Sequence[int],
        masks: Sequence[Sequence[int]],
    ) -> _Computed:
        scores = []
        if row.scoring is not None:
            first = row.scoring.first - row.start
            for digest, token_id in zip(digests[first:], row.scoring.token_ids, strict=False):
                scores.append(self._ranked(digest, token_id, row.scoring.num_logprobs))
        if row.sampling is None:
            return _Computed((), (), tuple(scores), ())
        first = len(token_ids) - 1 if row.kind is RowKind.LAST else 0
        sampled: list[int] = []
        for i in range(first, len(token_ids)):
            mask = masks[i - first] if masks else None
            sampled.append(self._sample(row, digests[i], row.start + i + 1, mask))
            if i + 1 < len(token_ids) and sampled[-1] != token_ids[i + 1]:
                break  # a wrong draft: what follows it was computed in vain
        self._newest[row.request_id] = sampled[-1]
        count = row.sampling.num_logprobs
        chosen = [] if count is None else zip(digests[first:], sampled, strict=False)
        logprobs = tuple(self._logprobs(digest, token, count or 0) for digest, token in chosen)
        last = first + len(sampled) - 1
        if masks:
            drafts = self._forced(row.request_id, sampled)
        else:
            position = row.start + last + 1
            drafts = self._draft(row, digests[last], sampled[-1], position, self._num_drafts)
        return _Computed(tuple(sampled), logprobs, tuple(scores), drafts)

    def _sample(self, row: ScheduledRequest, digest: int, position: int, mask: Sequence[int] | None = None) -> int:
        assert row.sampling is not None
        if self._reply is not None:
            index = position - self._prompt_ends.setdefault(row.request_id, position)
            token = self._reply[index] if index < len(self._reply) else self._eos_token_id
            if mask is None or _allows(mask, token):
                return token
        seed = row.sampling.seed if row.sampling.temperature else 0
        number = mix64(digest ^ mix64(seed ^ mix64(position)))
        choices = self._choices(row.sampling) if mask is None else self._choices_within(mask, row.sampling, number)
        return choices[number % len(choices)]

    def _choices(self, sampling: RowSampling) -> Sequence[int]:
        """The tokens that may be sampled. There are no logits to bias or penalise."""
        banned, allowed = set(sampling.banned_token_ids), self._alphabet
        if (controls := sampling.controls) is not None:
            banned |= {word[0] for word in controls.bad_words if len(word) == 1}
            allowed = controls.allowed_token_ids or allowed
        left = [token for token in allowed if token not in banned] if banned else allowed
        return left or (self._eos_token_id,)

    def _choices_within(self, mask: Sequence[int], sampling: RowSampling, number: int) -> Sequence[int]:
        """The tokens that a grammar allows: a quarter of the time only those that close something, otherwise mostly
        letters."""
        banned = sampling.banned_token_ids
        closing = [t for t in (*_CLOSING, self._eos_token_id) if _allows(mask, t) and t not in banned]
        if closing and mix64(number) % 4 == 0:
            return closing
        letters = [token for token in self._choices(sampling) if _allows(mask, token)]
        return letters or [token for token in range(32 * len(mask)) if _allows(mask, token)]

    # --- grammars ---------------------------------------------------------------------------------------------------

    def _read_grammars(self, plan: StepPlan) -> tuple[_Masks, Mapping[str, RowFailure]]:
        """The masks of rows with a grammar, and the failures of rows that cannot have one."""
        rows = [row for _, row in grammar_rows(plan, self._newest)]
        if not rows:
            return {}, {}
        assert self._grammars is not None
        words, failed = self._grammars.masks(rows)
        masks: dict[str, Sequence[Sequence[int]]] = {}
        first = 0
        for row in rows:
            masks[row.request_id] = words[first : first + 1 + len(row.drafts)].tolist()
            first += 1 + len(row.drafts)
        return masks, {rows[number].request_id: why for number, why in failed.items()}

    def _forced(self, request_id: str, sampled: Sequence[int]) -> tuple[int, ...]:
        assert self._grammars is not None
        return self._grammars.forced(request_id, sampled)

    def _propose(self, row: ScheduledRequest, count: int) -> tuple[int, ...]:
        """The draft model's tokens after the row's newest one."""
        return self._draft(row, self._read_prefix(row), row.token_ids[0], row.start, count)

    def _draft(self, row: ScheduledRequest, digest: int, token_id: int, position: int, count: int) -> tuple[int, ...]:
        """Tokens after `token_id`, which is at `position`, after the text that `digest` covers; about every fourth is
        wrong."""
        drafts: list[int] = []
        for ahead in range(1, count + 1):
            digest = mix64(digest ^ mix64(token_id))
            token_id = self._sample(row, digest, position + ahead)
            drafts.append(self._alphabet[0] if mix64(digest) % 4 == 0 else token_id)
        return tuple(drafts)

    def _logprobs(self, digest: int, token_id: int, count: int) -> TokenLogprobs:
        """A made-up distribution that depends only on the prefix: the same for every schedule."""
        scored = sorted((-self._surprise(digest, token), token) for token in self._alphabet) if count else []
        top = tuple((token, score) for score, token in reversed(scored[-count:])) if count else ()
        return TokenLogprobs(token_id, -self._surprise(digest, token_id), top)

    def _ranked(self, digest: int, token_id: int, count: int) -> TokenLogprobs:
        own = self._surprise(digest, token_id), -token_id
        rank = 1 + sum((self._surprise(digest, token), -token) < own for token in self._alphabet)
        return replace(self._logprobs(digest, token_id, count), rank=rank)

    def _surprise(self, digest: int, token_id: int) -> float:
        return 1.0 + mix64(digest ^ mix64(token_id)) % 1000 / 100


def _pool(digests: Sequence[int]) -> tuple[float, ...]:
    """The sum of made-up hidden states, each a hash of the prefix."""
    return tuple(sum(mix64(digest ^ i) / 2**63 - 1 for digest in digests) for i in range(HIDDEN_SIZE))


def _allows(mask: Sequence[int], token_id: int) -> bool:
    return bool(mask[token_id // 32] >> (token_id % 32) & 1)

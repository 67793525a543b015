"""Owns the use of a draft model: which requests it reads along with, and how many tokens it proposes for each.
Never holds its tensors or sees its tokens: rows say what to read, and leave places for the proposed tokens."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

from engine.config import ResolvedConfig
from engine.scheduling.planner import Plan
from engine.scheduling.request import Request
from engine.speculation.draft_budget import (
    AssumedCosts,
    Beside,
    Costs,
    ModelCosts,
    Wish,
    choose_model_lengths,
    reading_pays,
)
from engine.speculation.speculation import COMMON_MEMORY, COMMON_WEIGHT, OWN_MEMORY, Probes, Record, Turns
from engine.step import DRAFT_TOKEN, DraftContext, RowKind, ScheduledRequest, StepPlan

FIRST_GUESS = 0.6
"""Share of the draft model's tokens assumed to be right before any was verified."""


@dataclass(slots=True)
class Reader:
    """How far the draft model has read a live request, and how well its drafts did."""

    epoch: int = -1
    """The request's epoch when `num_read` was set. A request that loses its blocks also loses the draft model's."""
    num_read: int = 0
    """The draft model's K and V of this many first tokens are in the request's own blocks."""
    record: Record = field(default_factory=lambda: Record(OWN_MEMORY))
    turns: Turns = field(default_factory=Turns)


class Page(NamedTuple):
    """The text that the draft model has read into a block."""

    root: bytes
    """The digest of the text before the block."""
    token_ids: tuple[int, ...]
    """The tokens from the block's first position on."""


class _Candidate(NamedTuple):
    request: Request
    reader: Reader
    chance: float
    most: int

    @property
    def num_unread(self) -> int:
        return len(self.request.token_ids) - self.reader.num_read


class DraftModelPolicy:
    """Decides the draft model's work for the requests of one engine. Call `propose` once a step, after the results of
    the last one; `attach` for the plan that follows; `has_read` and `judge` with its results.

    The draft model's K and V lie in blocks of the same numbers as the model's, in a cache of their own. It reads a
    request only if drafts are expected to pay, so that a full engine does not run it at all. It catches up later, by
    whole blocks, with at most a step's worth of tokens in a step. What it has read into a block outlives the request,
    as the block does: a prefix hit finds both. What one request has had read into a shared block is not read again for
    another, and no two requests read into the same block in one step: kernels may clear what follows the last token
    that they write into a block.
    """

    method: Literal["draft_model"] = "draft_model"

    def __init__(self, config: ResolvedConfig, costs: Costs | None = None) -> None:
        """`costs`: those that were measured; without them they are assumed."""
        settings = config.speculative
        assert settings.free_tokens is not None, "it is resolved"
        assert settings.model_cost is not None, "it is resolved"
        self._settings = settings
        self._block_size = config.block_size
        self._most_read = config.max_num_batched_tokens
        self._most_tokens = config.max_drafting_tokens
        self._costs = costs or AssumedCosts(settings.free_tokens)
        self._drafter = ModelCosts(settings.model_cost, self._costs)
        self._readers: dict[str, Reader] = {}  # by request id
        self._common = Record(COMMON_MEMORY)
        self._probes = Probes()
        self._due: dict[str, int] = {}  # request id -> up to where its next decode row lets the draft model read
        self._pages: dict[int, Page] = {}  # by block
        self._may_pay: dict[int, bool] = {}  # by the number of decode rows

    def judge(self, request: Request, num_drafted: int, num_accepted: int) -> None:
        """Record that `num_accepted` of the `num_drafted` tokens of the request's last row were right."""
        reader = self._readers[request.request_id]
        reader.record.add(0, num_drafted, num_accepted)
        self._common.add(0, num_drafted, num_accepted)
        reader.turns.judge(num_accepted)

    def forget(self, request_id: str) -> None:
        self._readers.pop(request_id, None)

    def reader_of(self, request: Request) -> Reader | None:
        """The request's reader; None if nothing of it is read, or only into blocks that it has lost since."""
        reader = self._readers.get(request.request_id)
        return reader if reader is not None and reader.epoch == request.epoch else None

    # --- what to draft ----------------------------------------------------------------------------------------------

    def propose(self, decoding: Collection[Request]) -> list[tuple[Request, tuple[int, ...]]]:
        """Places for drafted tokens, by request, for requests that have no drafts forced by a grammar. () takes back
        places that no step has used."""
        self._due = {}
        places = dict.fromkeys(
            (r.request_id for r in decoding if r.drafts is not None and r.drafts.method == self.method), 0
        )
        if decoding and self._pays_beside(len(decoding)):
            places |= self._choose(decoding)
        return [(r, (DRAFT_TOKEN,) * places[r.request_id]) for r in decoding if r.request_id in places]

    def _pays_beside(self, num_rows: int) -> bool:
        """Whether drafts could pay in a step of `num_rows` decode rows if all of them were right."""
        if not self._settings.adaptive:
            return True
        if num_rows not in self._may_pay:
            wishes = [Wish(1.0, self._settings.num_tokens)] * num_rows
            lengths = choose_model_lengths(
                wishes, Beside(num_rows, 0, 0), self._most_tokens, self._costs, self._drafter
            )
            self._may_pay[num_rows] = any(lengths)
        return self._may_pay[num_rows]

    def _choose(self, decoding: Collection[Request]) -> dict[str, int]:
        """How many tokens to draft for each request that gets any. Also notes in `_due` what has to be read for
        that."""
        candidates, num_forced, num_bare = [], 0, 0
        for request in decoding:
            if request.drafts is not None and request.drafts.method != self.method:
                num_forced += len(request.drafts.token_ids)
            elif candidate := self._candidate(request):
                candidates.append(candidate)
            else:
                num_bare += 1
        if not candidates:
            return {}
        beside = Beside(len(decoding), num_forced, num_bare)
        places, left, taken = {}, self._most_read, set[int]()
        for (request, reader, *_), length in zip(candidates, self._lengths(candidates, beside), strict=True):
            end = self._end_of_reading(request, reader.num_read, left, taken) if length else reader.num_read
            if end > reader.num_read:
                self._due[request.request_id] = end
                left -= end - reader.num_read
            if end == len(request.token_ids):
                places[request.request_id] = length
        return places

    def _end_of_reading(self, request: Request, start: int, left: int, taken: set[int]) -> int:
        """The end of what is read of a request from `start` on, at most `left` tokens. Stops before a block of `taken`,
        which another request reads into in this step, and before one that was read for another; adds the blocks that
        are read into to `taken`.

        A text that is not read to its end is read to the end of a block: behind that, another request may have read on.
        """
        size, end = self._block_size, min(len(request.token_ids), start + left)
        if end < len(request.token_ids) and self._most_read >= size:
            end = max(end // size * size, start)
        for number in range(start // size, -(-end // size)):
            if number < len(request.block_ids):
                block = request.block_ids[number]
                if block in taken or (number * size > start and self._is_read(request, number)):
                    return max(start, number * size)
                taken.add(block)
        return end

    def _is_read(self, request: Request, number: int) -> bool:
        """Whether the whole of a request's block was read for another."""
        page, begin = self._pages.get(request.block_ids[number]), number * self._block_size
        text = tuple(request.token_ids[begin : begin + self._block_size])
        return page == Page(_root(request, number) or b"", text) and len(text) == self._block_size

    def _candidate(self, request: Request) -> _Candidate | None:
        """None if the answer has too few tokens left for what the draft model would have to read, or ends with its next
        token."""
        most = min(self._settings.num_tokens, request.most_drafts)
        if most <= 0:
            return None
        reader = self._readers.setdefault(request.request_id, Reader())
        if reader.epoch != request.epoch:
            reader.epoch, reader.num_read = request.epoch, 0
        reader.num_read = self._read_for(request, reader.num_read)
        chance = reader.record.chance(0, self._common.chance(0, FIRST_GUESS, COMMON_WEIGHT), COMMON_WEIGHT)
        candidate = _Candidate(request, reader, chance, most)
        num_left = request.max_tokens - request.num_output
        if self._settings.adaptive and not reading_pays(candidate.num_unread, num_left, chance, self._drafter):
            return None
        return candidate

    def _read_for(self, request: Request, num_read: int) -> int:
        """How many of a request's tokens are read: the first `num_read`, and what was read for others into blocks that
        it shares. Never includes the newest token."""
        size = self._block_size
        while (number := num_read // size) < len(request.block_ids):
            page, begin = self._pages.get(request.block_ids[number]), number * size
            if page is None or page.root != _root(request, number):
                break
            end = begin + _common_length(page.token_ids, request.token_ids[begin : begin + size])
            if end <= num_read:
                break
            num_read = end
        return min(num_read, len(request.token_ids) - 1)

    def _lengths(self, candidates: list[_Candidate], beside: Beside) -> list[int]:
        room = max(0, self._most_tokens - beside.num_rows - beside.num_forced)
        if not self._settings.adaptive:
            return [max(0, min(candidate.most, room // len(candidates))) for candidate in candidates]
        wishes = [Wish(candidate.chance, candidate.most) for candidate in candidates]
        lengths = choose_model_lengths(wishes, beside, room, self._costs, self._drafter)
        self._probes.add([candidate.reader.turns for candidate in candidates], lengths, room)
        return lengths

    # --- what is read for it ----------------------------------------------------------------------------------------

    def passes_for(self, plan: Plan) -> tuple[int, int]:
        """Return (the draft model's passes, the tokens of the first) in the step that committing this plan would
        launch. Changes nothing."""
        passes = tokens = 0
        for row in plan.rows if self._due else ():
            end = self._due.get(row.request.request_id, 0) if row.kind is RowKind.DECODE else 0
            if end:
                drafts = row.request.drafts
                drafted = drafts is not None and drafts.method == self.method
                passes = max(passes, 1, row.num_tokens - 1 if drafted else 0)
                tokens += end - self._readers[row.request.request_id].num_read
        return passes, tokens

    def attach(self, plan: Plan, step: StepPlan) -> StepPlan:
        """Return the step with decode rows that say what the draft model reads first."""
        if not self._due:
            return step
        rows = zip(plan.rows, step.rows, strict=True)
        return replace(step, rows=tuple(self._with_reading(planned.request, row) for planned, row in rows))

    def _with_reading(self, request: Request, row: ScheduledRequest) -> ScheduledRequest:
        end = self._due.get(request.request_id, 0) if row.kind is RowKind.DECODE else 0
        drafted = DRAFT_TOKEN in row.token_ids
        assert end == row.start + 1 or not drafted, f"{request.request_id}: drafts of a text that is not read"
        if not end:
            return row
        start = self._readers[request.request_id].num_read
        written = max(end, row.end - 1) if drafted else end  # the last proposed token is not read
        for number in range(start // self._block_size, -(-written // self._block_size)):
            if page := self._pages.pop(row.block_ids[number], None):
                kept = page.token_ids[: max(0, start - number * self._block_size)]
                self._pages[row.block_ids[number]] = Page(page.root, kept)
        return row._replace(draft_context=DraftContext(start, tuple(request.token_ids[start:end])))

    def has_read(self, request: Request, row: ScheduledRequest, num_sampled: int) -> None:
        """Note what the draft model has read for a row that gave `num_sampled` tokens. Its K and V of accepted drafts
        are valid, except for the last proposed token, which it did not read."""
        if row.draft_context is None:
            return
        reader, end = self._readers[request.request_id], row.draft_context.end
        if DRAFT_TOKEN in row.token_ids:
            end += min(num_sampled - 1, len(row.token_ids) - 2)
        for number in range(reader.num_read // self._block_size, -(-end // self._block_size)):
            if (root := _root(request, number)) is not None:
                begin = number * self._block_size
                text = tuple(request.token_ids[begin : min(end, begin + self._block_size)])
                self._pages[request.block_ids[number]] = Page(root, text)
        reader.num_read = end


def _root(request: Request, number: int) -> bytes | None:
    """The digest of the text before block `number`; None if that is not hashed yet."""
    if not number:
        return request.prefix_root
    return request.block_hashes[number - 1] if number <= len(request.block_hashes) else None


def _common_length(left: Sequence[int], right: Sequence[int]) -> int:
    """The length of the longest common beginning."""
    count = 0
    while count < min(len(left), len(right)) and left[count] == right[count]:
        count += 1
    return count

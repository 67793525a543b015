"""Owns the engine that leads ranks with requests of their own: callers see one, and each request is served by one rank.
Never moves a request from one rank to another, and never runs a step of another rank."""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from engine.async_engine import AsyncEngine
from engine.core.core import EngineCore
from engine.parallel.group_ranks import GroupRanks
from engine.parallel.line import Line
from engine.parallel.loads import summed, with_unseen
from engine.parallel.places import Places
from engine.parallel.processes import Followers
from engine.parallel.rank_messages import Abort, Answer, Ask, Drain, End, Left, Opened, Question, Stepped, Submit, Told
from engine.protocol import TERMINAL, Event, FinishReason, LoadSnapshot, Submission, Token
from kernels.collectives.group import LEADER

logger = logging.getLogger(__name__)

_END_S = 10.0
"""How long a rank may take to end once it was told."""
_FIRST_S = 60.0
"""The most that a rank's first word is waited for: the engine is not wrong without it, but seems smaller."""


class LeadingEngine(AsyncEngine):
    """The first rank's engine, and the way to the others'. They end together, when one is shut down, fails, dies or
    does not arrive."""

    def __init__(self, core: EngineCore, ranks: GroupRanks, followers: Followers) -> None:
        """followers: the processes of the other ranks; they end with the engine. See `connect`."""
        self._lines: Mapping[int, Line] = {}
        self._group_ranks = ranks
        self._followers = followers
        self._places = Places(ranks.size, core.config)
        self._loads: dict[int, LoadSnapshot] = {}  # of other ranks
        self._heard_of = threading.Semaphore(0)  # released once by each other rank
        self._answers: dict[int, Callable[[Any], object]] = {}
        self._numbers = itertools.count()
        self._handing_out = threading.Lock()
        super().__init__(core, ranks)

    def connect(self, lines: Mapping[int, Line]) -> None:
        """Use these lines from now on, whose messages go to `hear` and whose ends to `lose`. Wait until each rank has
        said what it has. lines: by rank."""
        self._lines = lines
        for line in lines.values():
            line.start()
        self._followers.tell(self.lose_process)
        for _ in lines:
            self._heard_of.acquire(timeout=_FIRST_S)

    # --- callers' side: see AsyncEngine -------------------------------------------------------------------------------

    def _hand_over(self, submission: Submission, submit: Callable[[], list[Event]]) -> None:
        """Give a request to its rank."""
        keys = self._places.keys(submission)
        with self._handing_out:
            rank = self._places.place(submission, keys)
        if rank == LEADER:
            super()._hand_over(submission, submit)
        else:
            self._lines[rank].send(Submit(submission))

    @property
    def _num_ranks(self) -> int:
        return self._group_ranks.size

    def abort(self, request_id: str, reason: FinishReason = FinishReason.ABORT) -> None:
        rank = self._places.rank_of(request_id)
        if rank is None or rank == LEADER:
            super().abort(request_id, reason)
        else:
            self._lines[rank].send(Abort(request_id, reason))

    def load(self) -> LoadSnapshot:
        given = self._places.counts
        loads = {LEADER: super().load(), **self._loads}
        load = summed([with_unseen(load, given[rank]) for rank, load in loads.items()])
        return replace(load, rank_late_s=tuple(self._group_ranks.late_s))

    async def cached_digests(self, limit: int) -> list[bytes]:
        found = [await super().cached_digests(limit), *await self._ask(Question.CACHED_DIGESTS, limit)]
        # By turns, for the heads of each rank's prefixes. Fewer than `limit` are all: so no rank's share is cut before.
        by_turns = itertools.chain.from_iterable(itertools.zip_longest(*found))
        return [digest for digest in by_turns if digest is not None][:limit]

    async def reset_prefix_cache(self) -> int:
        dropped = [await super().reset_prefix_cache(), *await self._ask(Question.RESET_PREFIX_CACHE)]
        with self._handing_out:
            self._places.forget_prefixes()
        return sum(map(int, dropped))

    async def drain(self) -> None:
        self._draining = True  # before ranks are told, which then refuse what is given to them
        for line in self._lines.values():
            line.send(Drain())
        await super().drain()

    def shutdown(self) -> None:
        self._followers.expect_end()
        super().shutdown()
        for line in self._lines.values():
            line.send(End())
        self._followers.end(_END_S)
        for line in self._lines.values():
            line.close()
        self._lines = {}

    async def _ask(self, question: Question, *arguments: int) -> list[Any]:
        """Return the answers of all other ranks.

        Raises:
            EngineError: a rank is lost.
        """
        return [await self._ask_rank(line, question, arguments) for line in self._lines.values()]

    async def _ask_rank(self, line: Line, question: Question, arguments: tuple[int, ...]) -> Any:
        loop, number = asyncio.get_running_loop(), next(self._numbers)
        answer: asyncio.Future[Any] = loop.create_future()

        def give(result: Any) -> None:
            with suppress(RuntimeError):  # the loop was closed, so nobody waits
                loop.call_soon_threadsafe(answer.set_result, result)

        self._answers[number] = give
        try:
            line.send(Ask(number, question, arguments))
            while not answer.done():  # polled, because a lost rank never answers
                self._check_alive()
                await asyncio.wait([answer], timeout=0.1)
            return answer.result()
        finally:
            self._answers.pop(number, None)

    # --- the lines' threads -------------------------------------------------------------------------------------------

    def hear(self, rank: int, message: Any) -> None:
        """Take what a rank says, and pass on what is for all."""
        match message:
            case Opened(round=number):
                self._group_ranks.opened(number)
                self.tell(message, but=rank)
            case Left(reason=reason):
                self._group_ranks.lose(reason)
                self.tell(message, but=rank)
            case Told(events=events, load=load):
                self._take_load(rank, load)
                self._hand_out(events)
            case Stepped(facts=facts, events=events, age_s=age_s):
                # At once, and before its events are told: a step of this rank may last longer than a gap of that one's.
                self._tell_observer(replace(facts, started=time.monotonic() - age_s), events)
            case Answer(number=number, result=result):
                if (give := self._answers.pop(number, None)) is not None:
                    give(result)

    def _take_load(self, rank: int, load: LoadSnapshot) -> None:
        is_first = rank not in self._loads
        self._loads[rank] = load
        if is_first:
            self._heard_of.release()

    def lose(self, rank: int, error: str | None) -> None:
        """A rank's line has ended: end all others. error: see Line."""
        if rank not in self._loads:
            self._heard_of.release()
        self._end_all(f"Rank {rank} has died" if error is None else f"the line to rank {rank} has failed: {error}")

    def lose_process(self, rank: int, how: str) -> None:
        """A rank's process has ended: end all others. Its line says so, too, unless its machine is gone. Any thread."""
        logger.error("%s", how)
        self._end_all(f"Rank {rank} has died: {how}")

    def _end_all(self, reason: str) -> None:
        self._group_ranks.lose(reason)
        self.tell(Left(reason))

    def tell(self, message: Opened | Left, but: int = LEADER) -> None:
        """Tell the other ranks."""
        for rank, line in self._lines.items():
            if rank != but:
                line.send(message)

    def _hand_out(self, events: Sequence[Event]) -> None:
        """One thread at a time: a request that fails here because its rank is lost may just have ended there."""
        with self._handing_out:
            for event in events:
                if isinstance(event, Token):
                    self._places.began(event.request_id)
                elif isinstance(event, TERMINAL):
                    self._places.ended(event.request_id)
            super()._hand_out(events)  # last: who reads that a request has ended no longer finds it in the load

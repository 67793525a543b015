"""Merges the choices of one response, the answers to each of its prompts, into one stream of pieces.
Never lets a choice go on when another has failed: a response is complete, or an error."""

from __future__ import annotations

import asyncio
import math
from array import array
from collections.abc import AsyncGenerator, Callable, Collection, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from itertools import accumulate

from engine.protocol import Usage
from serve_app.api.generation.completion import Completion, Piece
from serve_app.api.generation.submission import Prepared
from serve_app.api.openai.response import Prompt
from serve_app.engines.engine_client import Move, StreamRecord
from serve_app.errors.api_error import ApiError

MAX_AT_ONCE = 128
"""The most prompts of one request that the engines have at the same time. Only embeddings have more."""
_GROUPS_AT_ONCE = 64
"""Prompts whose completions are made in about a millisecond."""

Indexed = tuple[int, Piece]
"""A piece, and the index of its choice."""


@dataclass(frozen=True, slots=True)
class _Over:
    """Marks the end of a choice. `error`: why it failed, if it did."""

    error: Exception | None = None


class Choices:
    """Holds the completions of all prompts. `groups` has those of each prompt; choice i is the i-th over all groups."""

    def __init__(self, groups: Sequence[Sequence[Completion]]) -> None:
        self._groups = groups
        self._all = [completion for group in groups for completion in group]
        self._firsts = list(accumulate(map(len, groups[:-1]), initial=0))
        """The index of each prompt's first choice."""
        self._turns = asyncio.Semaphore(MAX_AT_ONCE)
        self.error: ApiError | None = None
        """The error that ended the stream after it had begun."""

    @classmethod
    async def of(cls, prepared: Iterable[Sequence[Prepared]], completion: Callable[[Prepared], Completion]) -> Choices:
        """Make the completion of each answer, without holding the event loop: there may be two thousand prompts."""
        groups = list[list[Completion]]()
        for group in prepared:
            groups.append([completion(ready) for ready in group])
            if not len(groups) % _GROUPS_AT_ONCE:
                await asyncio.sleep(0)
        return cls(groups)

    def __len__(self) -> int:
        return len(self._all)

    @property
    def prompts(self) -> list[Prompt]:
        """The prompt of each choice, with its scores once they are known."""
        return [Prompt(completion.submission.prompt_token_ids, completion.prompt_scores) for completion in self._all]

    @property
    def vectors(self) -> list[array[float]]:
        """The vector of each choice, for prompts that are pooled."""
        return [completion.vector for completion in self._all]

    @property
    def usage(self) -> Usage:
        """The usage of all choices. A prompt counts once, whatever the number of its answers."""
        return self.usage_without(())

    def usage_without(self, indices: Collection[int]) -> Usage:
        """The usage without the answers of some choices."""
        leaders = [group[0].usage for group in self._groups]
        return Usage(
            sum(usage.prompt_tokens for usage in leaders),
            sum(one.usage.completion_tokens for number, one in enumerate(self._all) if number not in indices),
            sum(usage.cached_tokens for usage in leaders),
        )

    @property
    def constrained_by(self) -> str:
        """The field from which the answers' grammar was made."""
        return self._all[0].constrained_by or "body"

    @property
    def reasoning_tokens(self) -> int | None:
        """The thoughts' tokens of all choices; None if the model does not mark its thoughts."""
        return self.reasoning_tokens_without(())

    def reasoning_tokens_without(self, indices: Collection[int]) -> int | None:
        """The thoughts' tokens without the answers of some choices."""
        counts = [completion.reasoning_tokens for completion in self._all]
        if None in counts:
            return None
        return sum(count or 0 for number, count in enumerate(counts) if number not in indices)

    @property
    def finish_reasons(self) -> list[str | None]:
        """The finish reason of each choice; None if it is not complete."""
        return [completion.finish_reason for completion in self._all]

    @property
    def moves(self) -> list[Move]:
        """The moves of all choices between engines, in order of time."""
        moves = (move for completion in self._all for move in completion.record.moves)
        return sorted(moves, key=lambda move: move.at)

    @property
    def last_records(self) -> tuple[StreamRecord, StreamRecord | None]:
        """That of the choice that was complete last, or of one that is not, if there is one; and that of the first
        choice of the same prompt, if it is another."""
        given = [(one, group) for group in self._groups for one in group if one.record.given is not None]
        if not given:
            return self._all[0].record, None

        def returned(one: Completion) -> float:
            return math.inf if one.record.returned is None else one.record.returned

        last, group = max(given, key=lambda pair: returned(pair[0]))
        return last.record, None if group[0] is last else group[0].record

    def pieces(self) -> AsyncGenerator[Indexed, None]:
        """Yield the pieces of all choices as they come. Closing this generator aborts the choices that have not ended.

        The first comes when the engine has accepted every prompt.

        Raises:
            EngineError, ApiError: before the first piece, or between two.
        """
        return self._merged() if len(self._all) > 1 else self._only()

    async def whole(self) -> list[Piece]:
        """Read every choice to its end, and return each as one piece."""
        by_choice: list[list[Piece]] = [[] for _ in self._all]
        async with aclosing(self.pieces()) as pieces:
            async for index, piece in pieces:
                by_choice[index].append(piece)
        return [_joined(pieces) for pieces in by_choice]

    async def _only(self) -> AsyncGenerator[Indexed, None]:
        async with aclosing(self._all[0].pieces()) as pieces:
            async for piece in pieces:
                yield 0, piece

    async def _merged(self) -> AsyncGenerator[Indexed, None]:
        # A choice waits while its last piece has not been taken, so that nothing is computed far ahead of the client.
        news: asyncio.Queue[tuple[int, Piece | _Over]] = asyncio.Queue(len(self._all))
        tasks = [asyncio.ensure_future(self._pump_group(number, news)) for number in range(len(self._groups))]
        try:
            async for indexed in self._read(news):
                yield indexed
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _read(self, news: asyncio.Queue[tuple[int, Piece | _Over]]) -> AsyncGenerator[Indexed, None]:
        """Hold pieces back until every prompt was accepted, because refusing one refuses the whole request."""
        awaited = set(self._firsts)
        held: list[Indexed] = []
        num_open = len(self._all)
        while num_open:
            index, item = await news.get()
            if isinstance(item, _Over):
                if item.error is not None:
                    raise item.error
                num_open -= 1
                continue
            awaited.discard(index)
            held.append((index, item))
            if not awaited:
                for indexed in held:
                    yield indexed
                held.clear()

    async def _pump_group(self, number: int, news: asyncio.Queue[tuple[int, Piece | _Over]]) -> None:
        """Run the first completion ahead of the others, so that they find its computed prompt in the prefix cache."""
        first = self._firsts[number]
        others = range(first + 1, first + len(self._groups[number]))
        computed = asyncio.Event()
        async with self._turns:
            tasks = [asyncio.ensure_future(self._pump(first, computed, news))]
            try:
                if others:
                    await computed.wait()
                    tasks += [asyncio.ensure_future(self._pump(index, computed, news)) for index in others]
                await asyncio.gather(*tasks)
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    async def _pump(self, index: int, computed: asyncio.Event, news: asyncio.Queue[tuple[int, Piece | _Over]]) -> None:
        completion = self._all[index]
        error: Exception | None = None
        try:
            async with aclosing(completion.pieces()) as pieces:
                async for piece in pieces:
                    await news.put((index, piece))
                    if completion.usage.completion_tokens:
                        computed.set()
        except Exception as caught:  # noqa: BLE001 - raised again where the pieces are read
            error = caught
        computed.set()
        await news.put((index, _Over(error)))


def _joined(pieces: Sequence[Piece]) -> Piece:
    tokens = None if pieces[-1].tokens is None else tuple(token for piece in pieces for token in piece.tokens or ())
    return replace(pieces[-1], text="".join(piece.text for piece in pieces), tokens=tokens)

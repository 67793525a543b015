"""Owns the sending of a plan's requests in a simulation: at their due times, or by clients that wait for answers.
Never measures. It does to a simulated world what loadtest.driver does to a server, with the same seeds and windows."""

from __future__ import annotations

import asyncio
import itertools
import random
import zlib
from dataclasses import dataclass

from loadtest.plan import Ask, Closed, Open, Plan, Point, Replay
from loadtest.sim.executor import FIRST
from loadtest.sim.workload import Job
from loadtest.sim.world import World
from loadtest.timeline import OK, Timeline


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a source's answers go in the tally."""

    point: str
    kind: str
    window: tuple[float, float]


class PlanDriver:
    """Sends a plan's requests to a world and records the answers in the world's tally."""

    def __init__(self, plan: Plan, world: World, seed: int) -> None:
        self._plan, self._world, self._seed = plan, world, seed
        self._now = world.loop.time
        self._numbers = itertools.count()

    async def run(self) -> None:
        """Run all points in turn. A point ends when its last answer has ended."""
        for number, point in enumerate(self._plan.points):
            await self._run_point(point, f"{self._seed} {number}")

    async def _run_point(self, point: Point, seed: str) -> None:
        begin = self._now()
        window = (begin + point.warm_up_s, begin + point.seconds)
        self._world.tally.open_window(point.name, point.seconds - point.warm_up_s)
        async with asyncio.TaskGroup() as group:
            for source in point.sources:
                place = _Place(point.name, source.kind, window)
                if isinstance(source, Closed):
                    for client in range(source.clients):
                        group.create_task(self._run_client(source, f"{seed} {client}", place))
                else:
                    group.create_task(self._send(source, seed, place, begin, group))

    async def _send(
        self, source: Open | Replay, seed: str, place: _Place, begin: float, group: asyncio.TaskGroup
    ) -> None:
        for at, request in source.due(seed, 0, 1):
            if (wait_s := begin + at - self._now()) > 0:
                await asyncio.sleep(wait_s)
            group.create_task(self._ask(request, place))

    async def _run_client(self, source: Closed, seed: str, place: _Place) -> None:
        draw = random.Random(f"{seed} think")
        numbers = itertools.count()
        while self._now() < place.window[1]:
            said: list[dict[str, str]] = []
            for _ in range(source.turns):
                request = source.next_ask(seed, next(numbers), said)
                answer = await self._ask(request, place)
                if source.turns > 1:
                    said = [*request.body["messages"], {"role": "assistant", "content": _text_of(answer)}]
                await asyncio.sleep(source.thought_s(draw, answer))
                if answer.outcome != OK or self._now() >= place.window[1]:
                    break

    async def _ask(self, request: Ask, place: _Place) -> Timeline:
        answer = await self._world.serve(job_of(request), next(self._numbers))
        self._world.tally.record(place.point, place.kind, answer, place.window, request.asked_tokens)
        return answer


def job_of(request: Ask) -> Job:
    """Turn a request into a job with a token for each word, so that prompts with the same first words share a
    prefix."""
    messages = request.body.get("messages") or [{"content": request.body["prompt"]}]
    words = [word for message in messages for word in message["content"].split()]
    tokens = tuple(FIRST + zlib.crc32(word.encode()) for word in words)
    return Job(0.0, len(tokens), request.body["max_tokens"], words=tokens)


def _text_of(answer: Timeline) -> str:
    """Make a text of as many words as there were tokens. Its tokens differ from those in the KV cache, so an answer
    that returns in a later prompt is not found there."""
    return " ".join(["word"] * answer.output_tokens)

"""Owns the sending of a plan's requests in a simulation: at their due times, or by clients that wait for answers.
Never measures: what loadtest.driver does to a server, it does to a world, by the same seeds and in the same windows."""

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
    """Of a source's answers in the tally."""

    point: str
    kind: str
    window: tuple[float, float]


class PlanDriver:
    """Answers go to the world's tally."""

    def __init__(self, plan: Plan, world: World, seed: int) -> None:
        self._plan, self._world, self._seed = plan, world, seed
        self._now = world.loop.time
        self._numbers = itertools.count()

    async def run(self) -> None:
        """All points in turn; a point ends when its last answer has ended."""
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
                        group.create_task(self._ask_on(source, f"{seed} {client}", place))
                else:
                    group.create_task(self._send(source, seed, place, begin, group))

    async def _send(
        self, source: Open | Replay, seed: str, place: _Place, begin: float, group: asyncio.TaskGroup
    ) -> None:
        for at, one in source.due(seed, 0, 1):
            if (wait_s := begin + at - self._now()) > 0:
                await asyncio.sleep(wait_s)
            group.create_task(self._ask(one, place))

    async def _ask_on(self, source: Closed, seed: str, place: _Place) -> None:
        draw = random.Random(f"{seed} think")
        numbers = itertools.count()
        while self._now() < place.window[1]:
            said: list[dict[str, str]] = []
            for _ in range(source.turns):
                one = source.next_ask(seed, next(numbers), said)
                answer = await self._ask(one, place)
                if source.turns > 1:
                    said = [*one.body["messages"], {"role": "assistant", "content": _heard(answer)}]
                await asyncio.sleep(source.thought_s(draw, answer))
                if answer.outcome != OK or self._now() >= place.window[1]:
                    break

    async def _ask(self, one: Ask, place: _Place) -> Timeline:
        answer = await self._world.serve(job_of(one), next(self._numbers))
        self._world.tally.record(place.point, place.kind, answer, place.window, one.asked_tokens)
        return answer


def job_of(one: Ask) -> Job:
    """What is asked, a token for each word: prompts that begin with the same words share their prefix."""
    messages = one.body.get("messages") or [{"content": one.body["prompt"]}]
    words = [word for message in messages for word in message["content"].split()]
    tokens = tuple(FIRST + zlib.crc32(word.encode()) for word in words)
    return Job(0.0, len(tokens), one.body["max_tokens"], words=tokens)


def _heard(answer: Timeline) -> str:
    """A text of as many words as there were tokens. They are not those of the KV cache: that an answer is found there
    when it comes back in a prompt is left out."""
    return " ".join(["word"] * answer.output_tokens)

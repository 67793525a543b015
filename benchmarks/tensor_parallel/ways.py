"""Owns how cards can share one model, and what each way makes of streams and of long prompts, by arithmetic.
Never builds one: of these, chunkserve has tensor parallel alone. Pipelines are here for comparison."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from loadtest.sim.tensor_parallel import INFINIBAND, NVLINK, WIDTH, Link, Ranks, Row, Shape

CHUNK, PROMPT = 2048, 8192
"""Tokens of a step's chunk, and of a long prompt."""


@dataclass(frozen=True, slots=True)
class Pipeline:
    """So many stages, each a card with its share of the layers. A step's hidden states go from one to the next."""

    shape: Shape
    stages: int
    link: Link

    @property
    def stage(self) -> Ranks:
        """The last one, which is the slowest: it has the LM head."""
        return Ranks(replace(self.shape, layers=self.shape.layers // self.stages))

    def send_s(self, tokens: int) -> float:
        """Return the time in which one stage hands so many tokens on."""
        rate = self.link.rate * self.stage.reached.link
        return self.link.round_s + tokens * self.shape.hidden * WIDTH / rate

    def gap_s(self, streams: int, context: int) -> float:
        """Return the time between two tokens of a stream. There are as many groups of streams as stages, so that each
        stage always has one; a stream's next token begins when all stages have had its last one."""
        group = -(-streams // self.stages)
        return self.stages * (self.stage.decode_s(group, context) + self.send_s(group))

    def prompt_s(self) -> tuple[float, float]:
        """Return the time to a long prompt's first token, and the time after which the next one's would come: its
        chunks follow each other through the stages."""
        steps = [self.stage.step_s([chunk], samples=1) + self.send_s(chunk.count) for chunk in chunks()]
        return sum(steps) + (self.stages - 1) * steps[-1], sum(steps)


def chunks() -> list[Row]:
    """Return the chunks of a long prompt."""
    return [Row(start, CHUNK) for start in range(0, PROMPT, CHUNK)]


@dataclass(frozen=True, slots=True)
class Way:
    """One way to use the cards."""

    name: str
    gap_s: Callable[[int, int], float]
    """See Pipeline.gap_s."""
    prompt: tuple[float, float]
    """See Pipeline.prompt_s."""


def tensor_parallel(shape: Shape, cards: int, link: Link) -> Way:
    ranks = Ranks(shape, cards, link=link)
    prompt_s = sum(ranks.step_s([chunk], samples=1) for chunk in chunks())
    return Way(f"tensor parallel, {link.name}", ranks.decode_s, (prompt_s, prompt_s))


def pipeline(shape: Shape, cards: int, link: Link) -> Way:
    stages = Pipeline(shape, cards, link)
    return Way(f"pipeline, {link.name}", stages.gap_s, stages.prompt_s())


def ways(shape: Shape, cards: int) -> Iterator[Way]:
    """Yield the ways to use so many cards: in one node, and with each in a node of its own."""
    for link in (NVLINK, INFINIBAND):
        yield tensor_parallel(shape, cards, link)
        yield pipeline(shape, cards, link)

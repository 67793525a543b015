"""Owns what a load asks: its points one after the other, the sources of requests in each, every request from a seed.
Never looks at a clock or a server: each worker makes its own share of the same plan, and no other's."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from loadtest.arrivals import Profile, due_times
from loadtest.completions import completion_body
from loadtest.scenarios import text
from loadtest.slo import Limit
from loadtest.timeline import FAILED, REJECTED, Timeline
from loadtest.traces import Trace, prompt_of


@dataclass(frozen=True, slots=True)
class Shape:
    """What a source asks, in words (about a token each) and tokens."""

    prompt: int
    answer: int
    shared: int = 0
    """Further words, with which all prompts of the source begin."""
    cancel_share: float = 0.0
    """Of the requests; their client leaves."""
    cancel_after_s: float = 0.0
    read_pause_s: float = 0.0
    """After each event that was read: a client that does not keep up."""
    tenant: str | None = None
    """Whose API key is sent."""


@dataclass(frozen=True, slots=True)
class Ask:
    """One request."""

    body: dict[str, Any]
    path: str
    asked_tokens: int
    """Of the prompt, as it is meant."""
    cancel_after_s: float | None = None
    read_pause_s: float = 0.0
    tenant: str | None = None


@dataclass(frozen=True, slots=True)
class Open:
    """Requests that come when they are due, whether earlier ones are answered or not."""

    kind: str
    shape: Shape
    profile: Profile
    process: str = "poisson"
    cv: float = 1.0

    def due(self, seed: str, shard: int, shards: int) -> Iterator[tuple[float, Ask]]:
        """The shard's own: when, and what."""
        number = random.Random(f"{seed} {self.kind}").getrandbits(32)
        for index, at in enumerate(due_times(self.profile, self.process, number, self.cv)):
            if index % shards == shard:
                yield at, ask(self.kind, self.shape, seed, index)


@dataclass(frozen=True, slots=True)
class Replay:
    """Requests as a trace has them."""

    kind: str
    trace: Trace

    def due(self, seed: str, shard: int, shards: int) -> Iterator[tuple[float, Ask]]:
        number = random.Random(f"{seed} {self.kind}").getrandbits(32)
        for index, row in enumerate(self.trace.rows):
            if index % shards == shard:
                prompt = prompt_of(row, index, self.trace.block_tokens, number)
                yield row.at_s, Ask(completion_body(prompt, row.output_tokens), COMPLETIONS, row.prompt_tokens)


@dataclass(frozen=True, slots=True)
class Closed:
    """Clients that ask again when they are answered and have thought.

    With `turns` each holds conversations: a turn's prompt is all that was said before and a new question."""

    kind: str
    shape: Shape
    clients: int
    think_s: float = 0.0
    """Mean; drawn anew (exponential) before each request but the first."""
    turns: int = 1

    def next_ask(self, seed: str, number: int, said: Sequence[dict[str, str]]) -> Ask:
        """A client's request of this number. `seed`: of the client; `said`: in its conversation so far."""
        if self.turns == 1:
            return ask(self.kind, self.shape, seed, number)
        return turn(self.kind, self.shape, seed, str(number), said)

    def thought_s(self, draw: random.Random, answer: Timeline) -> float:
        """A server that refuses at once is not asked thousands of times a second."""
        thought = draw.expovariate(1 / self.think_s) if self.think_s else 0.0
        return max(thought, 0.1) if answer.outcome in (FAILED, REJECTED) else thought


Source = Open | Replay | Closed


@dataclass(frozen=True, slots=True)
class Point:
    """One load: its sources at once."""

    name: str
    sources: tuple[Source, ...]
    seconds: float
    warm_up_s: float = 0.0
    """At its beginning, in which nothing is counted."""
    x: float | None = None
    """Where it is in a plot: its rate, or its number of clients."""
    line: str = ""
    """The points of which it is drawn in one line with."""


@dataclass(frozen=True, slots=True)
class Plan:
    points: tuple[Point, ...]
    limits: tuple[Limit, ...] = ()
    judged: str | None = None
    """The kind of request that has to keep the limits; None: all together."""
    notes: tuple[str, ...] = ()
    x_label: str = ""
    """Of the points; empty: they are no series."""
    no_collapse: float | None = None
    """Share of the first point's goodput that every later one has to keep."""
    settles: bool = False
    """Whether the server has to hold no request of ours after the load (GET /load)."""
    retry_after: bool = False
    """Whether each refusal has to say when to come again."""
    series: dict[str, float] = field(default_factory=dict)
    """Figures of the plan itself, such as a trace's ideal share of cache hits."""


COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


def ask(kind: str, shape: Shape, seed: str, index: int | str) -> Ask:
    """The index-th request of a source: the same in every process, and no other's."""
    draw = random.Random(f"{seed} {kind} {index}")
    head = text(random.Random(f"{seed} {kind} head"), shape.shared)
    prompt = f"{head} {text(draw, shape.prompt)}".strip()
    leaves = draw.random() < shape.cancel_share
    body = completion_body(prompt, shape.answer)
    after_s = shape.cancel_after_s if leaves else None
    return Ask(body, COMPLETIONS, shape.shared + shape.prompt, after_s, shape.read_pause_s, shape.tenant)


def turn(kind: str, shape: Shape, seed: str, index: str, said: Sequence[dict[str, str]]) -> Ask:
    """The next turn of a conversation."""
    first = ask(kind, shape, seed, index)
    messages = [*said, {"role": "user", "content": first.body["prompt"]}]
    words = sum(len(message["content"].split()) for message in messages)
    body = {name: value for name, value in first.body.items() if name != "prompt"}
    return Ask(body | {"messages": messages}, CHAT, words, None, shape.read_pause_s, shape.tenant)

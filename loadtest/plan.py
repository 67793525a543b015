"""Owns what a load sends: a sequence of points, the sources of requests in each, and every request, made from a seed.
Never looks at a clock or a server. Each worker makes exactly its own share of the same plan."""

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
    """The requests of a source: lengths of prompts in words (about a token each), and of answers in tokens."""

    prompt: int
    answer: int
    shared: int = 0
    """Additional words that all prompts of the source begin with."""
    cancel_share: float = 0.0
    """The share of requests whose client disconnects early."""
    cancel_after_s: float = 0.0
    read_pause_s: float = 0.0
    """Pause after each event, for a client that does not keep up."""
    tenant: str | None = None
    """The tenant whose API key is sent."""


@dataclass(frozen=True, slots=True)
class Ask:
    """One request."""

    body: dict[str, Any]
    path: str
    asked_tokens: int
    """The intended length of the prompt."""
    cancel_after_s: float | None = None
    read_pause_s: float = 0.0
    tenant: str | None = None


@dataclass(frozen=True, slots=True)
class Open:
    """Requests that are sent when they are due, whether earlier ones have been answered or not."""

    kind: str
    shape: Shape
    profile: Profile
    process: str = "poisson"
    cv: float = 1.0

    def due(self, seed: str, shard: int, shards: int) -> Iterator[tuple[float, Ask]]:
        """Yield the due time and the request of each of the shard's requests."""
        number = random.Random(f"{seed} {self.kind}").getrandbits(32)
        for index, at in enumerate(due_times(self.profile, self.process, number, self.cv)):
            if index % shards == shard:
                yield at, ask(self.kind, self.shape, seed, index)


@dataclass(frozen=True, slots=True)
class Replay:
    """The requests of a trace, at the trace's times."""

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
    """Clients that send their next request after an answer and some time to think.

    With several `turns`, each client holds conversations: a turn's prompt is the conversation so far and a new
    question."""

    kind: str
    shape: Shape
    clients: int
    think_s: float = 0.0
    """The mean of the exponential distribution from which the pause before each request but the first is drawn."""
    turns: int = 1

    def next_ask(self, seed: str, number: int, said: Sequence[dict[str, str]]) -> Ask:
        """Return the client's request of this number. `seed` is the client's; `said` is its conversation so far."""
        if self.turns == 1:
            return ask(self.kind, self.shape, seed, number)
        return turn(self.kind, self.shape, seed, str(number), said)

    def thought_s(self, draw: random.Random, answer: Timeline) -> float:
        """Draw a pause. After a failure it is at least 0.1 s: a server that refuses at once must not be asked thousands
        of times a second."""
        thought = draw.expovariate(1 / self.think_s) if self.think_s else 0.0
        return max(thought, 0.1) if answer.outcome in (FAILED, REJECTED) else thought


Source = Open | Replay | Closed


@dataclass(frozen=True, slots=True)
class Point:
    """One load: several sources at the same time."""

    name: str
    sources: tuple[Source, ...]
    seconds: float
    warm_up_s: float = 0.0
    """Time at the beginning in which nothing is counted."""
    x: float | None = None
    """The point's position in a plot: its rate or its number of clients."""
    line: str = ""
    """The name of the line that this point belongs to in a plot."""


@dataclass(frozen=True, slots=True)
class Plan:
    points: tuple[Point, ...]
    limits: tuple[Limit, ...] = ()
    judged: str | None = None
    """The kind of request that has to keep the limits; None means all requests together."""
    notes: tuple[str, ...] = ()
    x_label: str = ""
    """The label of the points' x axis; empty if the points are not a series."""
    no_collapse: float | None = None
    """The share of the first point's goodput that every later point has to reach."""
    settles: bool = False
    """Whether the server must hold none of our requests after the load (GET /load)."""
    retry_after: bool = False
    """Whether each refusal must carry a Retry-After header."""
    series: dict[str, float] = field(default_factory=dict)
    """Figures that follow from the plan alone, such as a trace's ideal share of cache hits."""


COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


def ask(kind: str, shape: Shape, seed: str, index: int | str) -> Ask:
    """Make the index-th request of a source. It is the same in every process and differs from all others."""
    draw = random.Random(f"{seed} {kind} {index}")
    head = text(random.Random(f"{seed} {kind} head"), shape.shared)
    prompt = f"{head} {text(draw, shape.prompt)}".strip()
    leaves = draw.random() < shape.cancel_share
    body = completion_body(prompt, shape.answer)
    after_s = shape.cancel_after_s if leaves else None
    return Ask(body, COMPLETIONS, shape.shared + shape.prompt, after_s, shape.read_pause_s, shape.tenant)


def turn(kind: str, shape: Shape, seed: str, index: str, said: Sequence[dict[str, str]]) -> Ask:
    """Make the next turn of a conversation."""
    first = ask(kind, shape, seed, index)
    messages = [*said, {"role": "user", "content": first.body["prompt"]}]
    words = sum(len(message["content"].split()) for message in messages)
    body = {name: value for name, value in first.body.items() if name != "prompt"}
    return Ask(body | {"messages": messages}, CHAT, words, None, shape.read_pause_s, shape.tenant)

"""Owns the loads that compare servers: one client, many clients, long prompts beside streams, a shared prefix.
Never knows which server answers: all get the same prompts, drawn from a seed that no server has seen before."""

from __future__ import annotations

import asyncio
import dataclasses
import math
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from loadtest.completions import Client, Completion, Exchange

Figures = dict[str, float]

_NOUNS = """
time year people way day man thing woman life child world school state family student group country problem hand part
place case week company system program question work government number night point home water room mother area money
story fact month lot right study book eye job word business issue side kind head house service friend father power
hour game line end member law car city community name president team minute idea body information
"""
_WORDS = _NOUNS.split()
"""Frequent English nouns: each is one token in most vocabularies."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The answers of a load. Times are seconds of the client's clock."""

    answers: list[Completion]
    wall_s: float
    long: list[Completion] = dataclasses.field(default_factory=list)
    """Answers to the long prompts that arrived beside the streams."""
    window: tuple[float, float] | None = None
    """From just before the first long prompt until the end of the last one's answer."""


@dataclass(frozen=True, slots=True)
class Closed:
    """Clients that send a request as soon as the previous one is answered, until `requests` have been sent.

    Prompt lengths are in words, which are about a token each; answer lengths are in tokens."""

    requests: int
    clients: int
    prompt: int
    answer: int
    shared: int = 0
    """Additional words that all prompts begin with."""

    @property
    def warm_up(self) -> Closed:
        return dataclasses.replace(self, requests=self.clients, answer=min(self.answer, 16))

    async def run(self, client: Client, seed: int) -> Outcome:
        draw = random.Random(seed)
        head = text(draw, self.shared)
        prompts = [f"{head} {text(draw, self.prompt)}".strip() for _ in range(self.requests)]
        exchanges: list[Exchange] = []

        async def run_client() -> None:
            while prompts:
                exchanges.append(await client.ask(prompts.pop(), self.answer))

        started = time.monotonic()
        await asyncio.gather(*(run_client() for _ in range(self.clients)))
        wall_s = time.monotonic() - started
        return Outcome([exchange.read() for exchange in exchanges], wall_s)


@dataclass(frozen=True, slots=True)
class Mixed:
    """Streams that keep running while long prompts arrive: the first `lead_s` after the streams began, then one every
    `every_s`. Lengths are in the units of `Closed`."""

    streams: int
    prompt: int
    answer: int
    long_requests: int
    long_prompt: int
    long_answer: int
    every_s: float
    lead_s: float

    @property
    def warm_up(self) -> Mixed:
        return dataclasses.replace(self, long_requests=1, answer=min(self.answer, 64), every_s=0.5, lead_s=0.5)

    async def run(self, client: Client, seed: int) -> Outcome:
        draws = [random.Random(f"{seed} {i}") for i in range(self.streams + 1)]
        prompts = [text(draws[-1], self.long_prompt) for _ in range(self.long_requests)]
        streams: list[Exchange] = []
        is_over = asyncio.Event()

        async def stream_on(draw: random.Random) -> None:
            """Start a new stream after each. On a fast server, a single stream would end before the last long
            prompt."""
            while not is_over.is_set():
                streams.append(await client.ask(text(draw, self.prompt), self.answer))

        started = time.monotonic()
        running = [asyncio.ensure_future(stream_on(draw)) for draw in draws[:-1]]
        await asyncio.sleep(self.lead_s)
        begin = time.monotonic()
        long = await self._ask_long(client, prompts)
        end = time.monotonic()
        is_over.set()
        await asyncio.gather(*running)
        wall_s = time.monotonic() - started
        return Outcome([one.read() for one in streams], wall_s, [one.read() for one in long], (begin, end))

    async def _ask_long(self, client: Client, prompts: list[str]) -> list[Exchange]:
        asked: list[asyncio.Future[Exchange]] = []
        for prompt in prompts:
            asked.append(asyncio.ensure_future(client.ask(prompt, self.long_answer)))
            await asyncio.sleep(self.every_s)
        return await asyncio.gather(*asked)


Scenario = Closed | Mixed

SCENARIOS: dict[str, Scenario] = {
    "single": Closed(requests=4, clients=1, prompt=64, answer=128),
    "closed": Closed(requests=48, clients=16, prompt=96, answer=64),
    "mixed": Mixed(4, prompt=48, answer=400, long_requests=5, long_prompt=1500, long_answer=4, every_s=2.5, lead_s=3.0),
    "prefix": Closed(requests=32, clients=8, prompt=24, answer=16, shared=1000),
}


def beside(streams: int, tokens: int) -> Mixed:
    """Return streams beside three long prompts of `tokens` words, which come as fast whatever their length."""
    return Mixed(
        streams, prompt=48, answer=400, long_requests=3, long_prompt=tokens, long_answer=4, every_s=tokens / 500,
        lead_s=3.0,
    )  # fmt: skip


BESIDE = {f"beside-{streams}-{tokens}": beside(streams, tokens) for streams in (4, 16) for tokens in (1500, 3000)}
"""Loads of benchmarks/peers/beside.py."""


def measure(scenario: Scenario, port: int, model: str, seed: int) -> tuple[Figures, list[str]]:
    """Run a load against a server on this machine, and return its figures and its errors."""
    outcome = asyncio.run(_run(scenario, port, model, seed))
    return figures(outcome), errors(outcome) + lacks(outcome)


def warm_up(scenario: Scenario, port: int, model: str, seed: int) -> list[str]:
    """Run a short load of the same kind, and return its errors."""
    return errors(asyncio.run(_run(scenario.warm_up, port, model, seed)))


async def _run(scenario: Scenario, port: int, model: str, seed: int) -> Outcome:
    async with Client(port, model) as client:
        return await scenario.run(client, seed)


def text(draw: random.Random, words: int) -> str:
    """Draw this many frequent words, each about a token."""
    return " ".join(draw.choices(_WORDS, k=words))


# --- figures --------------------------------------------------------------------------------------------------------


def figures(outcome: Outcome) -> Figures:
    """Return the figures of a load: the median time to first text and the median time per token after it, in
    milliseconds; the output tokens a second of the whole load; its duration in seconds. With long prompts also their
    median time to first text, and the gaps between two texts of one stream that ended while a long prompt was in
    flight, in milliseconds: the median, the 99th percentile and the longest."""
    everything = [*outcome.answers, *outcome.long]
    output = sum(answer.output_tokens for answer in everything)
    found: Figures = {
        "requests": len(everything),
        "prompt_tokens": sum(answer.prompt_tokens for answer in everything),
        "output_tokens": output,
        "wall_s": outcome.wall_s,
        "tokens_per_s": output / outcome.wall_s,
    }
    found |= _median_ms("ttft_ms", [answer.ttft_s for answer in outcome.answers if answer.arrivals])
    found |= _median_ms("tpot_ms", [answer.tpot_s for answer in outcome.answers if _has_pace(answer)])
    found |= _median_ms("long_ttft_ms", [answer.ttft_s for answer in outcome.long if answer.arrivals])
    if outcome.window and (gaps := sorted(_gaps(outcome.answers, *outcome.window))):
        found |= {
            "gap_p50_ms": 1e3 * statistics.median(gaps),
            "gap_p99_ms": 1e3 * gaps[math.ceil(0.99 * len(gaps)) - 1],
            "longest_gap_ms": 1e3 * gaps[-1],
        }
    return found


def errors(outcome: Outcome) -> list[str]:
    """Return the errors, one for each failed request."""
    return [answer.error for answer in (*outcome.answers, *outcome.long) if answer.error]


def lacks(outcome: Outcome) -> list[str]:
    """Return an error if no stream ran beside the long prompts. Without gaps to measure, the longest would seem to be
    zero."""
    if outcome.window is None or list(_gaps(outcome.answers, *outcome.window)):
        return []
    return ["no stream ran beside the long prompts"]


def _median_ms(name: str, seconds: Sequence[float]) -> Figures:
    return {name: 1e3 * statistics.median(seconds)} if seconds else {}


def _has_pace(answer: Completion) -> bool:
    return len(answer.arrivals) > 1 and answer.output_tokens > 1


def _gaps(answers: Sequence[Completion], begin: float, end: float) -> Iterator[float]:
    for answer in answers:
        for earlier, later in pairwise(answer.arrivals):
            if begin <= later <= end:
                yield later - earlier

"""Owns what is asked of a simulated deployment: when each request comes, its prompt, how long its answer is.
Never sends anything; the same seed gives the same requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random

from loadtest.arrivals import Profile, due_times
from loadtest.sim.executor import FILLER, FIRST
from loadtest.traces import BLOCK_TOKENS


@dataclass(frozen=True, slots=True)
class Job:
    """A request that is to be sent."""

    arrival_s: float
    num_prompt_tokens: int
    num_answer_tokens: int
    """How many it is answered with."""
    hash_ids: tuple[int, ...] = ()
    """Of the prompt's blocks of BLOCK_TOKENS, the last one shorter; prompts share the blocks of their common head.
    Empty: it shares nothing with any other."""
    max_tokens: int | None = None
    """How many it asks for at most; None: exactly as many as it is answered with."""
    words: tuple[int, ...] = ()
    """The prompt's token ids themselves, where they are known."""

    def __post_init__(self) -> None:
        if self.num_prompt_tokens < 1 or self.num_answer_tokens < 1:
            raise ValueError(f"a job needs tokens to ask and to answer, but has {self}")
        if self.hash_ids and len(self.hash_ids) != -(-self.num_prompt_tokens // BLOCK_TOKENS):
            raise ValueError(f"{len(self.hash_ids)} hash ids do not make {self.num_prompt_tokens} tokens")
        if self.words and len(self.words) != self.num_prompt_tokens:
            raise ValueError(f"{len(self.words)} words are not {self.num_prompt_tokens} tokens")

    def prompt(self, number: int) -> tuple[int, ...]:
        """Token ids. `number` is the job's own: no two prompts without hash ids begin alike."""
        if self.words:
            return self.words
        if not self.hash_ids:
            return (FIRST + 2 * number, *(FILLER,) * (self.num_prompt_tokens - 1))
        filler = (FILLER,) * (BLOCK_TOKENS - 1)
        tokens = tuple(token for hash_id in self.hash_ids for token in (FIRST + 2 * hash_id + 1, *filler))
        return tokens[: self.num_prompt_tokens]


def poisson(rate: float, seconds: float, num_prompt_tokens: int, num_answer_tokens: int, seed: int) -> list[Job]:
    """Equal requests, `rate` a second on average, with exponential gaps."""
    times = due_times(Profile.constant(rate, seconds), "poisson", seed)
    return [Job(at, num_prompt_tokens, num_answer_tokens) for at in times]


def thinned(jobs: Sequence[Job], share: float, seed: int) -> list[Job]:
    """A share of the requests, each kept or not by chance: what else a trace might have been, bursts included."""
    random = Random(seed)
    return [job for job in jobs if random.random() < share]


def window(jobs: Sequence[Job], begin_s: float, end_s: float) -> list[Job]:
    """The requests of [begin_s, end_s), which begins at 0 s from then on."""
    return [replace(job, arrival_s=job.arrival_s - begin_s) for job in jobs if begin_s <= job.arrival_s < end_s]

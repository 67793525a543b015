"""Owns the requests to a simulated deployment: arrival times, prompts, and lengths of answers.
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
    """A request to be sent."""

    arrival_s: float
    num_prompt_tokens: int
    num_answer_tokens: int
    """The length of the answer."""
    hash_ids: tuple[int, ...] = ()
    """Hash ids of the prompt's blocks of BLOCK_TOKENS, the last one shorter. Prompts share the blocks of their common
    prefix. Empty means that the prompt shares nothing with any other."""
    max_tokens: int | None = None
    """The request's `max_tokens`; None means exactly the length of the answer."""
    words: tuple[int, ...] = ()
    """The prompt's token ids, if they are known."""

    def __post_init__(self) -> None:
        if self.num_prompt_tokens < 1 or self.num_answer_tokens < 1:
            raise ValueError(f"a job needs tokens to ask and to answer, but has {self}")
        if self.hash_ids and len(self.hash_ids) != -(-self.num_prompt_tokens // BLOCK_TOKENS):
            raise ValueError(f"{len(self.hash_ids)} hash ids do not make {self.num_prompt_tokens} tokens")
        if self.words and len(self.words) != self.num_prompt_tokens:
            raise ValueError(f"{len(self.words)} words are not {self.num_prompt_tokens} tokens")

    def prompt(self, number: int) -> tuple[int, ...]:
        """Return the prompt's token ids. `number` is unique to the job, so that no two prompts without hash ids share a
        prefix."""
        if self.words:
            return self.words
        if not self.hash_ids:
            return (FIRST + 2 * number, *(FILLER,) * (self.num_prompt_tokens - 1))
        filler = (FILLER,) * (BLOCK_TOKENS - 1)
        tokens = tuple(token for hash_id in self.hash_ids for token in (FIRST + 2 * hash_id + 1, *filler))
        return tokens[: self.num_prompt_tokens]


def poisson(rate: float, seconds: float, num_prompt_tokens: int, num_answer_tokens: int, seed: int) -> list[Job]:
    """Make equal requests, `rate` a second on average, with exponential gaps."""
    times = due_times(Profile.constant(rate, seconds), "poisson", seed)
    return [Job(at, num_prompt_tokens, num_answer_tokens) for at in times]


def thinned(jobs: Sequence[Job], share: float, seed: int) -> list[Job]:
    """Keep each request with probability `share`. The result is another plausible trace, with its bursts."""
    random = Random(seed)
    return [job for job in jobs if random.random() < share]


def window(jobs: Sequence[Job], begin_s: float, end_s: float) -> list[Job]:
    """Return the requests of [begin_s, end_s), with times from the beginning of that window."""
    return [replace(job, arrival_s=job.arrival_s - begin_s) for job in jobs if begin_s <= job.arrival_s < end_s]

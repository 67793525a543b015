"""Owns the arithmetic of memory: how much must be free to admit a request, and how much is kept for running answers.
Never moves a block or a request. Every number is in blocks or tokens, as its name says."""

from __future__ import annotations

import math
from collections.abc import Iterable
from operator import add
from typing import assert_never

from engine.config import ResolvedConfig, SchedulerConfig
from engine.scheduling.forecast import Forecast, Share
from engine.scheduling.request import Request

FALLS_BESIDE_PREFILL = {"decode_only": False, "any_decode": True}
"""By ratio_decay_on: whether a step with decode rows lowers the share even if it also has prefill."""


class ReserveRatio:
    """The share of running requests' remaining answers that admission keeps free (`reserve_mode: ratio`).

    Few answers use all of max_tokens, so the share falls from step to step. When memory runs out, it is set to the
    share that the running answers have used so far. An idle engine starts over.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self._config = config
        self._decay = (config.ratio_init - config.ratio_min) / config.ratio_decay_steps
        self.value = config.ratio_init

    def after_step(self, *, decoded: bool, prefilled: bool) -> None:
        """Lower the share after a step without a preemption. A share below the minimum returns to it (S5-R8)."""
        if decoded and (not prefilled or FALLS_BESIDE_PREFILL[self._config.ratio_decay_on]):
            self.value = max(self.value - self._decay, self._config.ratio_min)

    def after_preemption(self, decoding: Iterable[Request]) -> None:
        """Set the share to that used by the requests that still decode; unchanged if none does."""
        remaining = list(decoding)
        if remaining:
            used = sum(request.num_output for request in remaining) + self._config.retract_steps * len(remaining)
            share = used / (sum(request.max_tokens for request in remaining) + 1)
            self.value = min(max(share, 1e-6), 1.0)

    def reset(self) -> None:
        """Start over when the engine is idle."""
        self.value = self._config.ratio_init


def reserved_tokens(request: Request, clip: int) -> int:
    """Return the remaining answer tokens that count for admission; clipped once."""
    return min(request.max_tokens - request.num_output, clip)


class Admission:
    """Memory as one plan sees it: what is available, and what is reserved. It is updated as the plan grows."""

    def __init__(
        self,
        config: ResolvedConfig,
        *,
        ratio: float,
        forecast: Forecast | None,
        gone: Iterable[Request],
        promised_blocks: int,
        available_blocks: int,
        decoding: Iterable[Request],
        prefilling: Iterable[Request],
    ) -> None:
        """`decoding` and `prefilling` are the requests that keep their memory in this plan; `gone` are those that lose
        it."""
        self._mode = config.scheduler.reserve_mode
        self._clip = config.scheduler.reserve_clip
        self._watermark = config.scheduler.watermark_blocks
        self._block_size = config.block_size
        self._promised = promised_blocks
        self._answer_tokens = 0.0
        self._forecast = forecast
        self._tested: tuple[Request | None, Share] = (None, ((), ()))  # the last request that was tested, and its share
        if forecast is not None:
            self._growth, self._variance = forecast.of_others(gone)
        if self._mode == "ratio":
            # `reserved_tokens` written out: a call for each of hundreds of requests is a tenth of a plan's time
            clip = self._clip
            tokens = sum(min(r.max_tokens + r.prompt_len - len(r.token_ids), clip) for r in decoding)
            self._answer_tokens = tokens * ratio
        self._outstanding = sum(self.blocks_for(r.target) - len(r.block_ids) for r in prefilling)
        self.available = available_blocks

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_size)

    @property
    def reserved(self) -> int:
        """Blocks that admission keeps for running requests: for the rest of their prompts and of their answers."""
        match self._mode:
            case "full":
                return self._promised
            case "learned":
                assert self._forecast is not None
                return self._outstanding + self._forecast.peak(self._growth, self._variance)
            case "ratio":
                return self._outstanding + math.ceil(self._answer_tokens / self._block_size)
            case "prompt":
                return self._outstanding
            case mode:
                assert_never(mode)

    def grow_answers(self, blocks: int) -> None:
        """Account for blocks that decoding requests take of those promised to them."""
        self.available -= blocks
        self._promised -= blocks

    def grow_prompt(self, blocks: int) -> None:
        """Account for blocks that the next chunk of an admitted prompt takes."""
        self.available -= blocks
        self._promised -= blocks
        self._outstanding -= blocks

    def load(self, blocks: int) -> None:
        """Account for blocks that a waiting request takes to load KV into. They count as its own once it is
        admitted."""
        self.available -= blocks

    def fits(self, request: Request, shared_blocks: int, *, alone: bool) -> bool:
        """Whether a waiting request may start. `shared_blocks` of its prompt are already held by others.

        `alone` means that no other request holds memory, so that waiting would be pointless.
        """
        prompt = self.blocks_for(len(request.token_ids))
        needed = prompt - shared_blocks
        if self._mode == "full":
            return needed + self.blocks_for(request.lifetime_tokens) - prompt <= self.available - self._promised
        if alone:
            return needed <= self.available
        needed += self._outstanding
        match self._mode:
            case "prompt":
                return needed + self._watermark <= self.available
            case "learned":
                assert self._forecast is not None
                if needed > self.available:
                    return False
                growth, variance = share = self._forecast.candidate(request, shared_blocks)
                self._tested = (request, share)
                peak = self._forecast.peak(map(add, self._growth, growth), map(add, self._variance, variance))
                return needed + peak <= self.available
            case "ratio":
                tokens = reserved_tokens(request, self._clip) + self._answer_tokens
                return needed + math.ceil(tokens / self._block_size) <= self.available
            case mode:
                assert_never(mode)

    def admit(self, request: Request, hits_taken: int, num_prefix_blocks: int, end: int) -> None:
        """Account for an admitted request whose first chunk ends at `end`; `hits_taken` of its prefix hits were
        evictable."""
        if self._forecast is not None:
            tested, share = self._tested
            if tested is not request:  # it is alone, and was admitted without a test
                share = self._forecast.candidate(request, num_prefix_blocks - hits_taken)
            growth, variance = share
            self._growth = list(map(add, self._growth, growth))
            self._variance = list(map(add, self._variance, variance))
        held = self.blocks_for(end)
        self.available -= hits_taken + held - num_prefix_blocks
        self._promised += self.blocks_for(request.lifetime_tokens) - held
        self._outstanding += self.blocks_for(len(request.token_ids)) - held
        if self._mode == "ratio":
            self._answer_tokens += reserved_tokens(request, self._clip)

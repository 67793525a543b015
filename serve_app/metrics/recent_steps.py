"""Owns an engine's last steps, and what they yielded within a window of seconds: rates, and gaps between tokens.
Never measures: it is given what the recorder has measured, once a step, and computes when somebody asks."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from engine.config import ResolvedConfig
from engine.observer import ComputedStep
from engine.protocol import LoadSnapshot
from serve_app.metrics.activity import EngineActivity, StepActivity

WINDOW_S = 10.0
"""Rates and gaps are of this many seconds: few enough to follow what happens, enough for a 99th percentile."""

NUM_STEPS = 256
"""Steps that are kept to be shown."""

_MOST_YIELDS = 4096
"""Steps that rates and gaps are made of. Where they are shorter than 2.4 ms, the window is shorter, too."""

_LEAST_WINDOW_S = 1.0
"""An engine that began just now has no rate of thousands for its first token."""


@dataclass(frozen=True, slots=True)
class _Yield:
    """What a call of EngineCore.step gave."""

    at: float
    prompt_tokens: int
    generated_tokens: int
    gaps: tuple[tuple[float, int], ...]
    """(seconds, how many tokens came so long after the one before)."""


@dataclass(frozen=True, slots=True)
class StepsSnapshot:
    """A copy that nobody changes: what is computed from it needs no lock."""

    now: float
    began: float
    steps: tuple[tuple[float, ComputedStep], ...]
    yields: tuple[_Yield, ...]

    def activity(self, engine: str, config: ResolvedConfig, load: LoadSnapshot, after: int | None) -> EngineActivity:
        """`after`: a step's id, with those that came later alone; None: all steps that are kept."""
        recent = [one for one in self.yields if self.now - one.at <= WINDOW_S]
        is_cut = len(self.yields) == _MOST_YIELDS == len(recent)
        window_s = max(_LEAST_WINDOW_S, min(WINDOW_S, self.now - (recent[0].at if is_cut else self.began)))
        gaps = sorted(gap for one in recent for gap in one.gaps)
        return EngineActivity(
            engine=engine,
            num_running=load.num_running,
            num_waiting=load.num_waiting,
            num_blocks=load.num_blocks,
            num_held_blocks=load.num_held_blocks,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            window_s=window_s,
            prompt_tokens_per_s=sum(one.prompt_tokens for one in recent) / window_s,
            generated_tokens_per_s=sum(one.generated_tokens for one in recent) / window_s,
            gap_p50_ms=_percentile_ms(gaps, 50),
            gap_p99_ms=_percentile_ms(gaps, 99),
            steps=tuple(self._shown(after)),
        )

    def _shown(self, after: int | None) -> Iterable[StepActivity]:
        for at, step in self.steps:
            if after is None or step.step_id > after:
                ms, age_ms = step.duration_s * 1000, (self.now - at) * 1000
                yield StepActivity(
                    step.step_id, step.num_decodes, step.chunks, step.num_waiting, round(ms, 3), round(age_ms)
                )


class RecentSteps:
    """Not locked: its owner is. `add` costs nothing per token."""

    def __init__(self, began: float) -> None:
        """All times are seconds of one monotonic clock."""
        self._began = began
        self._steps: deque[tuple[float, ComputedStep]] = deque(maxlen=NUM_STEPS)
        self._yields: deque[_Yield] = deque(maxlen=_MOST_YIELDS)

    def add(
        self, now: float, computed: Sequence[ComputedStep], generated_tokens: int, gaps: Mapping[float, int]
    ) -> None:
        """`gaps`: seconds -> how many tokens came so long after the one before them."""
        self._steps.extend((now, step) for step in computed)
        prompt_tokens = sum(sum(step.chunks) for step in computed)
        if prompt_tokens or generated_tokens:
            self._yields.append(_Yield(now, prompt_tokens, generated_tokens, tuple(gaps.items())))

    def snapshot(self, now: float) -> StepsSnapshot:
        return StepsSnapshot(now, self._began, tuple(self._steps), tuple(self._yields))


def _percentile_ms(gaps: Sequence[tuple[float, int]], percent: int) -> float | None:
    """The least gap that so many percent of the tokens did not exceed; `gaps` are sorted (seconds, tokens)."""
    left = -(-sum(count for _, count in gaps) * percent // 100)
    for gap_s, count in gaps:
        left -= count
        if left <= 0:
            return round(gap_s * 1000, 3)
    return None

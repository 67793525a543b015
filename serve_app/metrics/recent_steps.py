"""Owns an engine's last steps, and computes rates and gaps between tokens in a window of seconds.
Never measures: the recorder passes its measurements once per step. Computes only on request."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from engine.config import ResolvedConfig
from engine.observer import ComputedStep
from engine.protocol import LoadSnapshot
from serve_app.metrics.activity import EngineActivity, StepActivity, TierActivity

WINDOW_S = 10.0
"""The window of rates and gaps: short enough to follow changes, long enough for a 99th percentile."""

NUM_STEPS = 256
"""How many steps are kept for display."""

_MOST_YIELDS = 4096
"""The most steps from which rates and gaps are computed. If steps take less than 2.4 ms, the window is shorter, too."""

_LEAST_WINDOW_S = 1.0
"""The least window, so that the first token of a new engine does not appear as a rate of thousands."""


@dataclass(frozen=True, slots=True)
class _Yield:
    """The results of one call of EngineCore.step."""

    at: float
    prompt_tokens: int
    generated_tokens: int
    gaps: tuple[tuple[float, int], ...]
    """(seconds, how many tokens came that long after the previous one)."""


@dataclass(frozen=True, slots=True)
class StepsSnapshot:
    """An immutable copy, so that computing from it needs no lock."""

    now: float
    began: float
    steps: tuple[tuple[float, ComputedStep], ...]
    yields: tuple[_Yield, ...]

    def activity(self, engine: str, config: ResolvedConfig, load: LoadSnapshot, after: int | None) -> EngineActivity:
        """Compute the activity. `after`: a step's id; only later steps are included. None includes all that are
        kept."""
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
            max_num_seqs=config.num_seats,
            max_num_batched_tokens=config.max_num_batched_tokens,
            tpot_ms=config.targets.tpot_ms,
            window_s=window_s,
            prompt_tokens_per_s=sum(one.prompt_tokens for one in recent) / window_s,
            generated_tokens_per_s=sum(one.generated_tokens for one in recent) / window_s,
            gap_p50_ms=_percentile_ms(gaps, 50),
            gap_p99_ms=_percentile_ms(gaps, 99),
            steps=tuple(self._shown(after)),
            num_loading=load.num_loading,
            tiers=tuple(
                TierActivity(one.tier, one.used_bytes, one.capacity_bytes, one.hit_blocks * config.block_size)
                for one in load.tiers
            ),
        )

    def _shown(self, after: int | None) -> Iterable[StepActivity]:
        for at, step in self.steps:
            if after is None or step.step_id > after:
                ms, age_ms = step.duration_s * 1000, (self.now - at) * 1000
                predicted_ms = None if step.predicted_s is None else round(step.predicted_s * 1000, 3)
                yield StepActivity(
                    *(step.step_id, step.num_decodes, step.chunks, step.num_waiting),
                    *(round(ms, 3), round(age_ms), predicted_ms),
                )


class RecentSteps:
    """Keeps recent steps. The owner must lock it. The cost of `add` does not depend on the number of tokens."""

    def __init__(self, began: float) -> None:
        """`began`: when the engine began. All times are seconds of one monotonic clock."""
        self._began = began
        self._last_id = -1
        self._steps: deque[tuple[float, ComputedStep]] = deque(maxlen=NUM_STEPS)
        self._yields: deque[_Yield] = deque(maxlen=_MOST_YIELDS)

    def add(
        self, now: float, computed: Sequence[ComputedStep], generated_tokens: int, gaps: Mapping[float, int]
    ) -> None:
        """Add the steps of one call. `gaps`: seconds -> how many tokens came that long after the previous one."""
        for step in computed:
            # Ranks with requests of their own count their steps each from 0: the step of another gets the next number.
            self._last_id = max(self._last_id + 1, step.step_id)
            self._steps.append((now, replace(step, step_id=self._last_id)))
        prompt_tokens = sum(sum(step.chunks) for step in computed)
        if prompt_tokens or generated_tokens:
            self._yields.append(_Yield(now, prompt_tokens, generated_tokens, tuple(gaps.items())))

    def snapshot(self, now: float) -> StepsSnapshot:
        return StepsSnapshot(now, self._began, tuple(self._steps), tuple(self._yields))


def _percentile_ms(gaps: Sequence[tuple[float, int]], percent: int) -> float | None:
    """Return the least gap that `percent` of the tokens do not exceed. `gaps`: sorted pairs of (seconds, tokens)."""
    left = -(-sum(count for _, count in gaps) * percent // 100)
    for gap_s, count in gaps:
        left -= count
        if left <= 0:
            return round(gap_s * 1000, 3)
    return None

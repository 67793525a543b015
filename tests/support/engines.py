"""Builds engine cores over the fake executor, and runs them to the end of their requests.
Never hides a failure: the executor verifies every KV slot that a row builds on."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import count
from typing import Any, TypeVar

from engine.config import FakeConfig, ResolvedConfig, SchedulerConfig
from engine.core.core import EngineCore
from engine.fake.adapters import FakeAdapters
from engine.fake.draft_model import FakeDraftModel
from engine.fake.executor import FakeExecutor
from engine.fake.kv_mover import FakeMover
from engine.lockstep.shape import StepShape
from engine.protocol import Event, Finished, FinishReason, SamplingParams, Submission, Token
from engine.scheduling.request import Request, create_request
from engine.scheduling.resources import Resource
from engine.scheduling.step_prediction import StepTimeModel
from engine.scheduling.step_time import StepCosts, work_of
from engine.step import Executor, ScheduledRequest, StepPlan, TokenMasks

EOS = 0
VOCAB = 32
STEP_S = 1e-4
"""How long each step of a RecordingCore takes by its stopwatch: with real times no life would be repeatable."""
Held = TypeVar("Held", bound=Resource)


def resolved_config(**overrides: Any) -> ResolvedConfig:
    settings: dict[str, Any] = dict(
        max_model_len=256,
        block_size=4,
        num_kv_blocks=64,
        max_num_seqs=8,
        max_num_batched_tokens=32,
        max_prefill_tokens=32,
        max_queued_requests=1000,
        enable_prefix_caching=True,
        scheduler=SchedulerConfig(),
        vocab_size=VOCAB,
        eos_token_ids=(EOS,),
        step_trace=False,
        overlap=False,
        num_speculative_tokens=0,
        dtype="none",
        device="none",
        kernels="fake",
        num_threads=1,
        stall_timeout_s=30.0,
        max_grammar_bytes=2**18,
        grammar_timeout_s=60.0,
        grammar_mask_timeout_s=60.0,
        grammar_mask_average_s=60.0,
    )
    return ResolvedConfig(**{**settings, **overrides})


def policy(**settings: Any) -> SchedulerConfig:
    """Chunks end anywhere, so that a test counts tokens and not blocks."""
    return SchedulerConfig(**{"chunk_align": 1, **settings})


def prompt_only(**settings: Any) -> SchedulerConfig:
    """Admits whatever prompt fits, so that memory runs out."""
    return policy(reserve_mode="prompt", watermark_blocks=0, **settings)


class RecordingCore(EngineCore):
    """An engine core over the fake executor that keeps every step it executed and every event it emitted.

    Its clock is turned by hand: `tick_ms` a step.
    """

    def __init__(
        self,
        *,
        tick_ms: float = 10.0,
        alphabet: Sequence[int] = tuple(range(VOCAB)),
        reply: Sequence[int] | None = None,
        before_step: Callable[[StepPlan], None] | None = None,
        failing: Callable[[ScheduledRequest], str | None] | None = None,
        graph_sizes: Sequence[int] = (),
        grammars: TokenMasks | None = None,
        step_times: StepTimeModel | None = None,
        mover: Callable[..., FakeMover] | None = None,
        ranks: Callable[[Executor], Executor] | None = None,
        **overrides: Any,
    ) -> None:
        """`ranks`: makes an executor of the fake one that runs in lockstep with others; None: the engine is alone."""
        config = resolved_config(**overrides)
        self.plans: list[StepPlan] = []
        self.events: dict[str, list[Event]] = defaultdict(list)
        self._arrivals = count()
        self._hook = before_step
        executor = FakeExecutor(
            config.num_kv_blocks,
            config.block_size,
            alphabet,
            reply=reply,
            eos_token_id=config.eos_token_ids[0],
            config=FakeConfig(recurrent_state=config.recurrent_state),
            num_drafts=0 if config.speculates else config.num_speculative_tokens,
            verifies=config.looks_up_drafts,
            grammars=grammars,
            graph_sizes=graph_sizes,
            before_step=self._record,
            failing=failing,
            verify_prefix=True,
            adapters=FakeAdapters() if config.max_loras else None,
            mover=mover,
            draft_model=FakeDraftModel(config.num_kv_blocks, config.block_size) if config.has_draft_model else None,
        )
        self.fake = executor
        self.draft_model = executor.draft_model
        self.mover = executor.mover
        self.now = 0.0
        self._tick_s = tick_ms / 1000
        self._woken = False
        super().__init__(
            executor if ranks is None else ranks(executor),
            config,
            clock=lambda: self.now,
            stopwatch=partial(next, count(0.0, STEP_S)),
            step_times=step_times,
            lockstep=ranks is not None,
        )
        self.on_move(self._wake)

    def propose(self) -> StepShape:
        """Propose a step, before which the clock moves by `tick_ms`."""
        self._begin()
        return super().propose()

    def step(self, joint: StepShape | None = None) -> list[Event]:
        """Make a step, before which the clock moves by `tick_ms` unless it was proposed."""
        if self._proposal is None:
            self._begin()
        return super().step(joint)

    def _begin(self) -> None:
        self.now += self._tick_s
        self._woken = False

    # --- who wakes it -------------------------------------------------------------------------------------------------

    @property
    def is_awake(self) -> bool:
        """Whether the thread of an engine would step now: there is work, a call or a move's end has woken it, or a
        deadline has passed."""
        deadline = self.next_deadline
        return self.has_work or self._woken or (deadline is not None and deadline <= self.now)

    def _wake(self) -> None:
        self._woken = True

    def submit(self, request: Request, **options: Any) -> list[Event]:
        self._wake()
        return super().submit(request, **options)

    def prepared(self, request_id: str) -> list[Event]:
        self._wake()
        return super().prepared(request_id)

    def abort(self, request_id: str, reason: FinishReason = FinishReason.ABORT) -> list[Event]:
        self._wake()
        return super().abort(request_id, reason)

    def reset_prefix_cache(self) -> int:
        self._wake()
        return super().reset_prefix_cache()

    # --- what it is asked, and what it answers ------------------------------------------------------------------------

    def _record(self, plan: StepPlan) -> None:
        self.plans.append(plan)
        if self._hook:
            self._hook(plan)

    def send(self, request_id: str, prompt: Iterable[int], *, prepared: bool = True, **options: Any) -> None:
        """Submit; `options` are fields of Submission and of SamplingParams."""
        names = {field.name for field in dataclasses.fields(Submission)}
        of_submission = {name: options.pop(name) for name in list(options) if name in names}
        params = SamplingParams(**{"temperature": 0.0, **options})
        self.send_params(request_id, tuple(prompt), params, prepared=prepared, **of_submission)

    def send_params(
        self, request_id: str, prompt: tuple[int, ...], params: SamplingParams, *, prepared: bool = True, **fields: Any
    ) -> None:
        submission = Submission(request_id, prompt, params, **fields)
        request = create_request(submission, self.config, next(self._arrivals))
        self.keep(self.submit(request, prepared=prepared))

    def keep(self, events: Sequence[Event]) -> Sequence[Event]:
        for event in events:
            self.events[event.request_id].append(event)
        return events

    def run(self, max_steps: int = 10_000) -> None:
        for _ in range(max_steps):
            if not self.has_work:
                return
            self.keep(self.step())
        raise AssertionError(f"still live after {max_steps} steps: {self.load()}")

    def check_what_is_read(self) -> None:
        """Check for every request that decodes that the draft model has read what it is said to,
        and nothing of another's text."""
        if self._draft_model_policy is None:
            return
        assert self.draft_model is not None
        for request in self._scheduler.decoding.values():
            reader = self._draft_model_policy.reader_of(request)
            if reader is not None:
                assert reader.num_read < len(request.token_ids), "the newest token is read where it is fed"
                assert self.draft_model.holds(request.block_ids, request.token_ids[: reader.num_read])

    @property
    def waiting(self) -> list[str]:
        """Return the ids of the requests that wait, in the order in which they are served."""
        return [request.request_id for request in self._scheduler.waiting.in_order(self.now)]

    def tokens(self, request_id: str) -> list[int]:
        return [event.token_id for event in self.events[request_id] if isinstance(event, Token)]

    def finished(self, request_id: str) -> Finished:
        last = self.events[request_id][-1]
        assert isinstance(last, Finished), last
        return last


class TimedCore(RecordingCore):
    """A RecordingCore whose steps take what `costs` say, times a factor that `noise` returns.

    `believed`: what the engine is told that steps cost; by default the truth.
    """

    def __init__(
        self,
        costs: StepCosts,
        *,
        believed: StepCosts | None = None,
        noise: Callable[[], float] = lambda: 1.0,
        **overrides: Any,
    ) -> None:
        self._costs, self._noise = costs, noise
        self.took: list[float] = []
        self.began: list[float] = []
        model = StepTimeModel(believed or costs, deviation=0.0)
        super().__init__(tick_ms=0.0, step_times=model, **overrides)

    def _record(self, plan: StepPlan) -> None:
        self.began.append(self.now)
        self.took.append(self._costs.seconds(work_of(plan)) * self._noise())
        self.now += self.took[-1]
        super()._record(plan)


def resource_of(core: EngineCore, kind: type[Held]) -> Held:
    """Return the resource of this kind that the core's requests hold. ValueError: they hold none."""
    (found,) = (resource for resource in core._scheduler.resources if isinstance(resource, kind))
    return found


def answer_alone(prompt: Sequence[int], **sampling: Any) -> list[int]:
    """Return the oracle's answer: the tokens of one request that runs alone, unchunked, without a prefix cache."""
    core = RecordingCore(
        max_num_batched_tokens=10_000,
        max_prefill_tokens=10_000,
        enable_prefix_caching=False,
        num_kv_blocks=256,
    )
    core.send("alone", prompt, **sampling)
    core.run()
    return core.tokens("alone")

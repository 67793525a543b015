"""Owns the simulations behind a plan: what a number of replicas with some settings makes of the demand.
Never searches. All trials have the same seeds, and so the same requests at the same times."""

from __future__ import annotations

import asyncio
import functools
import gc
import logging
import math
import multiprocessing
import signal
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Self

from engine.config import ResolvedConfig, Targets
from loadtest.sim.planning.demand import Demand
from loadtest.sim.planning.machine import Engine, Machine, WatchedSteps
from loadtest.sim.planning.search import Trial
from loadtest.sim.routers import PrefixAffine
from loadtest.sim.scalers import EngineLoad, Scaler
from loadtest.sim.scenario import Scenario, engine_config
from loadtest.sim.simulation import simulate
from loadtest.sim.workload import Job
from loadtest.sim.world import World
from loadtest.slo import Goal
from loadtest.timeline import Timeline
from serve_app.settings.routing import RoutingSettings
from serve_app.settings.scaling import ScalingSettings

WARM_UP = 0.2
"""Requests of this share of a run's time come before those that count: it begins with idle engines."""
PATIENCE_S = 600.0
"""How long answers are waited for after the last arrival, where a goal does not say when they are too late."""


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of an application that a plan chooses, by their names in a config."""

    tpot_ms: float | None
    ttft_ms: float | None
    max_num_batched_tokens: int
    max_num_seqs: int
    load_factor: float = RoutingSettings().load_factor
    """The setting of `routing`."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """Bounds of the number of replicas, and the seconds that one takes to start."""

    least: int
    most: int
    startup_s: float


@dataclass(frozen=True, slots=True)
class Case:
    """All that the trials of a plan have in common."""

    demand: Demand
    machine: Machine
    engine: Engine
    goal: Goal
    seconds: float
    """Time of a run in which requests count."""
    few: int
    """Seeds of a trial that is not thorough: 0 to few - 1."""
    all: int
    """Seeds of a thorough one."""

    def config(self, settings: Settings) -> ResolvedConfig:
        engine, targets = self.engine, Targets(tpot_ms=settings.tpot_ms, ttft_ms=settings.ttft_ms)
        halving = engine.scheduler.chunk_halving_context
        if halving is None:
            in_chunks = settings.tpot_ms is None and engine.scheduler.enable_chunked_prefill
            halving = self.machine.halving_context() if in_chunks else 0
        return engine_config(
            max_model_len=engine.max_model_len,
            block_size=engine.block_size,
            num_kv_blocks=engine.kv_tokens // engine.block_size,
            max_num_seqs=settings.max_num_seqs,
            max_num_batched_tokens=settings.max_num_batched_tokens,
            max_prefill_tokens=engine.max_prefill_tokens or settings.max_num_batched_tokens,
            max_queued_requests=engine.max_queued_requests,
            enable_prefix_caching=engine.enable_prefix_caching,
            scheduler=replace(engine.scheduler, chunk_halving_context=halving),
            targets=targets,
        )


@dataclass(frozen=True, slots=True)
class Task:
    """One run: a trial with one seed."""

    trial: Trial[Settings]
    seed: int
    slowness: float = 1.0
    """How many times as long steps take as the engines believe at first."""
    bounds: Bounds | None = None
    """With bounds, the number of replicas follows the load."""


@dataclass(frozen=True, slots=True)
class Run:
    """What came of a task. Times are milliseconds of the requests that count; an answer that did not come in time for
    its goal counts as infinitely late."""

    offered: int
    good: int
    ttft: tuple[float, ...]
    tpot: tuple[float, ...]
    """Answers of one token have none."""
    answer_tokens: int
    replica_s: float
    """Replica-seconds that were paid for in all of the run's time, `total_s`."""
    total_s: float
    busy_s: float
    """Replica-seconds in which a step ran, of these."""
    step_s: float
    beyond_s: float
    """The part of `step_s` in steps that no measured one was as large as."""
    preemptions: int
    replicas_most: int
    sent: int
    """All requests of the run, those of its warm-up included."""


@dataclass(frozen=True, slots=True)
class Result:
    """The runs of a trial."""

    runs: tuple[Run, ...]
    goal: Goal
    seconds: float

    @property
    def good_share(self) -> float:
        offered = sum(run.offered for run in self.runs)
        return sum(run.good for run in self.runs) / offered if offered else 1.0

    @property
    def shares(self) -> list[float]:
        """The share of each seed with requests."""
        return [run.good / run.offered for run in self.runs if run.offered]

    def kept(self, name: str) -> float:
        """Return the share of requests that kept the goal's `ttft` or `tpot` alone."""
        limit = getattr(self.goal, f"{name}_ms")
        times = self._times(name)
        return sum(limit is None or time <= limit for time in times) / len(times) if times else 1.0

    def quantile(self, name: str, share: float) -> float | None:
        """Return the milliseconds of `ttft` or `tpot` that this share of requests does not exceed; None if it did not
        come to an end, or there is none."""
        times = sorted(self._times(name))
        found = times[max(math.ceil(share * len(times)), 1) - 1] if times else math.inf
        return found if found < math.inf else None

    def _times(self, name: str) -> list[float]:
        return [time for run in self.runs for time in getattr(run, name)]

    @property
    def goodput_per_s(self) -> float:
        return sum(run.good for run in self.runs) / (self.seconds * len(self.runs))

    @property
    def replicas(self) -> float:
        """Replicas that were paid for, on average over time."""
        return sum(run.replica_s for run in self.runs) / sum(run.total_s for run in self.runs)

    @property
    def utilisation(self) -> float:
        """The share of that time in which a step ran."""
        paid = sum(run.replica_s for run in self.runs)
        return min(sum(run.busy_s for run in self.runs) / paid, 1.0) if paid else 0.0

    @property
    def preemptions_per_request(self) -> float:
        """A preemption counts whichever request it is of, and so do all that were sent."""
        return sum(run.preemptions for run in self.runs) / max(sum(run.sent for run in self.runs), 1)

    @property
    def extrapolated(self) -> float:
        """The share of step time that is extrapolated beyond what was measured."""
        total = sum(run.step_s for run in self.runs)
        return sum(run.beyond_s for run in self.runs) / total if total else 0.0


def run_task(case: Case, task: Task) -> Run:
    """Simulate one run."""
    trial, machine = task.trial, case.machine
    total_s = case.seconds * (1 + WARM_UP)
    jobs = case.demand.jobs(task.seed, trial.load, total_s)
    steps = WatchedSteps(machine, task.slowness)
    config = case.config(trial.settings)
    scenario = Scenario(
        jobs=jobs,
        step_time=steps,
        goal=case.goal,
        config=config,
        replicas=trial.replicas,
        cold_start_s=task.bounds.startup_s if task.bounds else 30.0,
        prefill_tokens_per_s=machine.prefill_tokens_per_s(),
        step_deviation=machine.deviation,
        believed=machine.costs,
        duration_s=total_s,
        seed=task.seed,
    )
    sender = _Sender(jobs, case.goal, counted_from_s=total_s - case.seconds)
    routing = RoutingSettings(load_factor=trial.settings.load_factor)
    scaler = functools.partial(_scaler, task.bounds) if task.bounds else None
    _, world = simulate(
        scenario, lambda: PrefixAffine(task.seed, config.block_size, routing), scaler=scaler, send=sender.send
    )
    return sender.run(world, steps)


def _scaler(bounds: Bounds, clock: Callable[[], float]) -> Scaler:
    return EngineLoad(ScalingSettings.model_validate({"startup_time_s": bounds.startup_s}), bounds.least, bounds.most)


class _Sender:
    """Sends a run's requests when they are due, and notes the answers. It does not wait for answers that are too late
    in any case: an overloaded run would take the longest."""

    def __init__(self, jobs: Sequence[Job], goal: Goal, counted_from_s: float) -> None:
        self._jobs, self._goal, self._from_s = jobs, goal, counted_from_s
        self._answers: list[Timeline | None] = []
        self._busy_s = 0.0

    async def send(self, world: World) -> None:
        tasks = []
        for number, job in enumerate(self._jobs):
            if (wait_s := job.arrival_s - world.loop.time()) > 0:
                await asyncio.sleep(wait_s)
            tasks.append(asyncio.create_task(world.serve(job, number)))
        if (wait_s := world.duration_s - world.loop.time()) > 0:
            await asyncio.sleep(wait_s)
        replicas = [*world.deployment.gone, *world.deployment.running.values()]
        self._busy_s = sum(replica.busy_s for replica in replicas)
        if tasks:
            await asyncio.wait(tasks, timeout=self._patience_s())
        for task in tasks:
            task.cancel()
        ended = await asyncio.gather(*tasks, return_exceptions=True)
        for answer in ended:
            if isinstance(answer, BaseException) and not isinstance(answer, asyncio.CancelledError):
                raise answer
        self._answers = [None if isinstance(answer, BaseException) else answer for answer in ended]

    def _patience_s(self) -> float:
        """Return the seconds after which an answer that has not ended has missed its goal."""
        if self._goal.ttft_ms is None or self._goal.tpot_ms is None:
            return PATIENCE_S
        longest = max(job.num_answer_tokens for job in self._jobs)
        return (self._goal.ttft_ms + longest * self._goal.tpot_ms) / 1000

    def run(self, world: World, steps: WatchedSteps) -> Run:
        counted = [
            (job, answer)
            for job, answer in zip(self._jobs, self._answers, strict=True)
            if job.arrival_s >= self._from_s
        ]
        replicas = [*world.deployment.gone, *world.deployment.running.values()]
        return Run(
            offered=len(counted),
            good=sum(answer is not None and self._goal.is_met(answer) for _, answer in counted),
            ttft=tuple(_time(answer, "ttft_ms") for _, answer in counted),
            tpot=tuple(_time(answer, "tpot_ms") for job, answer in counted if job.num_answer_tokens > 1),
            answer_tokens=sum(job.num_answer_tokens for job, _ in counted),
            replica_s=world.replica_seconds,
            total_s=world.duration_s,
            busy_s=self._busy_s,
            step_s=steps.total_s,
            beyond_s=steps.beyond_s,
            preemptions=sum(replica.num_preemptions for replica in replicas),
            replicas_most=max(size for _, size in world.deployment.sizes),
            sent=len(self._jobs),
        )


def _time(answer: Timeline | None, name: str) -> float:
    """Return a time in milliseconds; infinite if it was refused, failed, or did not end in time."""
    found = None if answer is None or answer.e2e_ms is None else getattr(answer, name)
    return math.inf if found is None else float(found)


class Simulations:
    """Runs tasks in several processes. The result of a trial does not depend on how many there are."""

    def __init__(
        self, case: Case, processes: int, on_progress: Callable[[int, int], None] = lambda done, asked: None
    ) -> None:
        """`on_progress` is called with the runs that are done and those that were asked for so far."""
        self._case, self._on_progress = case, on_progress
        self._done = self._asked = 0
        self._pool = None if processes == 1 else ProcessPoolExecutor(
            processes, multiprocessing.get_context("spawn"), _prepare_worker, (case,)
        )  # fmt: skip

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
            if error is not None:  # not after minutes
                for process in multiprocessing.active_children():
                    process.terminate()

    def evaluate(self, trials: Sequence[Trial[Settings]]) -> list[Result]:
        return self.results([[Task(trial, seed) for seed in self.seeds(trial)] for trial in trials])

    def seeds(self, trial: Trial[Settings]) -> range:
        return range(self._case.all if trial.thorough else self._case.few)

    def slower(self, trial: Trial[Settings], slowness: float) -> Result:
        """Evaluate a trial on a machine whose steps take `slowness` times as long as they should."""
        return self.results([[Task(trial, seed, slowness) for seed in self.seeds(trial)]])[0]

    def scaled(self, trial: Trial[Settings], bounds: Sequence[Bounds]) -> list[Result]:
        """Evaluate a trial whose replicas follow the load, with each of these bounds."""
        return self.results(
            [
                [
                    Task(replace(trial, replicas=min(max(trial.replicas, one.least), one.most)), seed, bounds=one)
                    for seed in self.seeds(trial)
                ]
                for one in bounds
            ]
        )

    def results(self, groups: Sequence[Sequence[Task]]) -> list[Result]:
        self._asked += sum(map(len, groups))
        self._on_progress(self._done, self._asked)
        runs = iter(self._runs([task for group in groups for task in group]))
        case = self._case
        return [Result(tuple(next(runs) for _ in group), case.goal, case.seconds) for group in groups]

    def _runs(self, tasks: Sequence[Task]) -> list[Run]:
        if self._pool is None:
            return list(self._counted(run_task(self._case, task) for task in tasks))
        futures = {self._pool.submit(_run_in_worker, task): at for at, task in enumerate(tasks)}
        found: dict[int, Run] = {}
        for future in as_completed(futures):
            found[futures[future]] = future.result()
            self._count()
        return [found[at] for at in range(len(tasks))]

    def _counted(self, runs: Iterable[Run]) -> Iterator[Run]:
        for run in runs:
            self._count()
            yield run

    def _count(self) -> None:
        self._done += 1
        self._on_progress(self._done, self._asked)


_CASE: list[Case] = []
"""The case of a worker process, so that each task need not carry a whole trace."""


def _prepare_worker(case: Case) -> None:
    """Leave Ctrl-C to the process that started this one, and collect garbage rarely: tuples of events are in no
    cycle."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logging.getLogger("serve_app").setLevel(logging.ERROR)
    gc.set_threshold(100_000, 50, 100)
    _CASE[:] = [case]


def _run_in_worker(task: Task) -> Run:
    return run_task(_CASE[0], task)

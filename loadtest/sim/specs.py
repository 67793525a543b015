"""Owns the runs of the studies: a specification of each in plain values, and the simulation that it describes.
Never runs more than one at a time, and keeps no result."""

from __future__ import annotations

import asyncio
import functools
import resource
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from engine.config import SchedulerConfig, Targets
from loadtest.report import write
from loadtest.sim.loads import TIMED, TIMED_RATES, log_normal, timed_jobs, whole_trace
from loadtest.sim.routers import ROUTERS
from loadtest.sim.scalers import EngineLoad, Scaler
from loadtest.sim.scenario import Scenario, engine_config
from loadtest.sim.simulation import Happening, simulate
from loadtest.sim.step_time import ATTENTION_CONTEXT, LinearStep, measured
from loadtest.sim.summary import figures, report
from loadtest.sim.traces import TRACES
from loadtest.sim.workload import Job, poisson, thinned, window
from loadtest.sim.world import World
from loadtest.slo import Goal
from loadtest.tally import Figures
from serve_app.settings.scaling import ScalingSettings

Spec = dict[str, Any]
"""Specifies a run, with JSON values only, so that it can identify the run in the results."""

LONG_PROMPTS = Goal(ttft_ms=10_000, tpot_ms=500)
"""What two cores can achieve with prompts of thousands of tokens."""
QUICK = Goal(ttft_ms=1000, tpot_ms=150)
"""For prompts of a hundred tokens."""
STEADY = Goal(ttft_ms=1000, tpot_ms=None, gap_p95_ms=50)
"""For engines with steps of 10 ms: a stream that sometimes pauses for a prompt of 2,000 tokens still meets it."""
GOALS = {
    "autoscaling": LONG_PROMPTS,
    "routing": LONG_PROMPTS,
    "reservation": STEADY,
    "scale": QUICK,
    "disruption": QUICK,
    "targets": STEADY,
}
SERVE_TARGETS = (2, 4, 8)
SHARES = {"azure_conv": 0.12, "azure_code": 0.1, "mooncake_conv": 0.08, "mooncake_synth": 0.08}
"""The share of each trace's requests that is used, so that a handful of replicas can serve them."""
SPEEDS = {"azure_conv": 1, "azure_code": 1, "mooncake_conv": 16, "mooncake_synth": 16}
"""The factor by which engines are faster than measured. Two cores would compute Mooncake's prompts in minutes."""
FAST = {"block_size": 64, "num_kv_blocks": 4096, "max_num_batched_tokens": 2048, "max_prefill_tokens": 2048}
MOST_REPLICAS = 16
MILLION = 1_005_000
"""Mean number of requests. Arrivals are random, with a standard deviation of a thousand, so that every seed gives at
least a million."""
DISRUPTED = {"none": MILLION, "zone-loss": 250_000, "upgrade": MILLION}
"""Numbers of requests. A zone is back after half a minute, and an upgrade in ten batches takes six minutes."""
SECONDS = {
    "autoscaling": 1200.0,
    "routing": 120.0,
    "reservation": 0.0,
    "scale": 0.0,
    "disruption": 0.0,
    "targets": 60.0,
}
"""Seconds of a trace that a run takes. For autoscaling this is twice Serve's delay before it removes a replica."""


GPU_LIKE = LinearStep(step_s=0.008, token_s=22e-6, decode_row_s=30e-6, attention_context=8192)
"""A made-up machine, roughly one GPU with a model of 8 billion weights."""


@dataclass(frozen=True, slots=True)
class TightMemory:
    """Chat requests on a GPU_LIKE engine whose KV cache holds `kv_tokens`. Prompts have 1,000 tokens and answers 550 on
    average, both log-normal. Clients ask for at most `max_tokens` (None means they do not set it)."""

    kv_tokens: int
    rate: float
    max_tokens: int | None


TIGHT = {
    "unset, 40k": TightMemory(40_000, 3.0, None),
    "unset, 100k": TightMemory(100_000, 9.0, None),
    "4096, 48k": TightMemory(48_000, 4.0, 4096),
}
"""Named by the requested `max_tokens` and the size of the KV cache."""
SHORT = "256, 6k"
"""Answers take a tenth to three tenths of `max_tokens`, on engines so fast that a full step meets the goal's gap."""
VLLM_V1 = {
    "reserve_mode": "prompt",
    "watermark_blocks": 0,
    "preempt_policy": "lifo",
    "requeue": "front",
    "max_partial_prefills": 0,
    "chunk_align": 1,
    "chunk_halving_context": 0,
}
"""vLLM V1's schedule in our settings: running requests first, then each whose prompt fits. When memory runs out, the
latest request is preempted and waits at the front."""
RESERVING: dict[str, dict[str, Any]] = {
    "full": {"reserve_mode": "full", "preempt_policy": "none"},
    "prompt": {"reserve_mode": "prompt"},
    "ratio": {"reserve_mode": "ratio"},
    "learned": {"reserve_mode": "learned"},
    "vllm-v1": VLLM_V1,
}


BUDGETS = (512, 768, 1024, 1280, 2048)
"""Fixed numbers of prefill tokens in a step, among which hindsight chooses."""
STEP_NOISE = 0.1
WINDOW = 32_768
"""Maximum length of prompt and answer on those engines. An unset `max_tokens` reserves all of it."""


# --- what there is to run -------------------------------------------------------------------------------------------


def autoscaling(seeds: int, seconds: float, size: float) -> Iterator[Spec]:
    """Compare our policy with Serve's default at several targets, on each trace. `ours-lenient` is satisfied if half of
    the first tokens are in time. `fixed` always has the maximum number of replicas, as a yardstick."""
    policies = ["ours", "ours-lenient", *(f"serve-{target}" for target in SERVE_TARGETS), "fixed"]
    for seed in range(seeds):
        for trace in TRACES:
            for policy in policies:
                share = min(1.0, SHARES[trace] * size)
                yield {"trace": trace, "policy": policy, "seed": seed, "share": share, "seconds": seconds}


def routing(seeds: int, seconds: float, size: float) -> Iterator[Spec]:
    """Compare three policies on the traces whose prompts share prefixes. Each seed uses another section of the
    trace."""
    for seed in range(seeds):
        for trace in ("mooncake_conv", "mooncake_synth"):
            for policy in ROUTERS:
                yield {"trace": trace, "policy": policy, "seed": seed, "seconds": seconds, "replicas": _sized(24, size)}


def reservation(seeds: int, seconds: float, size: float) -> Iterator[Spec]:
    """Compare ways to reserve scarce memory. One load has the lengths of `benchmarks.engine.memory` on fast engines,
    which are bound by memory and not by matrix products. The others are chats that ask for more than they use, or do
    not set `max_tokens`. `full` is left out there: it would reserve a whole context, and requests would run one at a
    time."""
    for seed in range(seeds):
        for policy in RESERVING:
            yield {"trace": SHORT, "policy": policy, "seed": seed, "requests": _sized(2000, size), "rate": 56.25}
        for name, trace in TIGHT.items():
            for policy in [policy for policy in RESERVING if policy != "full"]:
                requests = _sized(round(120 * trace.rate), size)
                yield {"trace": name, "policy": policy, "seed": seed, "requests": requests, "rate": trace.rate}


def targets(seeds: int, seconds: float, size: float) -> Iterator[Spec]:
    """Compare steps that are limited by time with steps of fixed sizes, on a machine whose steps vary by a tenth.
    `time` has the goal's targets, less what the network adds; `tpot` has no target for first tokens, and so the order
    of arrival."""
    for seed in range(seeds):
        for trace in (*TIMED, *TIMED_RATES):
            for policy in ("time", "tpot", "vllm-v1", *(f"fixed-{budget}" for budget in BUDGETS)):
                yield {"trace": trace, "policy": policy, "seed": seed, "seconds": seconds, "size": size}


def scale(seeds: int, seconds: float, size: float) -> Iterator[Spec]:
    """Simulate a thousand replicas and a million requests; `size` scales the requests alone."""
    for seed in range(seeds):
        yield {"policy": "none", "seed": seed, "replicas": 1000, "requests": _sized(MILLION, size)}


def disruption(seeds: int, seconds: float, size: float) -> Iterator[Spec]:
    """Simulate a thousand replicas undisturbed, while a zone of three fails, and while every replica is replaced.
    `size` scales replicas and requests. The requests of the undisturbed run are those of `scale`."""
    for seed in range(seeds):
        for policy, requests in DISRUPTED.items():
            replicas = _sized(1000, size)
            yield {"policy": policy, "seed": seed, "replicas": replicas, "requests": _sized(requests, size)}


def _sized(number: int, size: float) -> int:
    """Scale a number, to at least one: without a replica, the first request would wait for ever."""
    return max(1, round(number * size))


STUDIES: dict[str, Callable[[int, float, float], Iterator[Spec]]] = {
    "autoscaling": autoscaling,
    "routing": routing,
    "reservation": reservation,
    "scale": scale,
    "disruption": disruption,
    "targets": targets,
}


# --- how one is run -------------------------------------------------------------------------------------------------


def run_spec(study: str, spec: Spec, reports: Path | None = None) -> Figures:
    """Run a simulation and return its figures, with its wall time, its CPU time, and the peak memory of this process.
    `reports` is a folder in which its report gets its own folder."""
    begun, begun_cpu = time.perf_counter(), time.process_time()
    world = _RUNS[study](spec, GOALS[study])
    took_s, cpu_s = time.perf_counter() - begun, time.process_time() - begun_cpu
    if reports is not None:
        write(report(world, study, spec), reports / "-".join([study, *map(str, spec.values())]))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {**figures(world), "wall_s": took_s, "cpu_s": cpu_s, "peak_memory_mib": peak}


def twins(study: str) -> list[str]:
    """Return the other studies in which the same spec means the same simulation."""
    return [
        other for other in STUDIES if other != study and _RUNS[other] is _RUNS[study] and GOALS[other] == GOALS[study]
    ]


def _run_autoscaling(spec: Spec, goal: Goal) -> World:
    trace = spec["trace"]
    jobs = window(thinned(whole_trace(trace), spec["share"], spec["seed"]), 0.0, spec["seconds"])
    if spec["policy"] == "fixed":
        return simulate(_onwhole_trace(trace, jobs, spec, goal, replicas=MOST_REPLICAS))[1]
    scenario = _onwhole_trace(trace, jobs, spec, goal, replicas=4)
    return simulate(scenario, scaler=functools.partial(_scaler, spec["policy"], scenario))[1]


def _scaler(policy: str, scenario: Scenario, clock: Callable[[], float]) -> Scaler:
    if policy.startswith("ours"):
        settings = {"startup_time_s": scenario.cold_start_s, "ttft_objective": 0.5 if policy == "ours-lenient" else 0.9}
        return EngineLoad(ScalingSettings.model_validate(settings), 1, MOST_REPLICAS)
    from loadtest.sim.serve_scaler import ServeDefault  # imports Ray, which takes seconds

    return ServeDefault(float(policy.removeprefix("serve-")), 1, MOST_REPLICAS, clock)


def _run_routing(spec: Spec, goal: Goal) -> World:
    begin = spec["seed"] * spec["seconds"]
    jobs = window(whole_trace(spec["trace"]), begin, begin + spec["seconds"])
    scenario = _onwhole_trace(spec["trace"], jobs, spec, goal, replicas=spec["replicas"])
    return simulate(scenario, lambda: ROUTERS[spec["policy"]](spec["seed"], scenario.config.block_size))[1]


def _run_reservation(spec: Spec, goal: Goal) -> World:
    made = _short_answers if spec["trace"] == SHORT else _chats
    return simulate(made(spec, goal, {"chunk_halving_context": ATTENTION_CONTEXT, **RESERVING[spec["policy"]]}))[1]


def _short_answers(spec: Spec, goal: Goal, policy: dict[str, Any]) -> Scenario:
    config = engine_config(
        num_kv_blocks=404,
        max_num_seqs=48,
        max_model_len=8192,
        enable_prefix_caching=False,
        scheduler=SchedulerConfig(**policy),
    )
    random = Random(spec["seed"])
    jobs = [
        Job(job.arrival_s, random.randint(64, 192), round(256 * random.uniform(0.1, 0.3)), max_tokens=256)
        for job in _arrivals(spec)
    ]
    return Scenario(jobs=jobs, step_time=measured()[0].faster(20), goal=goal, config=config, seed=spec["seed"])


def _chats(spec: Spec, goal: Goal, policy: dict[str, Any]) -> Scenario:
    trace = TIGHT[spec["trace"]]
    config = engine_config(
        num_kv_blocks=trace.kv_tokens // 16,
        max_num_seqs=256,
        max_model_len=WINDOW,
        max_num_batched_tokens=2048 + 256,
        max_prefill_tokens=2048,
        scheduler=SchedulerConfig(**{**policy, "chunk_halving_context": policy["chunk_halving_context"] and 8192}),
    )
    random = Random(spec["seed"])
    jobs = []
    for job in _arrivals(spec):
        prompt, answer = log_normal(random, 1000, 8000), log_normal(random, 550, trace.max_tokens or 4096)
        jobs.append(Job(job.arrival_s, prompt, answer, max_tokens=trace.max_tokens or WINDOW - prompt))
    return Scenario(jobs=jobs, step_time=GPU_LIKE, goal=goal, config=config, seed=spec["seed"])


def _run_targets(spec: Spec, goal: Goal) -> World:
    policy = spec["policy"]
    budget = int(policy.removeprefix("fixed-")) if policy.startswith("fixed-") else max(BUDGETS)
    times = Targets()
    if policy in ("time", "tpot"):
        times = Targets(tpot_ms=goal.gap_p95_ms, ttft_ms=goal.ttft_ms if policy == "time" else None)
    scheduler = SchedulerConfig(**(VLLM_V1 if policy == "vllm-v1" else {"chunk_halving_context": 0}))
    config = engine_config(
        num_kv_blocks=40_000,
        max_num_seqs=256,
        max_model_len=262_144,
        max_num_batched_tokens=budget + 256,
        max_prefill_tokens=budget,
        scheduler=scheduler,
        targets=times,
    )
    jobs = timed_jobs(spec["trace"], spec["seconds"], spec["size"], spec["seed"])
    scenario = Scenario(
        jobs=jobs, step_time=GPU_LIKE, step_deviation=STEP_NOISE, goal=goal, config=config, seed=spec["seed"]
    )
    return simulate(scenario)[1]


def _arrivals(spec: Spec) -> list[Job]:
    return poisson(spec["rate"], spec["requests"] / spec["rate"], 1, 1, spec["seed"])


def _run_large(spec: Spec, goal: Goal) -> World:
    """Simulate short equal requests at three quarters of the replicas' capacity."""
    step_time, _ = measured()
    replicas, requests = spec["replicas"], spec["requests"]
    rate = replicas * 2.5
    jobs = poisson(rate, requests / rate, num_prompt_tokens=128, num_answer_tokens=16, seed=spec["seed"])
    scenario = Scenario(
        jobs=jobs,
        step_time=step_time,
        goal=goal,
        replicas=replicas,
        num_zones=3,
        drain_s=60.0,
        config=engine_config(num_kv_blocks=2048, max_model_len=8192),
        seed=spec["seed"],
    )
    return simulate(scenario, happening=_HAPPENINGS[spec["policy"]](requests / rate))[1]


def _zone_loss(seconds: float) -> Happening:
    async def happen(world: World) -> None:
        await asyncio.sleep(seconds / 3)
        world.happened.append((world.loop.time(), "a zone of three fails"))
        world.deployment.kill_zone(0)

    return happen


def _upgrade(seconds: float) -> Happening:
    async def happen(world: World) -> None:
        await asyncio.sleep(seconds / 10)
        world.happened.append((world.loop.time(), "an upgrade begins"))
        await world.deployment.upgrade(surge=max(1, world.deployment.target // 10))
        world.happened.append((world.loop.time(), "the last replica is replaced"))

    return happen


_HAPPENINGS: dict[str, Callable[[float], Happening | None]] = {
    "none": lambda seconds: None,
    "zone-loss": _zone_loss,
    "upgrade": _upgrade,
}
_RUNS: dict[str, Callable[[Spec, Goal], World]] = {
    "autoscaling": _run_autoscaling,
    "routing": _run_routing,
    "reservation": _run_reservation,
    "scale": _run_large,
    "disruption": _run_large,
    "targets": _run_targets,
}


def _onwhole_trace(trace: str, jobs: list[Job], spec: Spec, goal: Goal, replicas: int) -> Scenario:
    step_time, _ = measured()
    step_time = step_time.faster(SPEEDS[trace])
    return Scenario(
        jobs=jobs,
        step_time=step_time,
        goal=goal,
        config=engine_config(**(FAST if SPEEDS[trace] > 1 else {})),
        replicas=replicas,
        prefill_tokens_per_s=step_time.prefill_tokens_per_s,
        duration_s=spec["seconds"],
        seed=spec["seed"],
    )

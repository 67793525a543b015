"""Owns one simulated world: its clients, gate and deployment, and the background tasks beside them.
Never makes a decision of the server: the shipped gate, migration, router, scaler and engines make those."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import aclosing
from itertools import count

from engine.protocol import EngineError, Finished, SamplingParams, Submission, Token
from loadtest.sim.attempt import SimulatedAttempt
from loadtest.sim.deployment import Deployment
from loadtest.sim.executor import Noise, token_at
from loadtest.sim.recording import Recording
from loadtest.sim.replica import Replica
from loadtest.sim.routers import Router
from loadtest.sim.scalers import Scaler
from loadtest.sim.scenario import Scenario
from loadtest.sim.workload import Job
from loadtest.tally import Tally
from loadtest.timeline import Timeline
from serve_app.admission.gate import AdmissionTicket, Gate
from serve_app.channel.migration import Migration
from serve_app.errors.api_error import ApiError, to_api_error
from serve_app.settings.limits import GatePolicy
from serve_app.settings.scaling import SignalSettings

POINT, KIND = "simulated", "request"
"""The names in the tally: a simulation is one load with one kind of request."""
DISPATCH_BACKLOG = 16
"""The number of requests beyond an engine's seats that are dispatched to it, as in serve_app.settings.application."""


class World:
    """All parts of a simulation, as seen by code that disturbs it."""

    def __init__(
        self, scenario: Scenario, router: Router, on_answer: Callable[[Timeline], None] = lambda answer: None
    ) -> None:
        """`on_answer` is called for each request that has ended; the world itself keeps only sums."""
        self.scenario = scenario
        self.loop = asyncio.get_running_loop()
        self.duration_s = scenario.duration_s or _until_the_last(scenario.jobs)
        self.tally = Tally(scenario.goal)
        self.num_prompt_tokens, self.num_cached_tokens, self.num_moves = 0, 0, 0
        self.happened: list[tuple[float, str]] = []
        """Times in seconds, with what happened to the deployment."""
        self.on_answer = on_answer
        self.ends: dict[str, int] = {}
        self.router = router
        self.deployment = Deployment(
            self._make_replica,
            router,
            cold_start_s=scenario.cold_start_s,
            drain_s=scenario.drain_s,
            num_zones=scenario.num_zones,
            seed=scenario.seed,
        )
        self.gate = Gate(self._gate_policy(), lambda: len(self.deployment.running), self.loop.time)
        self.deployment.on_change.append(self.gate.refresh)
        self._migration = Migration(max_migrations=3, timeout_s=600.0, max_model_len=scenario.config.max_model_len)
        self._made = count()
        self.num_live = 0
        self.replica_seconds = 0.0

    def _make_replica(self, name: str, zone: int, on_empty: Callable[[Replica], None]) -> Replica:
        scenario = self.scenario
        target = {} if scenario.goal.ttft_ms is None else {"ttft_target_ms": scenario.goal.ttft_ms}
        signals = SignalSettings(prefill_tokens_per_s=scenario.prefill_tokens_per_s, **target)
        slowness = scenario.slowness[next(self._made) % len(scenario.slowness)]
        noise = Noise(scenario.step_deviation, f"{scenario.seed} {name}", slowness)
        steps, believed = scenario.step_time, scenario.believed
        return Replica(name, zone, scenario.config, steps, self.ends, signals, on_empty, noise=noise, believed=believed)

    def _gate_policy(self) -> GatePolicy:
        config = self.scenario.config
        capacity = config.max_num_seqs + config.max_queued_requests
        dispatched = config.max_num_seqs + min(DISPATCH_BACKLOG, config.max_queued_requests)
        return GatePolicy(dispatch_per_engine=dispatched, concurrent_per_engine=capacity)

    # --- one request ------------------------------------------------------------------------------------------------

    async def serve(self, job: Job, number: int) -> Timeline:
        """Serve a request to its end. It is refused, it fails, or it gets every token of its answer, once and in
        order."""
        recording = Recording(self.loop.time(), job.num_prompt_tokens)
        self.num_live += 1
        try:
            with self.gate.enter() as ticket:
                await ticket.dispatched(job.num_prompt_tokens)
                recording.num_waiting_outside = self.gate.num_waiting
                await self._stream(job, f"r{number}", recording, ticket)
        except (ApiError, EngineError) as error:
            recording.error = to_api_error(error)
        self.num_live -= 1
        self.num_prompt_tokens += job.num_prompt_tokens
        self.num_cached_tokens += recording.num_cached_tokens
        self.num_moves += recording.num_moves
        answer = recording.ended(self.loop.time())
        self.on_answer(answer)
        return answer

    async def _stream(self, job: Job, name: str, recording: Recording, ticket: AdmissionTicket) -> None:
        submission = self._submission(job, name)
        tokens: list[int] = []

        def start(submission: Submission, avoid: tuple[str, ...]) -> SimulatedAttempt:
            recording.num_moves += submission.request_id != name
            return SimulatedAttempt(self.deployment, submission, avoid, recording)

        try:
            async with aclosing(self._migration.stream(submission, start)) as stream:
                async for events in stream:
                    ticket.started()
                    tokens += [event.token_id for event in events if isinstance(event, Token)]
                    if isinstance(events[-1], Finished):
                        ticket.finished()
        finally:
            del self.ends[name]
        begin = job.num_prompt_tokens
        assert tokens == [token_at(begin + i) for i in range(job.num_answer_tokens)], f"{name}: wrong tokens"

    def _submission(self, job: Job, name: str) -> Submission:
        """Make the submission. It has a `seed` only because the migration would draw one; sampling does not depend on
        it."""
        most = job.num_answer_tokens if job.max_tokens is None else job.max_tokens
        self.ends[name] = job.num_prompt_tokens + job.num_answer_tokens
        return Submission(name, job.prompt(int(name[1:])), SamplingParams(temperature=0, seed=0, max_tokens=most))

    # --- all of them ------------------------------------------------------------------------------------------------

    async def send_all(self) -> None:
        """Send each request when it is due, whether earlier ones have ended or not; return when all have ended."""
        self.tally.open_window(POINT, self.duration_s)
        async with asyncio.TaskGroup() as group:
            for number, job in enumerate(self.scenario.jobs):
                if (wait_s := job.arrival_s - self.loop.time()) > 0:
                    await asyncio.sleep(wait_s)
                group.create_task(self._send(job, number))

    async def _send(self, job: Job, number: int) -> None:
        self.tally.record(POINT, KIND, await self.serve(job, number), (0.0, self.duration_s))

    async def scale(self, scaler: Scaler) -> None:
        while True:
            target = scaler.decide(self.deployment, self.loop.time(), self.num_live)
            if target != self.deployment.target:
                self.deployment.scale(target)
            await asyncio.sleep(scaler.period_s)

    async def tell_router(self, period_s: float) -> None:
        while True:
            await asyncio.sleep(period_s)
            self.router.update(self.deployment.running)

    async def count_cost(self) -> None:
        await asyncio.sleep(self.duration_s)
        self.replica_seconds = self.deployment.replica_seconds()


def _until_the_last(jobs: Sequence[Job]) -> float:
    """Return the seconds in which all jobs arrive, including the last."""
    return max(1.0, max((job.arrival_s for job in jobs), default=0.0) + 1e-3)

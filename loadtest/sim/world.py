"""Owns one simulated world: who sends, through which gate, to which deployment, and what else goes on meanwhile.
Never decides anything that the server decides; gate, migration, router, scaler and engines do, as they are shipped."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import aclosing

from engine.protocol import EngineError, Finished, SamplingParams, Submission, Token
from loadtest.sim.attempt import SimulatedAttempt
from loadtest.sim.deployment import Deployment
from loadtest.sim.executor import token_at
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
"""In the tally: a simulation is one load, of one kind of request."""
DISPATCH_BACKLOG = 16
"""As serve_app.settings.application has it: requests beyond its seats that are with an engine."""


class World:
    """What a simulation consists of, for whoever lets something happen to it."""

    def __init__(
        self, scenario: Scenario, router: Router, on_answer: Callable[[Timeline], None] = lambda answer: None
    ) -> None:
        """`on_answer`: told of each request when it has ended; only their sums are kept."""
        self.scenario = scenario
        self.loop = asyncio.get_running_loop()
        self.duration_s = scenario.duration_s or _until_the_last(scenario.jobs)
        self.tally = Tally(scenario.goal)
        self.num_prompt_tokens, self.num_cached_tokens, self.num_moves = 0, 0, 0
        self.happened: list[tuple[float, str]] = []
        """Seconds, and what befell the deployment then."""
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
        self.num_live = 0
        self.replica_seconds = 0.0

    def _make_replica(self, name: str, zone: int, on_empty: Callable[[Replica], None]) -> Replica:
        scenario = self.scenario
        target = {} if scenario.goal.ttft_ms is None else {"ttft_target_ms": scenario.goal.ttft_ms}
        signals = SignalSettings(prefill_tokens_per_s=scenario.prefill_tokens_per_s, **target)
        return Replica(name, zone, scenario.config, scenario.step_time, self.ends, signals, on_empty)

    def _gate_policy(self) -> GatePolicy:
        config = self.scenario.config
        capacity = config.max_num_seqs + config.max_queued_requests
        dispatched = config.max_num_seqs + min(DISPATCH_BACKLOG, config.max_queued_requests)
        return GatePolicy(dispatch_per_engine=dispatched, concurrent_per_engine=capacity)

    # --- one request ------------------------------------------------------------------------------------------------

    async def serve(self, job: Job, number: int) -> Timeline:
        """A request's whole life. It is refused, it fails, or it has every token of its answer, once and in order."""
        seen = Recording(self.loop.time(), job.num_prompt_tokens)
        self.num_live += 1
        try:
            with self.gate.enter() as ticket:
                await ticket.dispatched(job.num_prompt_tokens)
                seen.num_waiting_outside = self.gate.num_waiting
                await self._stream(job, f"r{number}", seen, ticket)
        except (ApiError, EngineError) as error:
            seen.error = to_api_error(error)
        self.num_live -= 1
        self.num_prompt_tokens += job.num_prompt_tokens
        self.num_cached_tokens += seen.num_cached_tokens
        self.num_moves += seen.num_moves
        answer = seen.ended(self.loop.time())
        self.on_answer(answer)
        return answer

    async def _stream(self, job: Job, name: str, seen: Recording, ticket: AdmissionTicket) -> None:
        submission = self._submission(job, name)
        tokens: list[int] = []

        def start(submission: Submission, avoid: tuple[str, ...]) -> SimulatedAttempt:
            seen.num_moves += submission.request_id != name
            return SimulatedAttempt(self.deployment, submission, avoid, seen)

        try:
            async with aclosing(self._migration.stream(submission, start)) as stream:
                async for events in stream:
                    ticket.started()
                    tokens += [event.token_id for event in events if isinstance(event, Token)]
                    if isinstance(events[-1], Finished):
                        ticket.finished()
        finally:
            del self.ends[name]
        asked = job.num_prompt_tokens
        assert tokens == [token_at(asked + i) for i in range(job.num_answer_tokens)], f"{name}: not its answer"

    def _submission(self, job: Job, name: str) -> Submission:
        """`seed` is given, for the migration would draw one; what is sampled does not depend on it."""
        most = job.num_answer_tokens if job.max_tokens is None else job.max_tokens
        self.ends[name] = job.num_prompt_tokens + job.num_answer_tokens
        return Submission(name, job.prompt(int(name[1:])), SamplingParams(temperature=0, seed=0, max_tokens=most))

    # --- all of them ------------------------------------------------------------------------------------------------

    async def send_all(self) -> None:
        """Send each request when it is due, whatever became of those before; return when all have ended."""
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
    """Seconds in which all jobs come, the last one included."""
    return max(1.0, max((job.arrival_s for job in jobs), default=0.0) + 1e-3)

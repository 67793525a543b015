"""Owns the Locust side of a load: its options, a driver in each worker, the merged tally in the master, the run's end.
Never times a request: the driver does, and Locust's own rounded figures are not part of the report."""

from __future__ import annotations

import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import gevent
from gevent.event import Event
from locust import User, events, task
from locust.env import Environment
from locust.exception import StopUser
from locust.runners import LocalRunner, MasterRunner, WorkerRunner

from loadtest.driver import Driver
from loadtest.options import SETTLE_S, add_options, goal_from, plan_from, seed_of, target_from
from loadtest.presence import lost_workers
from loadtest.progress import Progress
from loadtest.report import Generator, RunEvents, document_of, verdict, write
from loadtest.tally import Tally
from loadtest.target import Held, held
from loadtest.timeline import Timeline

_TALLY, _DONE, _READY, _GO = "load_tally", "load_done", "load_ready", "load_go"
_REPORT_S = 1.0
_SHOWN = (
    *("scenario", "model", "seconds", "warm_up", "rate", "rates", "clients", "arrivals", "cv", "lengths", "longest"),
    *("trace", "goal", "limits", "max_lag_ms", "max_cpu", "request_timeout", "do", "do_at", "settle", "seed"),
)
"""Options that are shown in the report. API keys are not."""


class Load(User):
    """The single Locust user of each worker. It drives the worker's whole share, however many requests run at a
    time."""

    @task
    def drive(self) -> None:
        _WORKERS[id(self.environment)].run()
        raise StopUser


class Worker:
    """Drives a share of the load and reports to the master: new results every second, and its own end."""

    def __init__(self, environment: Environment) -> None:
        self._environment = environment
        self._cpu_percent = 0.0
        self._may_begin: dict[int, Event] = defaultdict(Event)

    def run(self) -> None:
        began, spent = time.monotonic(), time.process_time()
        error = self._drive()
        share = (time.process_time() - spent) / (time.monotonic() - began)
        self._send(_DONE, {"cpu_percent": max(100 * share, self._cpu_percent), "error": error})

    def _drive(self) -> str:
        """Drive the load and return why it broke off, or an empty string. The master must be told, or it waits for
        ever."""
        try:
            tally, driver = self._make()
            reporting = gevent.spawn(self._report_on, tally, driver)
            try:
                driver.run()
            finally:
                reporting.kill()
                self._report(tally, driver)
        except Exception as failed:  # noqa: BLE001  # any failure fails the run
            return f"{type(failed).__name__}: {failed}"
        return ""

    def _make(self) -> tuple[Tally, Driver]:
        options: Any = self._environment.parsed_options
        runner = self._environment.runner
        shard, shards = (runner.worker_index, options.expect_workers) if isinstance(runner, WorkerRunner) else (0, 1)
        if not 0 <= shard < shards:  # a worker that reconnected, or one too many: a share would be missing
            raise RuntimeError(f"worker {shard} of {shards}")
        tally = Tally(goal_from(options))
        target = target_from(options, self._environment.host or "")
        return tally, Driver(plan_from(options), target, tally, options.seed, shard, shards, self._count, self._wait)

    def _wait(self, number: int) -> None:
        """Wait until all workers are ready for the point: one worker's unfinished requests would disturb the next
        point."""
        if isinstance(self._environment.runner, WorkerRunner):
            self._send(_READY, {"number": number})
            self._may_begin[number].wait()

    def begin(self, number: int) -> None:
        self._may_begin[number].set()

    def _count(self, kind: str, answer: Timeline) -> None:
        """Feed Locust's own tables and files with what they can show."""
        times = {"TTFT": answer.ttft_ms, "TPOT": answer.tpot_ms, "E2E": answer.e2e_ms, "LAG": answer.lag_ms}
        wrong = RuntimeError(answer.error) if answer.error else None
        for name, value in times.items():
            if value is not None:
                self._environment.events.request.fire(
                    request_type=name,
                    name=kind,
                    response_time=value,
                    response_length=0,
                    exception=wrong if name == "LAG" else None,  # every request has exactly one LAG entry
                    context={"kind": kind, "status": answer.status, "finish_reason": answer.finish_reason},
                )

    def _report_on(self, tally: Tally, driver: Driver) -> None:
        while True:
            gevent.sleep(_REPORT_S)
            self._report(tally, driver)

    def _report(self, tally: Tally, driver: Driver) -> None:
        runner = self._environment.runner
        self._cpu_percent = max(self._cpu_percent, runner.current_cpu_usage if runner else 0.0)
        driver.note_window()
        state = {"in_flight": driver.in_flight, "point": driver.point}
        self._send(_TALLY, {"tally": tally.take().to_json(), **state})

    def _send(self, kind: str, data: dict[str, Any]) -> None:
        runner = self._environment.runner
        if isinstance(runner, WorkerRunner):
            runner.send_message(kind, data)
        else:
            _MASTERS[id(self._environment)].hear(kind, "local", data)


class Master:
    """Merges the workers' results, shows progress, and ends the run when all workers are done or one is lost."""

    def __init__(self, environment: Environment) -> None:
        self._environment = environment
        options: Any = environment.parsed_options
        self._options = options
        self._plan = plan_from(options)
        self._tally = Tally(goal_from(options))
        self._workers = options.expect_workers if isinstance(environment.runner, MasterRunner) else 1
        self._heard: dict[str, float] = {}
        self._in_flight: dict[str, int] = {}
        self._cpu_percent: dict[str, float] = {}
        """By worker, for the workers that are done."""
        self._ready: dict[int, set[str]] = defaultdict(set)
        self._events = RunEvents()
        self._before: Held | None = None
        self._doing: gevent.Greenlet | None = None
        self._progress = Progress(self._plan, sys.stderr)
        self._began = time.monotonic()

    def start(self) -> None:
        self._began = time.monotonic()
        if self._plan.settles:
            self._before = self._held()
        gevent.spawn(self._watch).link_exception(self._fail)
        if self._options.do:
            self._doing = gevent.spawn(self._do)
            self._doing.link_exception(self._fail)

    def _fail(self, greenlet: gevent.Greenlet) -> None:
        """End the run after a bug of ours. It would otherwise never end."""
        self._events.broken.append(f"{type(greenlet.exception).__name__}: {greenlet.exception}")
        assert self._environment.runner is not None
        self._environment.runner.quit()

    def hear(self, kind: str, worker: str, data: dict[str, Any]) -> None:
        self._heard[worker] = time.monotonic()
        if kind == _READY:
            self._begin_when_all_are_ready(data["number"], worker)
        elif kind == _DONE:
            self._cpu_percent[worker] = data["cpu_percent"]
            self._in_flight[worker] = 0
            self._events.broken += [f"worker {worker}: {data['error']}"] if data["error"] else []
        else:
            self._tally.merge(Tally.from_json(data["tally"]))
            self._in_flight[worker] = data["in_flight"]
            self._progress.point = data["point"]

    def _begin_when_all_are_ready(self, number: int, worker: str) -> None:
        self._ready[number].add(worker)
        if len(self._ready[number]) == self._workers:
            assert self._environment.runner is not None
            self._environment.runner.send_message(_GO, {"number": number})

    def end(self) -> int:
        """Write the report and return the run's exit code."""
        missing = self._workers - len(self._cpu_percent)
        if missing and not self._events.broken:
            self._events.ended = self._how_far()
        cpu_percent = max(self._cpu_percent.values(), default=0.0)
        generator = Generator(self._workers, cpu_percent, self._options.max_cpu, self._options.max_lag_ms)
        settings = {"url": self._environment.host, **{name: getattr(self._options, name) for name in _SHOWN}}
        document = document_of(self._plan, self._tally, generator, self._events, settings)
        out = Path(self._options.out)
        write(document, out)
        self._progress.end()
        print("\n".join([*verdict(document), str(out / "report.html")]), flush=True)
        return int(document["exit_code"])

    def _how_far(self) -> str:
        """Say how far a run has come that is ended from outside, and what of it is left out."""
        lasts_s, after_s = sum(point.seconds for point in self._plan.points), time.monotonic() - self._began
        cut = sum(self._in_flight.values())
        left_out = f"; {cut} unfinished requests, which this cut off, are left out" if cut else ""
        return f"after {after_s:.0f} s of a load of {lasts_s:.0f} s{left_out}"

    def _watch(self) -> None:
        while not self._is_over():
            gevent.sleep(_REPORT_S)
            self._progress.show(time.monotonic() - self._began, self._tally, sum(self._in_flight.values()))
        if self._doing and not self._doing.ready():
            self._events.broken = self._events.broken or ["--do has not ended with the load"]
            self._doing.kill()
        self._settle()
        assert self._environment.runner is not None
        self._environment.runner.quit()

    def _is_over(self) -> bool:
        self._events.broken += lost_workers(
            self._heard, self._cpu_percent, self._workers, self._began, time.monotonic()
        )
        return bool(self._events.broken) or len(self._cpu_percent) >= self._workers

    def _settle(self) -> None:
        """Wait until the server holds nothing of the load any more. Record it if the time for that runs out."""
        settle_s = SETTLE_S if self._options.settle is None else self._options.settle
        deadline = time.monotonic() + settle_s
        while self._before is not None and not self._events.broken:
            now = self._held()
            left = now.left_over(self._before) if now else None
            if left is None or time.monotonic() > deadline:
                self._events.unsettled += [left] if left else []
                return
            gevent.sleep(_REPORT_S)

    def _held(self) -> Held | None:
        try:
            return held(target_from(self._options, self._environment.host or ""))
        except OSError as unknown:
            self._events.unsettled.append(f"what the server holds cannot be seen: {unknown}")
            return None

    def _do(self) -> None:
        """Run the command of `--do`. If it fails, the run fails: an undisturbed load proves nothing."""
        seconds = sum(point.seconds for point in self._plan.points)
        gevent.sleep(seconds / 3 if self._options.do_at is None else self._options.do_at)
        self._events.happened.append((time.monotonic() - self._began, self._options.do))
        done = subprocess.run(
            self._options.do, shell=True, capture_output=True, text=True, errors="replace", check=False
        )
        if done.returncode:
            self._events.broken.append(f"--do ended with {done.returncode}: {done.stderr.strip()[-300:]}")


_WORKERS: dict[int, Worker] = {}
_MASTERS: dict[int, Master] = {}


@events.init_command_line_parser.add_listener
def _add_options(parser: Any) -> None:
    add_options(parser)


@events.init.add_listener
def _on_init(environment: Environment, runner: Any, **_: Any) -> None:
    options: Any = environment.parsed_options
    options.seed = seed_of(
        options
    )  # drawn by the master; workers receive it with all other options when the load starts
    _WORKERS[id(environment)] = Worker(environment)
    if isinstance(runner, MasterRunner | LocalRunner):
        _MASTERS[id(environment)] = Master(environment)
    if isinstance(runner, MasterRunner):
        for kind in (_TALLY, _DONE, _READY):
            runner.register_message(kind, _hear)
    if isinstance(runner, WorkerRunner):
        runner.register_message(_GO, _begin)


def _hear(environment: Environment, msg: Any, **_: Any) -> None:
    _MASTERS[id(environment)].hear(msg.type, msg.node_id, msg.data)


def _begin(environment: Environment, msg: Any, **_: Any) -> None:
    _WORKERS[id(environment)].begin(msg.data["number"])


@events.test_start.add_listener
def _on_start(environment: Environment, **_: Any) -> None:
    if master := _MASTERS.get(id(environment)):
        master.start()


@events.quitting.add_listener
def _on_quitting(environment: Environment, **_: Any) -> None:
    if master := _MASTERS.get(id(environment)):
        environment.process_exit_code = master.end()

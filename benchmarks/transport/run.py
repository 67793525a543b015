"""Owns the transport benchmark: what each streamed token costs between client and engine, for several ways to send it.
Never measures a model: every engine is scripted to the same pace, so that only the path differs."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.transport.figures import (
    HELD_PACE,
    STEP_MS,
    Figures,
    Measured,
    cost_figures,
    first_token_figures,
    pace_figures,
)
from loadtest.client import ENDED, GO, READY, Load, Outcome
from loadtest.server import KINDS, ROOT, CpuTime, Server, busy_s, haproxy_environment, machine, serve_run

BATCH_MS = 50.0
"""The default of Ray Serve LLM's RAYLLM_MODEL_RESPONSE_BATCH_TIMEOUT_MS."""
PROBE_PAUSE_MS = (20.0, 60.0)
SETTLE_S, IDLE_S = 2.0, 3.0

ENGINE = {
    "executor": "fake",
    "fake": {"step_delay_ms": STEP_MS},
    "max_model_len": 4096,
    "max_num_seqs": 512,
    "max_num_batched_tokens": 32768,  # all prompts of a burst fit one step
    "num_kv_blocks": 16384,
}
APPLICATIONS: dict[str, dict[str, Any]] = {
    "ours": {"import_path": "serve_app.app:build", "args": {"model": "fake", "engine": ENGINE}},
    "handle": {"import_path": "benchmarks.transport.apps:build", "args": {"step_ms": STEP_MS}},
    "batches": {"import_path": "benchmarks.transport.apps:build", "args": {"step_ms": STEP_MS, "batch_ms": BATCH_MS}},
    "no-hop": {"import_path": "benchmarks.transport.apps:build", "args": {"step_ms": STEP_MS, "hop": False}},
}


@dataclass(frozen=True, slots=True)
class Route:
    """A way from the client to the engine and back."""

    application: str
    haproxy: bool
    title: str


ROUTES = {
    "ours-haproxy": Route("ours", True, "this server, HAProxy"),
    "ours-python": Route("ours", False, "this server, Python proxy"),
    "handle-haproxy": Route("handle", True, "streaming handle, HAProxy"),
    "handle-python": Route("handle", False, "streaming handle, Python proxy"),
    "batches-haproxy": Route("batches", True, "50 ms batches, HAProxy"),
    "batches-python": Route("batches", False, "50 ms batches, Python proxy"),
    "no-hop-haproxy": Route("no-hop", True, "no engine replica, HAProxy"),
}


@dataclass(frozen=True, slots=True)
class Plan:
    """How much is measured."""

    streams: tuple[int, ...]
    tokens: int
    rounds: int
    waves: int | None
    """Waves of the token load. None means about 64 answers in total, with at least two waves."""
    probes: int
    seed: int

    def token_waves(self, streams: int) -> int:
        return self.waves or max(2, 64 // streams)

    def set_up_waves(self, streams: int) -> int:
        return self.waves or max(4, 320 // streams)


# --- one load -------------------------------------------------------------------------------------------------------


def idle_share(server: Server) -> CpuTime:
    time.sleep(SETTLE_S)
    before, started = server.cpu_time(), time.monotonic()
    time.sleep(IDLE_S)
    return {kind: spent / (time.monotonic() - started) for kind, spent in _since(before, server.cpu_time()).items()}


def run_load(server: Server, load: Load, idle: CpuTime) -> Measured:
    """Run one load in its own client process. CPU time is read before and after, while the client waits."""
    command = [sys.executable, "-m", "loadtest.client"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT) as client:
        assert client.stdin is not None
        assert client.stdout is not None
        client.stdin.write(json.dumps(dataclasses.asdict(load)) + "\n")
        client.stdin.flush()
        if client.stdout.readline() != READY:
            raise RuntimeError("the client could not connect")
        before, busy, started = server.cpu_time(), busy_s(), time.monotonic()
        client.stdin.write(GO)
        client.stdin.flush()
        ended = client.stdout.readline()
        after, busy, took_s = server.cpu_time(), busy_s() - busy, time.monotonic() - started
        answers = client.stdout.readline()
    if ended != ENDED or not answers:
        raise RuntimeError("the client broke off")
    spent = _since(before, after)
    net = {kind: spent[kind] - idle.get(kind, 0.0) * took_s for kind in KINDS}
    outcome = Outcome.from_json(answers)
    others_s = busy - sum(spent.values()) - outcome.cpu_s
    return Measured(outcome, net, idle, others_s / took_s / (os.cpu_count() or 1))


def _since(before: CpuTime, after: CpuTime) -> CpuTime:
    """Return the differences, at least 0: the time of a process that has ended is lost."""
    return {kind: max(after.get(kind, 0.0) - before.get(kind, 0.0), 0.0) for kind in KINDS}


# --- one path at one load -------------------------------------------------------------------------------------------


def measure_streams(server: Server, streams: int, plan: Plan, draw: random.Random) -> tuple[Figures, list[str]]:
    """Measure one path with this many concurrent streams. Returns its figures and its errors."""

    def run(load_streams: int, tokens: int, waves: int, **more: Any) -> Measured:
        load = Load(server.port, load_streams, tokens, waves, draw.getrandbits(32), **more)
        return run_load(server, load, idle_share(server))

    set_up = run(streams, 1, plan.set_up_waves(streams))
    long = run(streams, plan.tokens, plan.token_waves(streams))
    background = {"background_streams": streams, "background_tokens": 4 * plan.tokens}
    probes = run(1, 1, plan.probes, pause_ms=PROBE_PAUSE_MS, **background)
    found = cost_figures(set_up, long, plan.tokens) | pace_figures(long.outcome.answers)
    found |= first_token_figures(probes.outcome.answers, found.get("gap_p50_ms", STEP_MS))
    return found, [*set_up.errors, *long.errors, *probes.errors, *probes.outcome.background_errors]


# --- all paths ------------------------------------------------------------------------------------------------------


def measure(names: Sequence[str], plan: Plan) -> dict[str, Any]:
    """Measure all paths in turn, round by round, each with its own server."""
    draw = random.Random(plan.seed)
    rounds: dict[tuple[str, int], list[Figures]] = defaultdict(list)
    failures: dict[tuple[str, int], list[str]] = defaultdict(list)
    for number in range(plan.rounds):
        for name in names:
            with _served(ROUTES[name]) as server:
                for streams in plan.streams:
                    found, errors = measure_streams(server, streams, plan, draw)
                    rounds[name, streams].append(found)
                    failures[name, streams] += errors
                    print(number, name, streams, {key: round(value, 1) for key, value in found.items()}, flush=True)
    cells = [_cell(name, streams, found, failures[name, streams]) for (name, streams), found in rounds.items()]
    load = dataclasses.asdict(plan) | {"step_ms": STEP_MS, "batch_ms": BATCH_MS, "held_pace": HELD_PACE}
    return {"benchmark": "transport", **machine(), "seed": plan.seed, "load": load, "config": APPLICATIONS} | {
        "cells": cells
    }


@contextmanager
def _served(route: Route) -> Iterator[Server]:
    application = APPLICATIONS[route.application]
    if not route.haproxy:
        environment: Any = nullcontext({"RAY_SERVE_ENABLE_HA_PROXY": "0"})
    elif route.application == "ours":  # this server sets up HAProxy itself
        environment = nullcontext({"RAY_SERVE_ENABLE_HA_PROXY": "1"})
    else:
        environment = haproxy_environment()
    with environment as variables, serve_run(application, variables) as server:
        yield server


def _cell(name: str, streams: int, found: list[Figures], errors: list[str]) -> dict[str, Any]:
    """Return median, minimum and maximum over the rounds of each figure that every round has."""
    common = [key for key in found[0] if all(key in figures for figures in found)]
    figures = {key: [figures[key] for figures in found] for key in common}
    spread = {key: [statistics.median(values), min(values), max(values)] for key, values in figures.items()}
    return {"path": name, "streams": streams, "errors": sorted(set(errors))[:5], "num_errors": len(errors), **spread}


_COLUMNS = {
    "us_per_token": "µs a token",
    "haproxy_us_per_token": "HAProxy",
    "proxy_us_per_token": "proxy",
    "ingress_us_per_token": "ingress",
    "engine_us_per_token": "engine",
    "set_up_ms": "set-up ms",
    "first_token_added_ms": "first token + ms",
    "gap_p50_ms": "gap p50 ms",
    "gap_p99_ms": "p99",
    "gap_max_ms": "max",
    "held": "held",
}


def table(document: dict[str, Any]) -> str:
    """Render the table of docs/benchmarks/transport.md: medians, with minimum and maximum of the first figure in
    brackets."""
    lines = [f"| path | streams | {' | '.join(_COLUMNS.values())} |", "|---" * (len(_COLUMNS) + 2) + "|"]
    for cell in document["cells"]:
        found = [_shown(key, cell.get(key)) for key in _COLUMNS]
        lines.append(f"| {ROUTES[cell['path']].title} | {cell['streams']} | {' | '.join(found)} |")
    return "\n".join(lines)


def _shown(key: str, spread: list[float] | None) -> str:
    if spread is None:
        return "–"
    if key == "us_per_token":
        return f"{spread[0]:.0f} ({spread[1]:.0f}–{spread[2]:.0f})"
    return f"{spread[0]:.1f}" if key.endswith("_ms") else f"{spread[0]:.0f}"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.transport.run",
        description="Measure what each streamed token costs between client and engine, for several ways to send it. "
        "All engines are scripted to the same pace, so that only the path differs.",
    )
    parser.add_argument(
        "--paths", nargs="*", choices=list(ROUTES), default=list(ROUTES), help="ways to measure; all if not given"
    )
    parser.add_argument(
        "--streams", type=int, nargs="*", default=[16, 256], help="numbers of concurrent streams to measure"
    )
    parser.add_argument("--tokens", type=int, default=150, help="tokens of each answer (%(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="rounds over all ways (%(default)s)")
    parser.add_argument("--waves", type=int, help="answers of each stream; more give a steadier figure")
    parser.add_argument(
        "--probes", type=int, default=60, help="single requests that measure the time to the first token (%(default)s)"
    )
    parser.add_argument(
        "--seed",
        type=int,
        default=time.time_ns() % 1_000_000,
        help="seed of the load; another one each time if not given",
    )
    parser.add_argument("--out", type=Path, help="also write the JSON document to this file")
    options = parser.parse_args(arguments)
    plan = Plan(tuple(options.streams), options.tokens, options.rounds, options.waves, options.probes, options.seed)
    document = measure(options.paths, plan)
    if options.out:
        options.out.write_text(json.dumps(document, indent=1) + "\n")
    print(table(document))
    print(json.dumps(document))


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(number))  # the running server is ended, too
    main()

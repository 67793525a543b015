"""Owns the options of a load, which the command and the Locust file share, and their meaning.
Never starts anything."""

from __future__ import annotations

import argparse
import dataclasses
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from loadtest.arrivals import PROCESSES
from loadtest.plan import Plan
from loadtest.slo import Goal, parse_goal
from loadtest.target import Target, first_model
from loadtest.workloads import WORKLOADS, Settings, plan_of

KEY = "CHUNKSERVE_API_KEY"
"""The variable with an API key. An option would show it to everybody who lists this machine's processes."""
MAX_LAG_MS, MAX_CPU, SETTLE_S = 50.0, 90.0, 30.0

Number = TypeVar("Number", int, float)


def add_options(parser: argparse.ArgumentParser, out: str = "loadtest/runs") -> None:
    """Add the options of a load. No name collides with one of Locust's own options. `out` is the default of --out."""
    add = parser.add_argument
    add(
        "--scenario",
        choices=list(WORKLOADS),
        default="smoke",
        help="which load to run; loadtest/README.md describes each (%(default)s)",
    )
    add("--model", default="", help="model to ask for; the server's first if not given")
    add("--seconds", type=float, default=None, help="seconds of each point; the scenario's own if not given")
    add("--warm-up", type=float, default=None, help="seconds at the beginning of each point that are not counted")
    add("--rate", type=float, default=None, help="requests a second, for an open load")
    add("--rates", default="", help="several rates, one point each: 1,2,4")
    add(
        "--clients",
        default="",
        help="concurrent clients, for a closed load; several numbers give one point each: 1,4,16",
    )
    add(
        "--arrivals",
        choices=PROCESSES,
        default=None,
        help="how the arrivals of an open load are spread; poisson if not given",
    )
    add(
        "--cv",
        type=float,
        default=None,
        help="coefficient of variation of the gaps, for --arrivals gamma; above 1 is burstier than poisson",
    )
    add("--lengths", type=float, default=None, help="factor by which all prompts and answers are longer")
    add(
        "--longest",
        type=int,
        default=None,
        help="longest request that the server accepts, in tokens; longer requests of a trace are left out",
    )
    add(
        "--trace",
        default="",
        help="file with a trace: .csv or .jsonl with arrival_s, prompt_tokens and answer_tokens, or a trace of Azure's "
        "or Mooncake's; also with .gz",
    )
    add(
        "--goal",
        default="ttft:1000,tpot:100",
        help="latencies up to which an answer is good, in ms: ttft, tpot, e2e, gap_p95 (%(default)s)",
    )
    add("--limits", default=None, help="conditions that the run must meet to pass: ttft_p99_ms<=1000,good_share>=0.9")
    add(
        "--max-lag-ms",
        type=float,
        default=MAX_LAG_MS,
        help="the run fails if the load generator's own lateness exceeds this p99, in ms (%(default)s)",
    )
    add(
        "--max-cpu",
        type=float,
        default=MAX_CPU,
        help="the run fails if a worker uses more than this percentage of a core (%(default)s)",
    )
    add(
        "--request-timeout",
        type=float,
        default=600.0,
        help="seconds after which a client gives up waiting for an answer (%(default)s)",
    )
    add(
        "--keys",
        default="",
        help=f"API keys by tenant: ann=KEY,bob=KEY; a single key is used by all ({KEY}: the key without any)",
    )
    add("--do", default="", help="shell command that is run once during the load")
    add(
        "--do-at",
        type=float,
        default=None,
        help="when to run it, in seconds from the beginning; after a third of the load if not given",
    )
    add(
        "--settle",
        type=float,
        default=None,
        help="seconds that the server has to release everything after cancel and soak; 30 if not given",
    )
    add("--seed", type=int, default=None, help="seed of prompts and arrivals; another one each time if not given")
    add("--out", default=out, help=f"folder for report.html and report.json ({out or 'none are kept'})")


def plan_from(options: argparse.Namespace) -> Plan:
    """Raises: ValueError: an option is invalid. OSError: the trace cannot be read."""
    plan = plan_of(options.scenario, _settings(options))
    for name in ("max_lag_ms", "max_cpu", "request_timeout"):
        if not 0 <= getattr(options, name) < float("inf"):
            raise ValueError(f"--{name.replace('_', '-')} is 0 or more, not {getattr(options, name):g}")
    if options.settle is not None and not (plan.settles and 0 <= options.settle < float("inf")):
        raise ValueError(f"--settle is for cancel and soak, and 0 or more: {options.settle:g}")
    if options.do_at is not None:
        seconds = sum(point.seconds for point in plan.points)
        if not options.do or not 0 <= options.do_at < seconds:
            raise ValueError(f"--do-at is for --do, and within the load's {seconds:g} s: {options.do_at:g}")
    return plan


def goal_from(options: argparse.Namespace) -> Goal:
    """Raises: ValueError: as parse_goal."""
    return parse_goal(options.goal)


def target_from(options: argparse.Namespace, url: str) -> Target:
    """Without --keys, the key of the variable KEY is sent, if it is set.

    Raises: ValueError: the keys are not pairs. OSError: neither the options nor the server name a model."""
    keys = keys_from(options.keys) or ({"": key} if (key := os.environ.get(KEY)) else {})
    target = Target(url.rstrip("/"), options.model, options.request_timeout, keys)
    return target if target.model else dataclasses.replace(target, model=first_model(target))


def keys_from(text: str) -> dict[str, str]:
    """Raises: ValueError: a part lacks a tenant or a key."""
    pairs = [part.partition("=") for part in filter(None, text.split(","))]
    if any(not tenant or not key for tenant, _, key in pairs):
        raise ValueError("--keys is TENANT=KEY,TENANT=KEY")  # does not repeat the value, which may be a key
    return {tenant: key for tenant, _, key in pairs}


def seed_of(options: argparse.Namespace) -> int:
    """Return the given seed, or else a new one each time: repeated prompts would be found in a prefix cache."""
    return random.SystemRandom().getrandbits(32) if options.seed is None else int(options.seed)


def _settings(options: argparse.Namespace) -> Settings:
    tenants = tuple(keys_from(options.keys))
    return Settings(
        seconds=_positive(options.seconds, "--seconds"),
        warm_up_s=options.warm_up,
        rate=_positive(options.rate, "--rate"),
        rates=tuple(_numbers(options.rates, "--rates", float)),
        clients=tuple(_numbers(options.clients, "--clients", int)),
        arrivals=options.arrivals,
        cv=_positive(options.cv, "--cv"),
        lengths=_positive(options.lengths, "--lengths"),
        longest=options.longest,
        trace=Path(options.trace) if options.trace else None,
        limits=options.limits,
        tenants=tenants if len(tenants) > 1 else (),
        has_command=bool(options.do),
    )


def _numbers(text: str, name: str, kind: Callable[[str], Number]) -> list[Number]:
    try:
        numbers = [kind(part) for part in filter(None, text.split(","))]
    except ValueError as bad:
        raise ValueError(f"{name} is numbers with commas between them, not {text!r}") from bad
    for value in numbers:
        _positive(value, name)
    return numbers


def _positive(value: float | None, name: str) -> float | None:
    if value is not None and not 0 < value < float("inf"):
        raise ValueError(f"{name} is a positive number, not {value:g}")
    return value

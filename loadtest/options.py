"""Owns the options of a load, the same for the command and for the Locust file, and what they mean.
Never starts anything."""

from __future__ import annotations

import argparse
import dataclasses
import random
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from loadtest.arrivals import PROCESSES
from loadtest.plan import Plan
from loadtest.slo import Goal, parse_goal
from loadtest.target import Target, first_model
from loadtest.workloads import WORKLOADS, Settings, plan_of

MAX_LAG_MS, MAX_CPU, SETTLE_S = 50.0, 90.0, 30.0

Number = TypeVar("Number", int, float)


def add_options(parser: argparse.ArgumentParser) -> None:
    """None has a name of Locust's own."""
    add = parser.add_argument
    add("--scenario", choices=list(WORKLOADS), default="smoke", help="the load; see loadtest/README.md")
    add("--model", default="", help="its name; the server's first, if not given")
    add("--seconds", type=float, default=None, help="of each point; the default is the scenario's")
    add("--warm-up", type=float, default=None, help="seconds at a point's beginning that are not counted")
    add("--rate", type=float, default=None, help="requests a second of an open load")
    add("--rates", default="", help="several, one point each: 1,2,4")
    add("--clients", default="", help="of a closed load; several, one point each: 1,4,16")
    add("--arrivals", choices=PROCESSES, default=None, help="of an open load; poisson, if not given")
    add("--cv", type=float, default=None, help="of gamma's gaps, standard deviation over mean; above 1 is burstier")
    add("--lengths", type=float, default=None, help="a factor of all prompts and answers")
    add(
        "--longest", type=int, default=None, help="tokens that the server takes; a trace's longer requests are left out"
    )
    add("--trace", default="", help="path of a trace: Azure's .csv or Mooncake's .jsonl, either also .gz")
    add("--goal", default="ttft:1000,tpot:100", help="by when an answer is good, in ms: ttft, tpot, e2e, gap_p95")
    add("--limits", default=None, help="gates: ttft_p99_ms<=1000,good_share>=0.9")
    add(
        "--max-lag-ms",
        type=float,
        default=MAX_LAG_MS,
        help="p99 of the generator's own lateness; beyond it a run fails",
    )
    add(
        "--max-cpu", type=float, default=MAX_CPU, help="percent of a core that a worker may take; beyond it a run fails"
    )
    add("--request-timeout", type=float, default=600.0, help="seconds until a client gives an answer up")
    add("--keys", default="", help="API keys by tenant: ann=KEY,bob=KEY; one alone is everybody's")
    add("--do", default="", help="a command that runs during the load, once")
    add("--do-at", type=float, default=None, help="seconds after the beginning; a third of the load, if not given")
    add(
        "--settle", type=float, default=None, help="seconds in which the server has to let go after cancel and soak; 30"
    )
    add("--seed", type=int, default=None, help="of prompts and arrivals; another each time, if not given")
    add("--out", default="loadtest/runs", help="folder of report.html and report.json")


def plan_from(options: argparse.Namespace) -> Plan:
    """Raises: ValueError: an option that makes no sense. OSError: a trace that cannot be read."""
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
    """Raises: ValueError: keys that are no pairs. OSError: no model was named, and the server does not name one."""
    target = Target(url.rstrip("/"), options.model, options.request_timeout, keys_from(options.keys))
    return target if target.model else dataclasses.replace(target, model=first_model(target))


def keys_from(text: str) -> dict[str, str]:
    """Raises: ValueError: a part without a tenant or a key."""
    pairs = [part.partition("=") for part in filter(None, text.split(","))]
    if any(not tenant or not key for tenant, _, key in pairs):
        raise ValueError("--keys is TENANT=KEY,TENANT=KEY")  # and not what was given: it may be a key
    return {tenant: key for tenant, _, key in pairs}


def seed_of(options: argparse.Namespace) -> int:
    """Another each time: prompts that were asked before would be found in a prefix cache."""
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
        found = [kind(part) for part in filter(None, text.split(","))]
    except ValueError as bad:
        raise ValueError(f"{name} is numbers with commas between them, not {text!r}") from bad
    for value in found:
        _positive(value, name)
    return found


def _positive(value: float | None, name: str) -> float | None:
    if value is not None and not 0 < value < float("inf"):
        raise ValueError(f"{name} is a positive number, not {value:g}")
    return value

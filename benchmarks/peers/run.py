"""Owns the comparison with vLLM and Ray Serve LLM: every server in turn, round by round, under the same loads.
Never leaves out a server silently: one that cannot be started is named, and the run fails."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import random
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.peers.comparison import Document, table
from benchmarks.peers.servers import SERVERS, USUAL, NotInstalled, Setup, served_model
from loadtest.completions import Client
from loadtest.scenarios import SCENARIOS, Scenario, measure, warm_up
from loadtest.server import ROOT, Server, machine

RESULTS = ROOT / "loadtest" / "results" / "peers.json"
READY_TIMEOUT_S = 600.0
"""vLLM compiles the model when it first starts on a machine."""
LAST_LINES = 15
"""The number of last lines of a failed server's output that are shown."""

Life = dict[str, Any]
Scenarios = dict[str, Scenario]


def live(name: str, setup: Setup, scenarios: Scenarios, seed: int) -> Life:
    """Start a server, and measure the time to its first token, its figures in each scenario, and its memory after them.

    Raises:
        NotInstalled: the server is not installed.
        RuntimeError: it does not start, or does not answer the first request.
    """
    draw = random.Random(seed)
    started = time.monotonic()
    with SERVERS[name].start(setup) as server:
        server.wait_until_ready(SERVERS[name].ready_path, READY_TIMEOUT_S)
        model = served_model(server)
        cold_start_s = asyncio.run(_first_token(server, model)) - started
        errors: list[str] = []
        for scenario in scenarios.values():
            errors += warm_up(scenario, server.port, model, draw.getrandbits(31))
        found = {key: _measured(scenario, server, model, draw.getrandbits(31)) for key, scenario in scenarios.items()}
        of_warm_up = {"warm_up_errors": errors} if errors else {}
        return {"cold_start_s": cold_start_s, **_memory(server, setup), **of_warm_up, "scenarios": found}


async def _first_token(server: Server, model: str) -> float:
    """Return the time of the first token on the monotonic clock."""
    async with Client(server.port, model) as client:
        answer = (await client.ask("Once upon a time", 1)).read()
    if answer.error:
        raise RuntimeError(f"the first request failed: {answer.error}\n{server.output}")
    return answer.arrivals[0]


def _measured(scenario: Scenario, server: Server, model: str, seed: int) -> Life:
    figures, errors = measure(scenario, server.port, model, seed)
    return {"seed": seed, **figures, "num_errors": len(errors), "errors": sorted(set(errors))[:5]}


def _memory(server: Server, setup: Setup) -> Life:
    by_kind = server.resident_bytes()
    resident = sum(by_kind.values())
    beyond = resident - setup.weights_bytes - setup.kv_cache_gib * 2**30
    of_kinds = {kind: size / 1e9 for kind, size in sorted(by_kind.items())}
    engine = by_kind.get("engine", resident) / 1e9  # others' servers are one process, or none is theirs alone
    return {
        "resident_gb": resident / 1e9,
        "engine_gb": engine,
        "beyond_gb": beyond / 1e9,
        "resident_gb_by_kind": of_kinds,
    }


# --- all servers ----------------------------------------------------------------------------------------------------


def compare(
    names: Sequence[str],
    setup: Setup,
    scenarios: Scenarios,
    rounds: int,
    seed: int,
    keep: Callable[[Document], object],
    *,
    short: bool = False,
) -> Document:
    """Measure all servers in turn, every other round in the opposite order. A server that failed is not tried again.
    `keep` gets the document after each round: a run takes long, and an interruption must not lose its results.
    short: the loads are too short for figures that count."""
    draw = random.Random(seed)
    failed: dict[str, str] = {}
    lives: list[dict[str, Life]] = []
    document = {
        "benchmark": "peers",
        **machine(),
        "peers": setup.versions(),
        "model": setup.config["applications"][0]["args"]["model"],
        "seed": seed,
        "short": short,
        "scenarios": {name: dataclasses.asdict(scenario) for name, scenario in scenarios.items()},
        "servers": list(names),
        "failed": failed,
        "rounds": lives,
    }
    for number in range(rounds):
        order = names if number % 2 == 0 else names[::-1]
        lives.append(_round(number, order, setup, scenarios, draw.getrandbits(31), failed))
        keep(document)
    return document


def _round(
    number: int, names: Sequence[str], setup: Setup, scenarios: Scenarios, seed: int, failed: dict[str, str]
) -> dict[str, Life]:
    """Measure each server that has not failed, and add new failures to `failed`. All get the same prompts, since each
    server starts with an empty cache."""
    lives: dict[str, Life] = {}
    for name in names:
        if name in failed:
            continue
        _say(f"round {number}, {name} ...")
        try:
            lives[name] = live(name, setup, scenarios, seed)
            _say(json.dumps(lives[name]))
        except (NotInstalled, RuntimeError, OSError) as error:
            failed[name] = "\n".join(str(error).splitlines()[-LAST_LINES:])
            _say(f"failed: {error}")
    return lives


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def failures(document: Document) -> list[str]:
    """Return why the comparison is invalid: failed requests, and requested servers that did not run."""
    found = [f"{name}: {why}" for name, why in document["failed"].items()]
    for number, lives in enumerate(document["rounds"]):
        for name, life in lives.items():
            found += [f"{name}, warm-up, round {number}: {error}" for error in life.get("warm_up_errors", ())]
            for scenario, figures in life["scenarios"].items():
                if errors := figures["num_errors"]:
                    found.append(f"{name}, {scenario}, round {number}: {errors} errors, {figures['errors']}")
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the tables, then the document as the last line. Returns 1 if anything failed."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.peers.run",
        description="Compare this server with vLLM and Ray Serve LLM on this machine: each server in turn, round by "
        "round, under the same loads. If a server cannot be started, the run names it and fails.",
    )
    options = parsed(parser, arguments, list(USUAL), SCENARIOS, RESULTS)
    document = compared(options, SCENARIOS)
    print(table(document), end="\n\n")
    return reported(document)


def parsed(
    parser: argparse.ArgumentParser,
    arguments: Sequence[str] | None,
    servers: Sequence[str],
    scenarios: Scenarios,
    out: Path,
) -> argparse.Namespace:
    """Read the options of a comparison, which by default has these servers and all of these loads."""
    parser.add_argument(
        "--servers",
        nargs="+",
        choices=list(SERVERS),
        default=list(servers),
        help="servers to compare (%(default)s)",
    )
    parser.add_argument(
        "--scenarios",
        nargs="+",
        choices=list(scenarios),
        default=list(scenarios),
        help="loads to run; all if not given",
    )
    parser.add_argument("--short", action="store_true", help="run a little of each load, to see that it works")
    parser.add_argument("--rounds", type=int, default=3, help="rounds over all servers (%(default)s)")
    parser.add_argument(
        "--seed",
        type=int,
        default=time.time_ns() % 1_000_000,
        help="seed of the load; another one each time if not given",
    )
    parser.add_argument(
        "--peers-venv", type=Path, default=ROOT / ".venv-peers", help="virtual environment with the other servers"
    )
    parser.add_argument("--out", type=Path, default=out, help="file for the results")
    return parser.parse_args(arguments)


def compared(options: argparse.Namespace, scenarios: Scenarios) -> Document:
    """Measure what the options ask for, and keep it in their file after each round."""
    setup = Setup.of_this_repository(options.peers_venv)
    chosen = {name: scenarios[name] for name in options.scenarios}
    if options.short:
        chosen = {name: scenario.warm_up for name, scenario in chosen.items()}

    def keep(document: Document) -> None:
        options.out.write_text(json.dumps(document, indent=1) + "\n")

    return compare(options.servers, setup, chosen, options.rounds, options.seed, keep, short=options.short)


def reported(document: Document) -> int:
    """Say what failed, and print the document as the last line. Returns the exit status: 1 if anything failed."""
    for failure in failures(document):
        _say(f"FAILED: {failure}")
    print(json.dumps(document))
    return 1 if failures(document) else 0


def end_with_sigterm() -> None:
    """End the running server, too, when this process is ended."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(number))


if __name__ == "__main__":
    end_with_sigterm()
    sys.exit(main())

"""Implements `chunkserve plan`: from a load and kept step times, the settings and replicas that hold it, by simulation.
Never starts an engine and never measures. Never imports the simulator before the arguments are read."""

from __future__ import annotations

import argparse
import copy
import json
import shlex
import sys
from collections.abc import Sequence
from concurrent.futures import BrokenExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from engine.host.cores import usable_threads
from serve_app.front.command.arguments import BAD_INPUT, FAILED, Parser, file_to_write
from serve_app.front.command.progress import Progress
from serve_app.front.output import write_file
from serve_app.front.signals import exit_on_signals

if TYPE_CHECKING:
    from engine.config import EngineConfig
    from loadtest.sim.planning.demand import Demand
    from loadtest.sim.planning.machine import Engine, Machine
    from loadtest.sim.planning.plan import Plan

CANNOT_BE_HELD = 3
"""The exit status if no settings hold the load, as that of a load test that misses a limit."""
FEWEST_REQUESTS = 3
"""A run of fewer would call any load held."""
_HEAD = "# Written by `chunkserve plan`. `chunkserve serve {name}` serves it.\n"


class _Refused(ValueError):
    """The input makes no plan. The message is one line."""


def main(arguments: Sequence[str], prog: str) -> int:
    """Print the plan, and return 0; 3 if nothing holds the load."""
    options = _parser(prog).parse_args(arguments)
    exit_on_signals()
    if options.write_config is not None and options.write_config.exists():
        print(f"{prog}: --write-config: {options.write_config} is there already: choose another name", file=sys.stderr)
        return BAD_INPUT
    try:
        plan, base = _planned(options)
    except (_Refused, OSError, ValueError) as refusal:
        print(f"{prog}: {' '.join(str(refusal).split())}", file=sys.stderr)
        return BAD_INPUT
    except BrokenExecutor as lost:
        print(f"{prog}: a simulation's process ended ({lost}): there may be too little memory", file=sys.stderr)
        return FAILED
    from loadtest.sim.planning.answer import document_of, lines_of

    document = document_of(plan, options.cost)
    config = _config(base.content, document)
    if options.json is not None:  # before the plan is printed, whose reader may have left
        write_file("--json", options.json, json.dumps(document | {"config": config}, indent=1) + "\n")
    if options.write_config is not None:
        _write(config, options.write_config)
    print("\n".join(lines_of(document)))
    if options.write_config is not None:
        print(f"wrote {options.write_config}")
    return 0 if plan.is_held else CANNOT_BE_HELD


def _parser(prog: str) -> argparse.ArgumentParser:
    parser = Parser(
        prog,
        "Find the fewest replicas, and the settings, with which a load keeps its targets: simulated with the engine's "
        "own scheduler and router, by step times that an engine has measured and kept. Says what to set, what that "
        "holds, at what cost, and how sure it is. The exit status is 0, or 3 if nothing within the limits holds it.",
    )
    add = parser.add_argument
    add(
        "--trace",
        type=Path,
        metavar="FILE",
        help=".csv or .jsonl with arrival_s, prompt_tokens and answer_tokens, or a trace of Azure's or Mooncake's; "
        "also with .gz",
    )
    add("--rate", type=float, help="requests a second; with --trace, the rate to stretch or squeeze it to")
    lengths = "MEAN[:P95]"
    add("--prompt-tokens", metavar=lengths, help="length of prompts; without P95 that is 2.7 times the mean")
    add("--answer-tokens", metavar=lengths, help="length of answers")
    add("--ttft-ms", type=float, help="longest time to first token; the config's engine.targets.ttft_ms if not given")
    add("--tpot-ms", type=float, help="longest mean time a token of an answer; the config's engine.targets.tpot_ms")
    add("--attainment", type=float, default=99.0, help="percent of answers that keep both (%(default)g)")
    add("--config", type=Path, metavar="FILE", help="config that the plan changes; without it a config for --model")
    add("--model", help="hub id, directory or .gguf file; the default model if neither is given")
    add(
        "--steps",
        type=Path,
        metavar="FILE",
        help="step times of a machine with the model: a file that an engine keeps in step_times of its cache, or a "
        "result of benchmarks.engine.step_model; without it, those that an engine has kept here",
    )
    add("--kv-tokens", type=int, metavar="N", help="tokens of an engine's KV cache; as in --steps if not given")
    add("--min-replicas", type=int, default=1, metavar="N", help="fewest replicas (%(default)s)")
    add("--max-replicas", type=int, default=16, metavar="N", help="most replicas (%(default)s)")
    add("--autoscaling", action="store_true", help="also find bounds with which the replicas follow the load")
    add("--startup-s", type=float, default=60.0, help="seconds that a replica takes to start (%(default)g)")
    add("--cost", type=float, metavar="PRICE", help="price of a replica for an hour, in any currency")
    add("--seeds", type=int, default=5, help="runs behind each figure; the search itself makes two (%(default)s)")
    add("--seconds", type=float, help="simulated seconds of a run; chosen from the load if not given")
    add(
        "--processes",
        type=int,
        default=usable_threads()[0],
        help="simulations at a time (the cores that this process may use)",
    )
    add("--json", type=file_to_write, metavar="FILE", help="write the plan with all figures to this file")
    add("--write-config", type=file_to_write, metavar="FILE", help="write a config with the plan's settings")
    return parser


# --- input ------------------------------------------------------------------------------------------------------------


class _Base(NamedTuple):
    """The config that a plan changes."""

    content: dict[str, Any]
    """A whole Serve config; its only application of this project is ARGS."""
    engine: EngineConfig
    model: str


def _planned(options: argparse.Namespace) -> tuple[Plan, _Base]:
    _check_numbers(options)
    from loadtest.sim.planning.choices import Choices, run_seconds
    from loadtest.sim.planning.evaluate import Case, Simulations
    from loadtest.sim.planning.machine import engine_of, read_machine
    from loadtest.sim.planning.plan import Limits, make_plan
    from loadtest.slo import Goal

    config = _given_config(options)
    targets = config.engine.targets if config is not None else None
    goal = Goal(
        options.ttft_ms or (targets.ttft_ms if targets else None),
        options.tpot_ms or (targets.tpot_ms if targets else None),
    )
    if goal.ttft_ms is None and goal.tpot_ms is None:
        raise _Refused("a plan needs targets: --ttft-ms, --tpot-ms or both")
    model = options.model or (config.model if config else None)
    steps = _steps(options.steps, model)
    try:
        machine = read_machine(steps)
    except ValueError as error:
        raise _Refused(f"{steps}: {error}") from error
    base = config or _made(model, machine)
    _check_measured(steps, machine, base.engine)
    _check_model(steps, machine, base.model)
    engine = engine_of(machine, base.engine, kv_tokens=_kv_tokens(options, base), max_model_len=None)
    demand = _demand(options, engine)
    seconds = options.seconds or run_seconds(demand, goal, machine)
    if (num_requests := demand.rate * seconds) < FEWEST_REQUESTS:
        least = FEWEST_REQUESTS / demand.rate
        raise _Refused(f"--seconds {seconds:g} is time for {num_requests:.1f} requests: expected at least {least:.0f}")
    case = Case(demand, machine, engine, goal, seconds, few=min(2, options.seeds), all=options.seeds)
    limits = Limits(
        options.attainment / 100, options.min_replicas, options.max_replicas, options.autoscaling, options.startup_s
    )
    progress = Progress()
    choices = Choices(machine, engine, goal, demand, base.engine)
    try:
        with Simulations(case, options.processes, progress.count) as simulations:
            return make_plan(case, limits, choices, simulations, progress.say), base
    finally:
        progress.end()


def _check_numbers(options: argparse.Namespace) -> None:
    bounds = {
        "rate": (1e-4, 1e6),
        "ttft_ms": (1.0, 1e7),
        "tpot_ms": (0.1, 1e6),
        "attainment": (50.0, 100.0),
        "kv_tokens": (1, 2**40),
        "min_replicas": (1, 4096),
        "max_replicas": (1, 4096),
        "startup_s": (0.0, 86_400.0),
        "cost": (0.0, 1e9),
        "seeds": (1, 100),
        "seconds": (1.0, 1e6),
        "processes": (1, 1024),
    }
    for name, (least, most) in bounds.items():
        value = getattr(options, name)
        if value is not None and not least <= value <= most:
            raise _Refused(f"--{name.replace('_', '-')}: expected a number from {least:g} to {most:g}, not {value:g}")
    if options.min_replicas > options.max_replicas:
        raise _Refused(f"--min-replicas {options.min_replicas} is more than --max-replicas {options.max_replicas}")


def _given_config(options: argparse.Namespace) -> _Base | None:
    if options.config is None:
        return None
    if options.model is not None:
        raise _Refused("--model: the config names the model; give one of the two")
    from serve_app.front.command.problems import find_problems

    findings = find_problems(options.config)
    if findings.problems:
        raise _Refused(findings.problems[0])
    if len(findings.applications) != 1:
        raise _Refused(f"{options.config} has {len(findings.applications)} applications of this project, not one")
    (application,) = findings.applications
    if application.settings.models:
        raise _Refused(f"{options.config}: args.models: a plan is for one model; give a config that has it alone")
    content = copy.deepcopy(application.config.content)
    args = content["applications"][application.number].setdefault("args", {})
    content["applications"] = [{**content["applications"][application.number], "args": args}]
    return _Base(content, application.settings.engine, application.settings.model)


def _made(model: str | None, machine: Machine) -> _Base:
    """Return the config that `chunkserve serve MODEL` would make, on a machine like the one that was measured."""
    from engine.config import DEFAULT_MODEL
    from serve_app.front.command.base_config import base_config
    from serve_app.settings.application import AppSettings

    content = base_config(model or DEFAULT_MODEL, on_gpu=machine.is_gpu)
    settings = AppSettings.model_validate(content["applications"][0]["args"])
    return _Base(content, settings.engine, settings.model)


def _steps(given: Path | None, model: str | None) -> Path:
    """Return the file of step times: the given one, or what an engine has kept of the model on this machine."""
    if given is not None:
        return given
    from engine.build.step_times import kept_step_times
    from engine.config import DEFAULT_MODEL

    name = model or DEFAULT_MODEL
    found = [path for one in _directories(name) if (path := kept_step_times(one)) is not None]
    if not found:
        raise _Refused(
            f"no engine has kept step times of {name} here: it does when it first starts with engine.targets, as by "
            f"`chunkserve serve {name}` on a CPU; --steps takes those of another machine"
        )
    return max(found, key=lambda path: path.stat().st_mtime)


def _check_measured(steps: Path, machine: Machine, engine: EngineConfig) -> None:
    """Refuse step times of an engine that differs from the config in what steps depend on most."""
    for name in ("device", "dtype", "kv_cache_dtype", "num_threads"):
        asked, was = getattr(engine, name), machine.settings.get(name)
        if asked not in (None, "auto", was) and was is not None:
            raise _Refused(f"{steps}: measured with {name} {was}, but the config's engine.{name} is {asked}")


def _check_model(steps: Path, machine: Machine, model: str) -> None:
    """Refuse step times of another model, as far as files here tell: a plan would look just as sure with them."""
    measured = [machine.shape] if machine.shape else _shapes(machine.model) if machine.model else []
    asked = set(_shapes(model))
    if asked and measured and asked.isdisjoint(measured):
        named = f", {machine.model}," if machine.model and machine.model != model else ""
        raise _Refused(
            f"{steps}: measured with another model{named} than {model}: the digest of its config.json begins with "
            f"{measured[0][:8]}, and here with {min(asked)[:8]}; give that model by --model, or step times of this one"
        )
    if not (asked and measured) and machine.model != model:
        why = f"{model} is not prepared here" if measured else "they do not say which model was measured"
        print(f"{steps}: step times are not compared with the model: {why}", file=sys.stderr)


def _shapes(model: str) -> list[str]:
    """Return the shapes of a model's prepared forms; none for a name that means nothing here."""
    from engine.build.step_times import model_shape

    try:
        return [model_shape(directory) for directory in _directories(model)]
    except _Refused:
        return []


def _directories(model: str) -> list[Path]:
    """Return the directories of a model, one for each form that is prepared."""
    from engine.checkpoints.model_cache import ModelError
    from engine.checkpoints.model_name import ready_directory

    try:
        found = [ready_directory(model, weights=False, stored=stored) for stored in (False, True)]
    except ModelError as error:
        raise _Refused(str(error)) from error
    return [one for one in dict.fromkeys(found) if one is not None]


def _kv_tokens(options: argparse.Namespace, base: _Base) -> int | None:
    """Return the tokens of the KV cache, as far as options and config say; None: as when steps were measured."""
    if options.kv_tokens is not None:
        return int(options.kv_tokens)
    config = base.engine
    if config.num_kv_blocks is not None:
        return config.num_kv_blocks * config.block_size
    if config.kv_cache_memory_gib is not None and (shape := _shape(base.model)) is not None:
        from loadtest.sim.planning.machine import kv_bytes_a_token

        return int(config.kv_cache_memory_gib * 2**30 / kv_bytes_a_token(shape, config.kv_cache_dtype))
    return None


def _shape(model: str) -> dict[str, Any] | None:
    """Return the config.json of a model, if it is prepared."""
    for directory in _directories(model):
        found: dict[str, Any] = json.loads((directory / "config.json").read_text(encoding="utf-8"))
        return found
    return None


def _demand(options: argparse.Namespace, engine: Engine) -> Demand:
    from loadtest.sim.planning.demand import Numbers, Recorded
    from loadtest.traces import read_trace

    numbers = {name: getattr(options, name) for name in ("prompt_tokens", "answer_tokens")}
    if options.trace is not None:
        if given := [f"--{name.replace('_', '-')}" for name, value in numbers.items() if value is not None]:
            raise _Refused(f"{given[0]}: a trace has lengths of its own; give --trace or numbers")
        trace = read_trace(options.trace)
        try:
            return Recorded.of(trace, longest=engine.longest, num_stretches=options.seeds, rate=options.rate)
        except ValueError as error:
            raise _Refused(f"{options.trace}: {error}") from error
    if options.rate is None or None in numbers.values():
        raise _Refused("a plan needs a load: --trace, or --rate, --prompt-tokens and --answer-tokens")
    prompt, answer = (_lengths(f"--{name.replace('_', '-')}", text) for name, text in numbers.items())
    if prompt.mean + answer.mean > engine.longest:
        raise _Refused(
            f"--prompt-tokens {prompt.mean:g} and --answer-tokens {answer.mean:g} are more than the "
            f"{engine.longest} tokens that a request may have"
        )
    return Numbers(options.rate, prompt, answer, engine.longest)


def _lengths(name: str, text: str) -> Any:
    from loadtest.sim.planning.demand import Lengths

    mean, colon, p95 = text.partition(":")
    try:
        numbers = [float(mean), *([float(p95)] if colon else [])]
    except ValueError:
        raise _Refused(f"{name}: expected MEAN or MEAN:P95, such as 500:1500, not {text!r}") from None
    try:
        return Lengths.of(*numbers)
    except ValueError as error:
        raise _Refused(f"{name}: {error}") from error


# --- output -----------------------------------------------------------------------------------------------------------


def _config(base: dict[str, Any], document: dict[str, Any]) -> dict[str, Any]:
    """Return a Serve config with the plan's settings. What is unset is left out."""
    from serve_app.settings.routing import RoutingSettings

    config = copy.deepcopy(base)
    args, chosen = config["applications"][0]["args"], document["set"]
    engine = {**(args.get("engine") or {})}
    targets = {name: chosen[name] for name in ("tpot_ms", "ttft_ms") if chosen[name] is not None}
    engine.pop("targets", None)
    engine |= {"targets": targets} if targets else {}
    args["engine"] = engine | {name: chosen[name] for name in ("max_num_batched_tokens", "max_num_seqs")}
    routing = args.get("routing") or {}
    if chosen["load_factor"] != routing.get("load_factor", RoutingSettings().load_factor):
        args["routing"] = {**routing, "load_factor": chosen["load_factor"]}
    bounds = args.pop("autoscaling", None) or {}
    args.pop("engine_replicas", None)
    if (scaled := document["autoscaling"]) is None or not scaled["is_cheaper"]:
        args["engine_replicas"] = chosen["engine_replicas"]
    else:
        names = ("min_replicas", "max_replicas", "startup_time_s")
        args["autoscaling"] = {**bounds, **{name: scaled[name] for name in names}}
    return config


def _write(config: dict[str, Any], path: Path) -> None:
    import yaml

    name = shlex.quote(path.name) if path.name.isprintable() else "FILE"  # it stands in a comment of one line
    text = _HEAD.format(name=name) + yaml.safe_dump(config, sort_keys=False)
    write_file("--write-config", path, text, new=True)

"""Implements `chunkserve check`: the problems of a config, and with `--explain` what this machine would make of it.
Never serves it, and never downloads or converts a model. Never imports what checks it before the arguments are read, so
that --help need not wait for it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from serve_app.front.command.arguments import BAD_INPUT, Parser

if TYPE_CHECKING:
    from engine.build.machine import Machine
    from engine.config import ResolvedConfig
    from serve_app.front.preflight import Application

_GIB = 2**30
_SHOWN = ("device", "kernels", "quantize", "num_kv_blocks", "kv_tiers", "scheduler")
"""Reasons that are among the first lines already."""


def main(arguments: Sequence[str], prog: str) -> int:
    """Print the problems, one a line, and return 0 if there are none."""
    options = _parser(prog).parse_args(arguments)
    from engine.build.machine import this_machine
    from engine.checkpoints.model_cache import ModelError
    from serve_app.front.command.problems import find_problems
    from serve_app.front.config_file import ConfigRefused

    findings = find_problems(options.config)
    problems = list(findings.problems)
    if options.explain and not problems:
        machine = this_machine()
        print("\n".join(machine_lines(machine)), flush=True)
        for model in (model for application in findings.applications for model in application.each_model()):
            try:
                print("\n".join(_explained(model, machine)), flush=True)
            except (ConfigRefused, ModelError) as refusal:
                problems += str(refusal).splitlines()
    for warning in findings.warnings:
        print(f"warning: {warning}")
    for problem in problems:
        print(problem, file=sys.stderr)
    if problems:
        return BAD_INPUT
    print(f"{options.config}: no problem found")
    return 0


def _parser(prog: str) -> argparse.ArgumentParser:
    parser = Parser(
        prog,
        "Find what is wrong with a config, one line a problem, as far as it can be known without serving it: unknown "
        "keys, wrong values, settings that exclude each other, files and models that are not there. The exit status is "
        "0 if nothing is, and 2 otherwise.",
    )
    parser.add_argument("config", type=Path, help="a Serve config, such as config.yaml")
    parser.add_argument(
        "--explain",
        action="store_true",
        help="also show this machine and what it would make of the config: device, kernels, types, memory, and why; "
        "takes some seconds, since it loads torch, and needs a prepared model",
    )
    return parser


def machine_lines(machine: Machine) -> list[str]:
    """Describe the machine, in the form of `engine_lines`."""
    memory = machine.memory
    room = "unknown" if memory is None else (
        f"{memory.free / _GIB:.1f} of {memory.total / _GIB:.1f} GiB are free ({memory.source})"
    )  # fmt: skip
    threads, why = machine.threads
    instructions = ", ".join(machine.instructions) or "no vector extensions"
    return [
        f"cores    {threads} of {machine.processor}: {instructions} ({why})",
        f"memory   {room}",
        f"GPUs     {', '.join(machine.gpus) or 'none'}",
    ]


def _explained(application: Application, machine: Machine) -> Iterator[str]:
    """Yield what the engines of an application's model would be, if its files are prepared.

    Raises:
        ConfigRefused: the engines could not start.
        ModelError: a model is damaged.
    """
    from serve_app.front.start import engine_lines
    from serve_app.front.this_machine import EngineCheck

    settings = application.settings
    if settings.engine_num_gpus and not machine.gpus:
        yield f"{application.name}: engine_num_gpus is {settings.engine_num_gpus:g}: no engine can start here"
    prepared, missing = application, list[str]()
    if settings.engine.executor == "torch":
        prepared, missing = _with_directories(application)
    for model in missing:
        yield (
            f"{application.name}: {model} is not prepared, and a start would do that first: `chunkserve prepare "
            f"{model}` does it now, and lets this command say more"
        )
    if not missing:
        check = EngineCheck.start(prepared)
        try:
            resolved = check.finish()
        finally:
            check.end()
        yield from engine_lines(application, resolved)
        yield from reason_lines(resolved)


def _with_directories(application: Application) -> tuple[Application, list[str]]:
    """Put the directories of prepared models in place of their names, because the engine's check would prepare what a
    name stands for. Also returns the names of models that are not prepared."""
    from engine.checkpoints.model_name import ready_directory

    settings = application.settings
    form, weights = settings.gguf_form, settings.engine.load_format != "dummy"
    model = ready_directory(settings.model, weights=weights, **form)
    missing = [] if model is not None else [settings.model]
    engine, draft = settings.engine, settings.engine.speculative.model
    if draft is not None:
        directory = ready_directory(draft, weights=weights, **form)
        missing += [] if directory is not None else [draft]
        engine = replace(engine, speculative=replace(engine.speculative, model=str(directory)))
    named = {"model": str(model), "engine": engine, "served_model_name": settings.model_names}
    return replace(application, settings=settings.model_copy(update=named)), missing


def reason_lines(resolved: ResolvedConfig) -> list[str]:
    """Say why each value that was derived is what it is."""
    lines = []
    for name, reason in resolved.reasons.items():
        if name not in _SHOWN:
            value = resolved.speculative.method if name == "speculative" else getattr(resolved, name, None)
            shown = f" {value}" if isinstance(value, str | int | float) else ""
            lines.append(f"  {name}{shown}: {reason}")
    return lines

"""Implements `chunkserve serve`: makes a config from options, checks it, and runs what `serve run` runs.
Never serves anything by itself: `serve_app.front.cli` does, from the start to the end of the last request. Never
imports what checks a config before the arguments are read, so that --help need not wait for it."""

from __future__ import annotations

import argparse
import copy
import os
import shlex
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import yaml

from serve_app.front.command.arguments import BAD_INPUT, Parser
from serve_app.front.command.serve_options import in_options, needs_one_application, serve_parser, set_args, set_http
from serve_app.front.config_file import read_config
from serve_app.front.console import Console
from serve_app.front.output import CannotWrite, write_file
from serve_app.front.signals import exit_on_signals

_SUFFIXES = (".yaml", ".yml", ".json")
_HEAD = "# Written by `chunkserve serve`. `chunkserve serve {name}` or `serve run {name}` serves it.\n"


def main(arguments: Sequence[str], prog: str) -> int:
    """Serve until a signal. Returns 2 for a config that cannot be served; other failures of the start end as in
    `serve`.

    Raises:
        Signalled: a signal came while there was nothing to take down.
    """
    parser = serve_parser(prog)
    options, unknown = parser.parse_known_args(arguments)
    if unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}{_where_it_is_set(parser, unknown[0])}")
    exit_on_signals()  # so that the directory below goes away
    from serve_app.front.command.problems import find_problems

    with TemporaryDirectory(prefix="chunkserve-") as directory:
        path, made = _config(parser, options, Path(directory) / "config.yaml")
        if path is None:
            return BAD_INPUT
        if made and (problems := find_problems(path).problems):
            return _refuse([*in_options(problems, path)])
        if options.write_config is not None:
            return _write(path, options.write_config)
        from serve_app.front.cli import serve

        def told(text: str) -> str:
            in_their_words = "\n".join(in_options(text.splitlines(), path)) if made else text
            return in_their_words.replace(str(path), options.what)

        serve(["run", *["--verbose"] * options.verbose, str(path)], Console(told), refused=BAD_INPUT)
    return 0


def _where_it_is_set(parser: Parser, unknown: str) -> str:
    """Say which option or setting an unknown option was meant for; empty if there is none. A setting is named only for
    its own name: other servers have options whose names are like those of quite different settings."""
    from serve_app.settings.misspelt import named

    option = unknown.partition("=")[0]
    name = option.lstrip("-")
    ours = {known.lstrip("-"): known for known in parser.option_strings()}
    setting = named(name.replace("-", "_")) if option.startswith("--") else None
    if setting is not None and setting.rpartition(".")[2].replace("_", "-") not in ours:
        return f"; in a config it is {setting}"
    close = get_close_matches(name, ours, n=1, cutoff=0.75)
    return f"; did you mean {ours[close[0]]}?" if close else ""


def _config(parser: Parser, options: argparse.Namespace, made: Path) -> tuple[Path | None, bool]:
    """Return the config to serve, and whether it was made here, as `made`. None: the given one is wrong, which is
    reported."""
    from serve_app.front.command.base_config import base_config
    from serve_app.front.command.problems import find_problems

    given = Path(options.what)
    if not _is_config(given):
        on_gpu = options.device == "cuda" or (options.device in (None, "auto") and _has_gpus())
        config = base_config(options.what, on_gpu=on_gpu)
        set_args(config["applications"][0]["args"], options)
        if options.write_config is not None:
            _set_any_directory(config["applications"][0]["args"])
    else:
        if problems := find_problems(given).problems:  # here, where lines of the file are its own
            _refuse(problems)
            return None, False
        original = read_config(given).content
        config = copy.deepcopy(original)
        if needs_one_application(options):
            if options.device == "auto":  # what the config says is to be replaced, too
                options.device = "cuda" if _has_gpus() else "cpu"
            set_args(_only_application(parser, config), options)
    set_http(config, options)
    if _is_config(given) and config == original:
        return given, False
    made.write_text(yaml.safe_dump(config, sort_keys=False), encoding="utf-8")
    return made, True


def _set_any_directory(args: dict[str, Any]) -> None:
    """Make the model's path absolute: a written config may be served from another directory. Clients still ask for the
    model by the path that was given."""
    from engine.checkpoints.model_cache import ModelError
    from engine.checkpoints.model_name import Form, read_name

    try:
        name = read_name(args["model"])
    except ModelError:
        return  # reported with the other problems
    if name.form in (Form.DIRECTORY, Form.GGUF):
        args.setdefault("served_model_name", [args["model"]])
        args["model"] = str(name.path.absolute())


def _has_gpus() -> bool:
    from engine.build.machine import this_machine

    return bool(this_machine().gpus)


def _is_config(path: Path) -> bool:
    return path.suffix in _SUFFIXES or (os.path.isfile(path) and path.suffix != ".gguf")


def _only_application(parser: Parser, config: dict[str, Any]) -> dict[str, Any]:
    """Return the `args` of this project's application in a config. Exits if there are several, or none."""
    from serve_app.front.preflight import our_applications

    ours = [app for app in config["applications"] if [*our_applications({"applications": [app]})]]
    if len(ours) != 1:
        parser.error(f"the config has {len(ours)} applications of this project, and options are for one: edit the file")
    args: dict[str, Any] = ours[0].get("args") or {}
    if args.get("models"):
        parser.error("the config has several models, and options are for one: edit its entries")
    ours[0]["args"] = args
    return args


def _write(path: Path, to: Path) -> int:
    name = shlex.quote(str(to)) if str(to).isprintable() else "FILE"  # it stands in a comment of one line
    text = path.read_text(encoding="utf-8-sig")  # a mark of the byte order is one at the beginning of a file alone
    try:
        write_file("--write-config", to, _HEAD.format(name=name) + text, new=True)
    except CannotWrite as refusal:
        return _refuse([str(refusal)])
    print(f"wrote {to}")
    return 0


def _refuse(problems: Sequence[str]) -> int:
    for problem in problems:
        print(problem, file=sys.stderr)
    return BAD_INPUT

"""Owns the options of `chunkserve serve`, and where each of them stands in a config.
Never checks a value against its limit: the settings themselves do, and `in_options` puts that in terms of options."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args, get_type_hints

from engine.config import EngineConfig, choices_of
from serve_app.front.command.arguments import Parser
from serve_app.settings.ranks import ranks_in

_OF_ENGINES = (
    "max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
    "kv_cache_memory_gib",
    "gpu_memory_utilization",
    "dtype",
    "quantize",
    "kv_cache_dtype",
)
"""Settings of `engine` that are options, too. Their types and descriptions are the settings' own."""
_PLACES = {
    "--host": "http_options.host",
    "--port": "http_options.port",
    "--replicas": "args.(?:autoscaling|engine_replicas)(?=[.:])",
    "--api-keys": "args.auth.keys_file",
    "--served-model-name": "args.served_model_name",
    **{f"--{name.replace('_', '-')}": f"args.engine.{name}(?=[.:])" for name in _OF_ENGINES},
}
"""Options with an expression for the beginning of a line about their setting."""


def serve_parser(prog: str) -> Parser:
    parser = Parser(
        prog,
        "Serve a model, or the applications of a config file, until Ctrl-C or SIGTERM; running requests then finish. "
        "With a model, all other settings are those of the project's own config for a CPU or for GPUs. With a config "
        "file, options replace what it says. For everything else, write a config: --write-config FILE begins one.",
    )
    parser.add_argument(
        "what",
        metavar="MODEL|CONFIG",
        help="a hub id, a directory, a .gguf file or smollm2-135m-instruct, which is packaged; or a config file, which "
        "ends with .yaml, .yml or .json",
    )
    parser.add_argument("--host", help="address to listen on (127.0.0.1: this machine alone; 0.0.0.0: every network)")
    parser.add_argument("--port", type=int, help="port to listen on (8000)")
    parser.add_argument(
        "--served-model-name",
        action="append",
        metavar="NAME",
        help="the model that clients ask for, instead of its path; may be given several times",
    )
    parser.add_argument(
        "--api-keys", type=_of_any_directory, metavar="FILE", help="file of API keys, as `chunkserve keys` makes them"
    )
    parser.add_argument(
        "--replicas",
        type=_replicas,
        metavar="N|MIN:MAX",
        help="number of engines, or its bounds where it follows the load (1)",
    )
    parser.add_argument(
        "--device",
        choices=("auto", "cpu", "cuda"),
        help="where engines run: on the CPU, or each on a GPU of its own (auto: on GPUs if this machine has any)",
    )
    kinds, choices = get_type_hints(EngineConfig), choices_of(EngineConfig)
    for spec in fields(EngineConfig):
        if spec.name in _OF_ENGINES:
            about = f"{spec.metadata['description'].partition('. ')[0].rstrip('.')}".replace("%", "%%")
            kind: dict[str, Any] = {"metavar": "N", "type": _number_of(kinds[spec.name])}
            if spec.name in choices:
                kind = {"choices": [choice for choice in choices[spec.name] if choice is not None]}
            parser.add_argument(f"--{spec.name.replace('_', '-')}", help=about[:1].lower() + about[1:], **kind)
    parser.add_argument(
        "--write-config", type=Path, metavar="FILE", help="write the config that would be served, and serve nothing"
    )
    parser.add_argument("--verbose", action="store_true", help="show the logs of Ray and all replicas")
    return parser


def _of_any_directory(text: str) -> Path:
    try:
        return Path(text).expanduser().absolute()
    except RuntimeError:  # `~ann`, without a user of that name
        return Path(text).absolute()


def _number_of(hint: Any) -> type[int] | type[float]:
    return float if float in (hint, *get_args(hint)) else int


def _replicas(text: str) -> tuple[int, ...]:
    numbers = text.split(":")
    if len(numbers) > 2 or not all(number.isascii() and number.isdecimal() for number in numbers):
        raise argparse.ArgumentTypeError(f"expected a number or MIN:MAX, such as 1:4, not {text!r}")
    return tuple(map(int, numbers))


def needs_one_application(options: argparse.Namespace) -> bool:
    """Whether an option is given that is a setting of an application."""
    names = ("served_model_name", "api_keys", "replicas", "device", *_OF_ENGINES)
    return any(getattr(options, name) is not None for name in names)


def set_http(config: dict[str, Any], options: argparse.Namespace) -> None:
    """Write --host and --port into a Serve config."""
    given = {name: getattr(options, name) for name in ("host", "port") if getattr(options, name) is not None}
    if given:
        config["http_options"] = {**(config.get("http_options") or {}), **given}


def set_args(args: dict[str, Any], options: argparse.Namespace) -> None:
    """Write the options of an application into its `args`."""
    engine = {name: getattr(options, name) for name in _OF_ENGINES if getattr(options, name) is not None}
    if options.device in ("cpu", "cuda"):
        engine["device"] = options.device
    if engine:
        args["engine"] = {**(args.get("engine") or {}), **engine}
    if options.device in ("cpu", "cuda"):
        args["engine_num_gpus"] = ranks_in(args["engine"]) if options.device == "cuda" else 0
    if options.served_model_name is not None:
        args["served_model_name"] = options.served_model_name
    if options.api_keys is not None:  # absolute: engines and ingress replicas may have another current directory
        args["auth"] = {**(args.get("auth") or {}), "keys_file": str(options.api_keys)}
    if options.replicas is not None:
        _set_replicas(args, options.replicas)


def _set_replicas(args: dict[str, Any], asked: tuple[int, ...]) -> None:
    bounds = args.pop("autoscaling", None) or {}
    args.pop("engine_replicas", None)
    if len(asked) == 1:
        args["engine_replicas"] = asked[0]
    else:
        args["autoscaling"] = {**bounds, "min_replicas": asked[0], "max_replicas": asked[1]}


def in_options(problems: list[str], path: Path) -> Iterator[str]:
    """Yield problems of the config at `path`, which was made from options, with the options' names and without the
    file's."""
    for problem in problems:
        text = re.sub(rf"^{re.escape(str(path))}(, line \d+)?(, application [^:]+)?: ", "", problem)
        for option, place in _PLACES.items():
            text = re.sub(rf"^{place}", option, text)
        yield text.removeprefix("args.model: ")

"""Implements `chunkserve convert`: writes a config of ours from an `LLMConfig` of Ray Serve LLM.
Never serves it, needs neither vLLM nor ray.serve.llm, and never leaves a value out silently."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from serve_app.front.command.arguments import BAD_INPUT, FAILED, Parser
from serve_app.front.output import CannotWrite, write_file

_HEAD = "# Written by `chunkserve convert` from {name}. `chunkserve check` finds what is wrong with it.\n"


def main(arguments: Sequence[str], prog: str) -> int:
    """Write the config, and a line to stderr for each value that was not simply taken over. Returns 1 if answers, or
    where the model runs, depend on one that was not taken along."""
    options = _parser(prog).parse_args(arguments)
    import yaml

    from serve_app.front.command.llm_config_file import convert_file
    from serve_app.front.config_file import ConfigRefused
    from serve_app.llm_config.taking import Kind

    try:
        converted = convert_file(options.config, options.model)
    except ConfigRefused as refusal:
        print(refusal, file=sys.stderr)
        return BAD_INPUT
    name = options.config.name if options.config.name.isprintable() else "a file"  # in a comment of one line
    text = _HEAD.format(name=name) + yaml.safe_dump(converted.config, sort_keys=False, allow_unicode=True)
    if options.output is None:
        print(text, end="")
    else:
        try:
            write_file("--output", options.output, text, new=True)
        except CannotWrite as refusal:
            print(refusal, file=sys.stderr)
            return BAD_INPUT
    for note in converted.notes:
        print(note, file=sys.stderr)
    return FAILED if any(note.kind is Kind.NOT_SUPPORTED for note in converted.notes) else 0


def _parser(prog: str) -> argparse.ArgumentParser:
    parser = Parser(
        prog,
        "Write a config for this server from one of Ray Serve LLM. Each value that could not be taken along, or has "
        "another meaning, is reported on stderr in a line: `changed`, `left out` where answers do not depend on it, "
        "`unsupported` where they do, or where the model runs. The exit status is 0, 1 if something is unsupported, "
        "and 2 if nothing was written.",
    )
    parser.add_argument(
        "config",
        type=Path,
        help="a Serve config whose application is ray.serve.llm:build_openai_app, or an LLMConfig alone, as YAML",
    )
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="file to write (without it, stdout)")
    parser.add_argument("--model", metavar="ID", help="model_id of the LLMConfig to convert, if not all")
    return parser

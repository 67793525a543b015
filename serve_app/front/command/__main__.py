"""Owns the list of `chunkserve`'s subcommands, and the way to each.
Never imports one before it is asked for: `chunkserve --help` must not wait for what another needs."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Protocol, cast

PROG = "chunkserve"
_PACKAGE = "serve_app.front.command"

COMMANDS = {
    "serve": "Serve a model, or the applications of a config file, until a signal.",
    "check": "Find what is wrong with a config, without serving it.",
    "prepare": "Download or convert a model ahead of the start, and print its directory.",
    "keys": "Make an API key or an admin key.",
    "status": "Show the models, engines and load of a running server.",
    "chat": "Talk to a running server in this terminal.",
    "version": "Show the versions of chunkserve and of what it runs on.",
}


class Subcommand(Protocol):
    """A module of this package that has the name of its subcommand."""

    def main(self, arguments: Sequence[str], prog: str) -> int:
        """Do it, and return the exit status: 2 for bad input. prog: the command's name in its help."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a subcommand and return its exit status."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given[:1] == ["--version"]:
        given = ["version"]
    if not given or given[0] not in COMMANDS:
        _parser().parse_args(given or ["--help"])  # both exit
    command = cast(Subcommand, import_module(f"{_PACKAGE}.{given[0]}"))
    return command.main(given[1:], f"{PROG} {given[0]}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=PROG,
        usage=f"{PROG} [-h] [--version] COMMAND ...",
        description="Serve large language models over OpenAI's and Anthropic's APIs, and look after such a server.",
        epilog=f"`{PROG} COMMAND --help` explains a command. `serve run config.yaml` does what `{PROG} serve "
        "config.yaml` does, and takes all options of Ray Serve's own command.",
    )
    parser.add_argument("--version", action="store_true", help=COMMANDS["version"])
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True, help="one of these:")
    for name, about in COMMANDS.items():
        subparsers.add_parser(name, help=about, add_help=False)
    return parser


if __name__ == "__main__":
    sys.exit(main())

"""Owns the list of `chunkserve`'s subcommands, and the way to each.
Never imports one before it is asked for: `chunkserve --help` must not wait for what another needs."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from io import TextIOWrapper
from signal import SIGINT, SIGPIPE
from typing import Protocol, cast

from serve_app.front.output import BY_SIGNAL, CannotWrite, OutputParser, discard_output, disk_problem
from serve_app.front.signals import Signalled

PROG = "chunkserve"
_PACKAGE = "serve_app.front.command"
_FAILED = 1

COMMANDS = {
    "serve": "Serve a model, or the applications of a config file, until a signal.",
    "check": "Find what is wrong with a config, without serving it.",
    "convert": "Write a config from one of Ray Serve LLM, and say what it could not take along.",
    "prepare": "Download or convert a model ahead of the start, and print its directory.",
    "keys": "Make an API key or an admin key.",
    "status": "Show the models, engines and load of a running server.",
    "chat": "Talk to a running server in this terminal.",
    "bench": "Send a load to a running server, and show its latencies.",
    "plan": "Find the settings and replicas that hold a load, by simulation.",
    "version": "Show the versions of chunkserve and of what it runs on.",
}


class Subcommand(Protocol):
    """A module of this package that has the name of its subcommand."""

    def main(self, arguments: Sequence[str], prog: str) -> int:
        """Do it, and return the exit status: 2 for bad input. prog: the command's name in its help."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a subcommand and return its exit status. A signal, a reader of the output that has left, and a full disk end
    it without a traceback."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    _open_what_is_closed()
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # as stderr, where a locale is not UTF-8
    try:
        try:
            return _run(given)
        finally:
            sys.stdout.flush()  # here, where it can be caught, and not when Python ends
    except KeyboardInterrupt:
        return BY_SIGNAL + SIGINT
    except Signalled as end:
        return BY_SIGNAL + end.signum
    except BrokenPipeError:
        discard_output(errors=True)
        return BY_SIGNAL + SIGPIPE
    except CannotWrite as refusal:
        return _failed(given, str(refusal))
    except OSError as error:
        if (problem := disk_problem(error)) is None:
            raise
        discard_output()
        return _failed(given, problem)


def _failed(given: list[str], problem: str) -> int:
    with suppress(OSError):  # it may be standard error that takes no more
        print(f"{' '.join([PROG, *given[:1]])}: {problem}", file=sys.stderr)
    return _FAILED


def _open_what_is_closed() -> None:
    """Put the null device where the shell closed input or output, as by `>&-`: the next file or socket would get that
    number, and with it what is meant for the terminal."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free number, which is this one
    sys.stdin = sys.stdin or os.fdopen(0, closefd=False)
    sys.stdout = sys.stdout or os.fdopen(1, "w", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(2, "w", closefd=False)


def _run(given: list[str]) -> int:
    if given[:1] == ["--version"]:
        given[0] = "version"
    if not given or given[0] not in COMMANDS:
        _parser().parse_args(given or ["--help"])  # both exit
    command = cast(Subcommand, import_module(f"{_PACKAGE}.{given[0]}"))
    return command.main(given[1:], f"{PROG} {given[0]}")


def _parser() -> argparse.ArgumentParser:
    parser = OutputParser(
        prog=PROG,
        usage=f"{PROG} [-h] [--version] COMMAND ...",
        description="Serve large language models over OpenAI's and Anthropic's APIs, and look after such a server.",
        epilog=f"`{PROG} COMMAND --help` explains a command. In a checkout's environment, `serve run config.yaml` does "
        f"what `{PROG} serve config.yaml` does, and takes all options of Ray Serve's own command.",
    )
    parser.add_argument("--version", action="store_true", help=COMMANDS["version"])
    subparsers = parser.add_subparsers(
        title="commands", metavar="COMMAND", required=True, help="one of these:", parser_class=argparse.ArgumentParser
    )
    for name, about in COMMANDS.items():
        subparsers.add_parser(name, help=about, add_help=False)
    return parser


if __name__ == "__main__":
    sys.exit(main())

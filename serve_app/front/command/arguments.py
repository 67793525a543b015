"""Owns how subcommands read their arguments: a parser that refuses in one line, and the options of several.
Never knows what a subcommand does."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import NoReturn
from urllib.parse import urlsplit

from serve_app.front.command.api import KEY, Api
from serve_app.front.output import OutputParser
from serve_app.front.servers import running_servers

BAD_INPUT = 2
FAILED = 1
DEFAULT_URL = "http://127.0.0.1:8000"


class _Help(argparse.HelpFormatter):
    """Names an option's value once, `-o, --output FILE`, with each Python, as Python 3.13 does by itself."""

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if not action.option_strings or action.nargs == 0:
            return super()._format_action_invocation(action)
        return f"{', '.join(action.option_strings)} {self._format_args(action, action.dest.upper())}"


class Parser(OutputParser):
    """Refuses bad arguments in one line, which argparse's own parser hides under its usage."""

    def __init__(self, prog: str, description: str) -> None:
        super().__init__(prog=prog, description=description, allow_abbrev=False, formatter_class=_Help)

    def option_strings(self) -> list[str]:
        return [option for action in self._actions for option in action.option_strings]

    def error(self, message: str) -> NoReturn:
        self.exit(BAD_INPUT, f"{self.prog}: {message} (`{self.prog} --help` lists the options)\n")


def add_url(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--url",
        type=url_of,
        help=f"URL of the server; without it the one that this user runs on this machine, or {DEFAULT_URL}",
    )


def chosen_server(parser: argparse.ArgumentParser, given: str | None) -> Api:
    """Return the server to ask. Exits with BAD_INPUT if several run and none was chosen, or if no server could read the
    key."""
    key = os.environ.get(KEY, "")
    if not (key.isascii() and key.isprintable()) or " " in key:  # HTTP's own refusal would show it
        parser.error(f"{KEY}: expected printable ASCII characters without spaces or line ends")
    if given is not None:
        return Api(given)
    found = sorted({server.url for server in running_servers() if server.url})
    if len(found) > 1:
        parser.error(f"{len(found)} servers run here; choose one with --url: {', '.join(found)}")
    return Api(found[0] if found else DEFAULT_URL)


def file_to_write(text: str) -> Path:
    """Read the path of a file that will be written. Raises ArgumentTypeError: now, and not after minutes of work, if it
    cannot be."""
    path = Path(text)
    there = os.path.exists(path)  # unlike Path's methods, os.path's raise nothing where this user may not look
    if os.path.isdir(path) or not os.path.isdir(path.parent) or not os.access(path if there else path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"expected a file that can be written, not {text!r}")
    return path


def url_of(text: str) -> str:
    """Read the URL of a server, without its `/v1`. Raises ArgumentTypeError."""
    if not text.startswith(("http://", "https://")):
        raise argparse.ArgumentTypeError(f"expected http:// or https:// at the beginning, not {text!r}")
    try:
        parts = urlsplit(text)
        usable = parts.hostname and parts.port != 0 and not (parts.query or parts.fragment or "@" in parts.netloc)
    except ValueError:  # a port above 65535, or half an IPv6 address
        usable = False
    if not (usable and text.isascii() and text.isprintable() and " " not in text):
        raise argparse.ArgumentTypeError(f"expected http://HOST:PORT, with a path at most, not {text!r}")
    return text.rstrip("/").removesuffix("/v1").rstrip("/")

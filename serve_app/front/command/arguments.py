"""Owns how subcommands read their arguments: a parser that refuses in one line, and the options of several.
Never knows what a subcommand does."""

from __future__ import annotations

import argparse
from typing import NoReturn

from serve_app.front.servers import running_servers

BAD_INPUT = 2
FAILED = 1
DEFAULT_URL = "http://127.0.0.1:8000"


class Parser(argparse.ArgumentParser):
    """Refuses bad arguments in one line, which argparse's own parser hides under its usage."""

    def __init__(self, prog: str, description: str) -> None:
        super().__init__(prog=prog, description=description, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        self.exit(BAD_INPUT, f"{self.prog}: {message} (`{self.prog} --help` lists the options)\n")


def add_url(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--url",
        type=_url,
        help=f"URL of the server; without it the one that this user runs on this machine, or {DEFAULT_URL}",
    )


def chosen_url(parser: argparse.ArgumentParser, given: str | None) -> str:
    """Return the URL of the server to ask. Exits with BAD_INPUT if several run and none was chosen."""
    if given is not None:
        return given
    found = sorted({server.url for server in running_servers()})
    if len(found) > 1:
        parser.error(f"{len(found)} servers run here; choose one with --url: {', '.join(found)}")
    return found[0] if found else DEFAULT_URL


def _url(text: str) -> str:
    if not text.startswith(("http://", "https://")):
        raise argparse.ArgumentTypeError(f"expected http:// or https:// at the beginning, not {text!r}")
    return text.rstrip("/").removesuffix("/v1")

"""Implements `chunkserve keys`: the command of serve_app.auth by another name.
Never stores a key."""

from __future__ import annotations

from collections.abc import Sequence

from serve_app.auth import __main__ as auth
from serve_app.front.command.arguments import Parser


def main(arguments: Sequence[str], prog: str) -> int:
    return auth.main(arguments, prog, Parser)

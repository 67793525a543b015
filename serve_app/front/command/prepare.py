"""Implements `chunkserve prepare`: the command of engine.checkpoints.prepare by another name.
Never prepares anything itself."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from engine.checkpoints import prepare
from engine.checkpoints.model_name import ready_directory
from serve_app.front.command.arguments import BAD_INPUT, Parser


def main(arguments: Sequence[str], prog: str) -> int:
    """Return 2 for a name that no model can have, and what the other command returns for a failure after that."""
    options = prepare.parser(prog, Parser).parse_args(arguments)
    try:
        ready_directory(options.model, thorough=False)
    except prepare.ModelError as error:
        print(f"{prog}: {' '.join(str(error).split())}", file=sys.stderr)
        return BAD_INPUT
    return prepare.run(options)

"""Owns the check whether an engine could start, run as a child of a process that does not load torch itself.
Never reads a weight. Reads its arguments from standard input; on refusal, prints one line on standard error and exits
with `REFUSED`."""

from __future__ import annotations

import pickle
import sys

from engine.build.engine import check_engine
from engine.checkpoints.model_cache import ModelError
from engine.config import ConfigError

REFUSED = 3
COMMAND = (sys.executable, "-c", "import sys; from engine.build.check import main; sys.exit(main())")


def main() -> int:
    """Run `check_engine` with the pickled arguments on standard input, and print the config that the engine would
    serve as the last line: pickled, in hexadecimal."""
    model, config, engines, ranks_apart = pickle.load(sys.stdin.buffer)
    try:
        resolved = check_engine(model, config, engines, ranks_apart=ranks_apart)
    except (ConfigError, ModelError) as error:
        print(" ".join(str(error).split()), file=sys.stderr)
        return REFUSED
    print(pickle.dumps(resolved).hex())
    return 0

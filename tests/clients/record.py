"""Owns the recorded requests of tests/serve_app/api/recorded: `python -m tests.clients.record [PROGRAM ...]` has the
programs do their task, and keeps what they sent. Never keeps what scrub.py takes out."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.clients.programs import ALL
from tests.clients.running import ROOT, Outcome, perform
from tests.clients.scrub import Scrubber

RECORDED = ROOT / "tests" / "serve_app" / "api" / "recorded"


def lines_of(outcome: Outcome, directory: Path) -> list[str]:
    """Return the requests of a run that were served, each once, as lines of JSON."""
    scrubber = Scrubber(outcome.places | {str(directory): "/somewhere"})
    kept: dict[str, None] = {}
    for one in (one for one in outcome.requests if one.status < 400):
        line = {"method": one.method, "path": one.path, "headers": one.headers, "body": scrubber.value(one.body)}
        kept[json.dumps(line, ensure_ascii=False, separators=(",", ":"))] = None
    return list(kept)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.clients.record",
        description="Have the client programs do their tasks, and keep the requests that they send.",
    )
    parser.add_argument(
        "programs", nargs="*", metavar="PROGRAM", help=f"of: {', '.join(ALL)}; by default all that can be replayed"
    )
    failed = 0
    RECORDED.mkdir(exist_ok=True)
    recorded = [name for name, program in ALL.items() if program.is_recorded]
    for name in parser.parse_args(arguments).programs or recorded:
        with tempfile.TemporaryDirectory() as directory:
            outcome = perform(ALL[name], Path(directory))
            if outcome.refused or outcome.returncode:
                failed += 1
                print(f"{name}: not recorded, since it failed\n{outcome.story}", file=sys.stderr)
                continue
            lines = lines_of(outcome, Path(directory))
        (RECORDED / f"{name}.jsonl").write_text("".join(f"{line}\n" for line in lines))
        print(f"{name}: {len(lines)} requests")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

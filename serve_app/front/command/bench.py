"""Implements `chunkserve bench`: a named load of the package loadtest on a running server, with progress and a table.
Never sends a request of the load itself, and never imports Locust: its gevent changes the standard library."""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType
from typing import Any

from serve_app.front.command.api import Api, NoAnswer, Refused, harmless
from serve_app.front.command.arguments import BAD_INPUT, FAILED, Parser, chosen_server, file_to_write, url_of
from serve_app.front.output import write_file
from serve_app.front.signals import Signalled

_SPARE_S = 120.0
"""A run may take twice its planned seconds and this, for the last answers, before it is ended."""


def main(arguments: Sequence[str], prog: str) -> int:
    """Run the load and return its exit code: 0 passed, 3 a limit missed, 4 the generator was too slow, 5 incomplete.

    Raises:
        Signalled: a signal ended the load, after its table was printed.
    """
    parser = _parser(prog)
    options = parser.parse_args(arguments)
    server = chosen_server(parser, options.url)
    try:
        seconds = _planned_s(options)
    except (ValueError, OSError) as wrong:
        print(f"{prog}: {options.scenario}: {wrong}", file=sys.stderr)
        return BAD_INPUT
    if find_spec("locust") is None:
        print(f"{prog}: the load generator is not installed: pip install 'chunkserve[load]'", file=sys.stderr)
        return FAILED
    try:
        model = server.get("/v1/models", lambda models: str(models["data"][0]["id"]))
    except (NoAnswer, Refused) as error:
        print(f"{prog}: {error}", file=sys.stderr)
        return FAILED
    options.model = options.model or model
    at_most_s = 2 * seconds + _SPARE_S if options.at_most is None else options.at_most
    with TemporaryDirectory(prefix="chunkserve-bench-") as directory:
        return _run(options, server, Path(options.out or directory), at_most_s)


def _parser(prog: str) -> argparse.ArgumentParser:
    from loadtest.options import add_options
    from loadtest.workloads import WORKLOADS

    parser = Parser(
        prog,
        "Send a named load to a running server that speaks OpenAI's API, and show the latencies and whether the load "
        "kept its limits. Ctrl-C ends it with what was measured until then. The exit status is 0 if all limits were "
        "kept, 3 if one was missed, 4 if this machine was too slow to send the load, and 5 if the load is incomplete. "
        "CHUNKSERVE_API_KEY is the API key, if the server has any.",
    )
    parser.epilog = "Scenarios: " + "; ".join(f"{name}: {load.about}" for name, load in WORKLOADS.items()) + "."
    parser.add_argument(
        "url",
        nargs="?",
        type=url_of,
        metavar="URL",
        help="URL of the server; without it the one that this user runs on this machine",
    )
    parser.add_argument("--json", type=file_to_write, metavar="FILE", help="write the whole report to this file")
    parser.add_argument("--workers", type=int, default=1, help="processes that send requests (%(default)s)")
    parser.add_argument(
        "--at-most",
        type=float,
        metavar="SECONDS",
        help="end the load after so long, with what there is (twice its own length, and two minutes)",
    )
    add_options(parser, out="")
    return parser


def _planned_s(options: argparse.Namespace) -> float:
    """Return the seconds that the load's points last. Raises: ValueError, OSError: as loadtest's own checks."""
    from loadtest.options import goal_from, plan_from

    for name, least in (("at_most", 0.0), ("workers", 0.999)):
        value = getattr(options, name)
        if value is not None and not least < value < float("inf"):
            raise ValueError(f"--{name.replace('_', '-')} is a positive number, not {value:g}")
    goal_from(options)
    return sum(point.seconds for point in plan_from(options).points)


def _run(options: argparse.Namespace, server: Api, out: Path, at_most_s: float) -> int:
    from loadtest.load import run
    from loadtest.slo import BROKEN

    (out / "report.json").unlink(missing_ok=True)  # an earlier load's must not be taken for this one's
    signals = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.signal(number, _end_once) for number in signals}
    ended_by: Signalled | None = None
    try:
        run(_words(options, server.url, out), quiet=True, at_most_s=at_most_s)
    except Signalled as end:
        ended_by = end
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    code = _show(out / "report.json", options, server)
    if ended_by is not None:
        raise ended_by
    return BROKEN if code is None else code


def _end_once(signum: int, frame: FrameType | None) -> None:
    """Let the load end with its report; it takes some seconds, and a second Ctrl-C must not leave processes behind."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    raise Signalled(signum)


def _words(options: argparse.Namespace, url: str, out: Path) -> list[str]:
    """Return the options as arguments of loadtest.load."""
    from loadtest.load import parser

    given = {**vars(options), "url": url, "out": str(out)}
    defaults = vars(parser().parse_args([]))
    changed = {name: given[name] for name, default in defaults.items() if name in given and given[name] != default}
    return [f"--{name.replace('_', '-')}={value}" for name, value in changed.items()]


def _show(path: Path, options: argparse.Namespace, server: Api) -> int | None:
    """Print the table, and return the load's exit code; None if the load left no report."""
    from loadtest.report import conclusion
    from loadtest.table import reasons, table

    try:
        document: dict[str, Any] = json.loads(path.read_text())
    except FileNotFoundError:
        print("the load ended before it had a report", file=sys.stderr)
        return None
    if options.json is not None:  # before the table, whose reader may have left
        write_file("--json", options.json, json.dumps(document, indent=1) + "\n")
    print(f"{options.scenario} on {server.url}, model {options.model}; times are p50/p99")
    print("\n".join(map(harmless, [*table(document), *reasons(document)])))
    code = int(document["exit_code"])
    print(conclusion(document))
    if options.out:
        print(Path(options.out) / "report.html")
    return code

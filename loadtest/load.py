"""Owns the command that runs a named load: it starts Locust with its workers, ends it, and passes on the result.
Never runs Locust in its own process: gevent patches the standard library of the process it runs in."""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import sysconfig
import urllib.parse
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from loadtest.options import add_options, goal_from, plan_from
from loadtest.server import ROOT, ended, free_port

URL = "http://127.0.0.1:8000"
LOCUSTFILE = ROOT / "loadtest" / "locustfile.py"
USAGE = 2
"""Exit code for invalid options. The exit codes of a run are in slo.py."""

_START = "import loadtest, locust.main; locust.main.main()"
"""Imports this package first. Locust lets modules be found in the current directory before all others, and a folder of
the user's may be called `loadtest`, too."""
_OWN = ("--url", "--workers", "--expect-workers", "--worker-of", "--port")


def parser(prog: str = "python -m loadtest.load") -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog=prog,
        description="Run a named load on a server and report on it. Locust sends the requests, from worker processes "
        "that this command starts and ends. The exit code says whether the limits were kept.",
        allow_abbrev=False,
    )
    made.add_argument("--url", default=URL, help="URL of the server (%(default)s)")
    made.add_argument("--workers", type=int, default=1, help="worker processes that send requests (%(default)s)")
    made.add_argument(
        "--expect-workers",
        type=int,
        default=0,
        help="wait for this many workers on other machines, instead of starting --workers here",
    )
    made.add_argument(
        "--worker-of", default="", metavar="HOST[:PORT]", help="be a worker of the load that runs on that machine"
    )
    made.add_argument(
        "--port", type=int, default=5557, help="port on which workers of other machines reach this one (%(default)s)"
    )
    add_options(made)
    return made


def without(arguments: Sequence[str], names: Sequence[str]) -> list[str]:
    """Return the arguments without the options of these names and their values."""
    other = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for name in names:
        other.add_argument(name)
    return other.parse_known_args(arguments)[1]


def run(arguments: Sequence[str], *, quiet: bool = False, at_most_s: float | None = None) -> int:
    """Run a load and return its exit code. A run that takes longer than `at_most_s` is ended, and so is one that a
    signal interrupts: its report then has what there was. With `quiet`, the verdict is not printed, only progress.

    Raises: SystemExit: with USAGE, if the arguments are invalid.
    """
    options = parser().parse_args(arguments)
    check(options)
    process = subprocess.Popen(
        command_of(options, arguments),
        env=_environment(),
        stdin=subprocess.DEVNULL,  # Locust reads keys from a terminal
        stdout=subprocess.DEVNULL if quiet else None,
        start_new_session=True,
    )
    with ended(process), suppress(subprocess.TimeoutExpired):
        process.wait(at_most_s)
    return process.wait()


def _environment() -> dict[str, str]:
    """Let Locust find this package in a checkout. Where it is installed, Python finds it, and what is beside it there
    must not come before the standard library."""
    if Path(sysconfig.get_path("purelib")) == ROOT:
        return dict(os.environ)
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))}


def check(options: argparse.Namespace) -> None:
    """Raises: SystemExit: with USAGE and the reason, before anything is started."""
    try:
        if urllib.parse.urlsplit(options.url).scheme not in ("http", "https"):
            raise ValueError(f"--url begins with http:// or https://, not {options.url!r}")
        if options.workers < 1 or options.expect_workers < 0:
            raise ValueError("--workers is 1 or more")
        goal_from(options)
        if not options.worker_of:  # a worker gets its load from the master
            plan_from(options)
    except (ValueError, OSError) as wrong:
        print(f"{options.scenario}: {wrong}", file=sys.stderr)
        raise SystemExit(USAGE) from wrong


def command_of(options: argparse.Namespace, arguments: Sequence[str]) -> list[str]:
    """Build Locust's command line. Options that are not this command's own are passed on to the Locust file."""
    command = [sys.executable, "-P", "-c", _START, "--locustfile", str(LOCUSTFILE), "--headless", "--only-summary"]
    command += ["--host", options.url, "--loglevel", "WARNING"]
    if options.worker_of:
        host, _, port = options.worker_of.partition(":")
        return [*command, "--worker", "--master-host", host, "--master-port", port or str(options.port)]
    workers = options.expect_workers or options.workers
    command += ["--users", str(workers), "--spawn-rate", str(workers)]
    command += ["--json-file", str(Path(options.out) / "locust")]  # instead of tables of rounded figures
    if options.expect_workers:
        command += ["--master", "--master-bind-port", str(options.port), "--expect-workers", str(workers)]
    elif workers > 1:
        port = str(free_port())  # keeps several loads on one machine apart
        command += ["--processes", str(workers), "--master-bind-port", port, "--master-port", port]
    return [*command, *without(arguments, _OWN)]


def main(arguments: Sequence[str] | None = None) -> None:
    for number in (signal.SIGTERM, signal.SIGINT):  # ends Locust, too
        signal.signal(number, lambda number, frame: sys.exit(128 + number))
    sys.exit(run(sys.argv[1:] if arguments is None else arguments))


if __name__ == "__main__":
    main()

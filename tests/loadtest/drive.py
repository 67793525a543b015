"""Runs the load driver in a process of its own, so that gevent stays out of the tests' process.
Never patches the standard library: the driver's own sockets are gevent's."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable

import gevent

from loadtest.arrivals import Profile
from loadtest.driver import Driver
from loadtest.plan import Ask, Closed, Open, Plan, Point, Shape
from loadtest.tally import Tally
from loadtest.target import Target


class Telling(Driver):
    """Says on its standard output when it has read an event."""

    def _pause(self, one: Ask) -> Callable[[], None]:
        return lambda: print("read", flush=True)


def main() -> None:
    """Read a line of JSON: url, tokens, requests and the seconds over which they
    are spread, or clients, seconds, and more of the shape.
    Print the figures by kind of request."""
    given = json.loads(sys.stdin.readline())
    shape = Shape(4, given["tokens"], **given.get("shape", {}))
    if clients := given.get("clients"):
        source: Open | Closed = Closed("k", shape, clients, turns=given.get("turns", 1))
    else:
        over_s = given.get("over_s", 1.0)
        source = Open("k", shape, Profile.constant((given["requests"] + 0.5) / over_s, over_s), "constant")
    plan = Plan((Point("p", (source,), given.get("seconds", 1.0)),))
    tally = Tally()
    kind = Telling if given.get("tells") else Driver
    target = Target(given["url"], "fake", given.get("timeout_s", 60.0), given.get("keys", {}))
    driver = kind(plan, target, tally, seed=1)
    if given.get("ended"):
        _end_from_outside(driver)
    else:
        driver.run()
    print(json.dumps({"figures": tally.figures("p"), "errors": dict(tally.whole().errors)}), flush=True)


def _end_from_outside(driver: Driver) -> None:
    """End the load at the next line of input, as Locust does, say so, and wait for what becomes of its requests, begun
    or due later."""
    running = gevent.spawn(driver.run)
    gevent.get_hub().threadpool.apply(sys.stdin.readline)
    running.kill()
    print("ended", flush=True)
    gevent.wait()


if __name__ == "__main__":
    argparse.ArgumentParser(
        prog="python -m tests.loadtest.drive",
        description="Run the load driver in a process of its own; tests start it.",
    ).parse_args()
    main()

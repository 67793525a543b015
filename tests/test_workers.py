"""Which worker runs what: building the wheel takes minutes, in which the worker that starts servers must not wait."""

from __future__ import annotations

from collections import OrderedDict
from types import SimpleNamespace
from typing import Any

from loadtest.server import ROOT
from tests.support.workers import LONG, NEEDED_SOON, SERVERS, WholeModules, starts_servers


def test_the_wheel_is_built_and_looked_at_beside_the_servers_and_served_from_among_them() -> None:
    assert (ROOT / NEEDED_SOON).is_file()
    assert not starts_servers(NEEDED_SOON)
    assert starts_servers("tests/test_wheel_serves.py")


class Worker:
    """A worker that notes what it is given."""

    shutting_down = False

    def __init__(self) -> None:
        self.asked: list[int] = []

    def send_runtest_some(self, indices: list[int]) -> None:
        self.asked += indices

    def shutdown(self) -> None:
        self.shutting_down = True


def test_servers_begin_first_then_the_wheel_then_what_takes_longest_then_what_has_most_tests() -> None:
    """A module of one long test began last, and the others waited for its worker."""
    server, many, few = "tests/test_wheel_serves.py", "tests/test_readme.py", "tests/test_ci.py"
    tests = [f"{few}::a", *(f"{many}::{number}" for number in range(4))]
    tests += [f"{name}::a" for name in (*reversed(LONG), NEEDED_SOON, server)]
    worker: Any = Worker()
    option = SimpleNamespace(tx=["popen"], loadscopereorder=True, maxworkerrestart=None)
    scheduler = WholeModules(SimpleNamespace(option=option, getvalue=option.__dict__.get), None)  # type: ignore[arg-type]
    scheduler.add_node(worker)
    scheduler.add_node_collection(worker, tests)
    scheduler.schedule()
    done = 0
    while done < len(tests):
        scheduler.mark_test_complete(worker, worker.asked[done])
        done += 1
    modules = OrderedDict.fromkeys(tests[index].partition("::")[0] for index in worker.asked)
    assert [*modules] == [server, NEEDED_SOON, *LONG, many, few]


def test_the_modules_that_take_longest_are_there_and_start_no_server() -> None:
    """Those that do are all given to one worker as one."""
    assert all((ROOT / name).is_file() and not starts_servers(name) for name in LONG)
    assert SERVERS not in LONG

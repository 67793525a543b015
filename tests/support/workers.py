"""Owns which worker runs which tests, where pytest-xdist has several.
Never changes what a test does, nor the order of a module's tests."""

from __future__ import annotations

from functools import cache

from xdist.scheduler import LoadScopeScheduling

from loadtest.server import ROOT

SERVERS = "servers"
NEEDED_SOON = "tests/test_wheel.py"
"""Its wheel, which takes minutes to build, is also needed by a test that starts a server from it."""


class WholeModules(LoadScopeScheduling):
    """Gives a worker whole modules, whose fixtures are then made once. One worker gets all modules that start servers,
    before all else: two servers at a time would starve each other. Another begins with what the last of them needs.
    (`--dist loadgroup` of pytest-xdist 3.8 finds no groups with pytest 9.2.)"""

    def _split_scope(self, nodeid: str) -> str:
        module = nodeid.partition("::")[0]
        return SERVERS if starts_servers(module) else module

    def _assign_work_unit(self, node: object) -> None:
        for scope in (NEEDED_SOON, SERVERS):
            if scope in self.workqueue:
                self.workqueue.move_to_end(scope, last=False)
        super()._assign_work_unit(node)


@cache
def starts_servers(module: str) -> bool:
    """Decide by a module's text, because it is collected elsewhere. `module` is its path below the checkout."""
    return "pytest.mark.server" in (ROOT / module).read_text(encoding="utf-8")

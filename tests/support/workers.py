"""Owns which worker runs which tests, where pytest-xdist has several.
Never changes what a test does, nor the order of a module's tests."""

from __future__ import annotations

from functools import cache

from xdist.scheduler import LoadScopeScheduling

from loadtest.server import ROOT

SERVERS = "servers"
NEEDED_SOON = "tests/test_wheel.py"
"""Its wheel, which takes minutes to build, is also needed by a test that starts a server from it."""
LONG = (
    "tests/kernels/triton/test_compiled.py",
    "tests/kernels/cpu/native/test_lesser_processors.py",
    "tests/engine/execution/gpu/test_gpu_tests.py",
    "tests/kernels/triton/test_resources.py",
    "tests/engine/execution/gpu/test_narrow.py",
    "tests/golden/test_adapters.py",
    "tests/test_first_hour.py",
    "tests/engine/parallel/test_gpu_ranks.py",
    "tests/engine/test_state_machine.py",
    "tests/engine/execution/gpu/test_narrow_kv.py",
    "tests/golden/test_logprobs.py",
    "tests/engine/test_lockstep_lives.py",
    "tests/engine/execution/gpu/test_adapters.py",
    "tests/golden/test_greedy_text.py",
    "tests/engine/execution/gpu/test_triton.py",
)
"""The modules that take longest, in that order. They have few tests, and would else be the last to begin: the other
workers would have ended minutes before them."""
FIRST = (SERVERS, NEEDED_SOON, *LONG)


class WholeModules(LoadScopeScheduling):
    """Gives a worker whole modules, whose fixtures are then made once. One worker gets all modules that start servers,
    before all else: two servers at a time would starve each other. Another begins with what the last of them needs.
    Then come those that take longest, and then all others, the more tests the sooner.
    (`--dist loadgroup` of pytest-xdist 3.8 finds no groups with pytest 9.2.)"""

    def _split_scope(self, nodeid: str) -> str:
        module = nodeid.partition("::")[0]
        return SERVERS if starts_servers(module) else module

    def _assign_work_unit(self, node: object) -> None:
        first = next((scope for scope in FIRST if scope in self.workqueue), None)
        if first is not None:
            self.workqueue.move_to_end(first, last=False)
        super()._assign_work_unit(node)


@cache
def starts_servers(module: str) -> bool:
    """Decide by a module's text, because it is collected elsewhere. `module` is its path below the checkout."""
    return "pytest.mark.server" in (ROOT / module).read_text(encoding="utf-8")

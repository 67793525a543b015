"""Owns random lives of engines in lockstep: 2 to 4 ranks with their own requests, caches and faults, one shape a step.
Never lets ranks run at the same time: who waits for whom is for the tests of `engine.lockstep` with threads."""

from __future__ import annotations

from copy import deepcopy
from functools import partial

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule

from engine.lockstep.shape import NO_STEP, StepShape, joint_shape
from tests.engine import test_state_machine as lives
from tests.support.invariants import CheckedCore
from tests.support.lockstep import ExpertsExecutor, Log
from tests.support.traffic import CONFIGS

THINGS = (
    "rank without a step",
    "rank with a smaller step",
    "rank that decodes beside prefill",
    "rank without drafts beside a draft model",
    "rank that fails beside others",
    "several passes beside one",
    "rank that reads back while others run",
    "all ranks at rest",
)
"""What lives in lockstep must reach."""
RARE = {"rank without drafts beside a draft model", "several passes beside one"}
"""One life in fifty: `tests.deep` asks for them."""


class LockstepMachine(lives.EngineMachine):
    """The rules are those of one engine. They apply to `core`, one rank after the other."""

    @initialize(
        config=CONFIGS,
        num_ranks=st.integers(2, 4),
        blocks=st.lists(st.sampled_from([0, 0, 13, 34]), min_size=4, max_size=4),
        deep=st.integers(0, 15),
    )
    def start(self, config: dict[str, object], num_ranks: int, blocks: list[int], deep: int) -> None:
        self.log = Log([[] for _ in range(num_ranks)])
        self.cores, self.executors = [], []
        for rank in range(num_ranks):
            more = {"num_kv_blocks": config["num_kv_blocks"] + blocks[rank]}
            self.cores.append(CheckedCore(**{**deepcopy(config), **more}, ranks=partial(self._exchanging, rank)))
            self.cores[-1].looks_deep = not deep
        self.core, self.num_sent, self.num_rounds = self.cores[0], 0, 0
        self.met: set[str] = set()

    def _exchanging(self, rank: int, executor: object) -> ExpertsExecutor:
        self.executors.append(ExpertsExecutor(executor, rank, self.log))
        return self.executors[-1]

    @rule(number=st.integers(0, 3))
    def turn_to(self, number: int) -> None:
        self.core = self.cores[number % len(self.cores)]

    @rule(count=st.integers(1, 6))
    def steps(self, count: int) -> None:
        for _ in range(count):
            self.step_together()
        self.turn_to(self.cores.index(self.core) + 1)

    def step_together(self) -> None:
        """Let all ranks that are awake propose a step, and the others too if there is one; and all of them make it."""
        self.num_rounds += 1
        shapes = [self._proposed(core) if core.has_work or core.is_moving else NO_STEP for core in self.cores]
        joint = joint_shape(shapes)
        if not joint.forwards:
            for core in self.cores:
                if core._proposal is not None:
                    core.checked_step(NO_STEP)
            self.log.check(NO_STEP)
            return
        shapes = [
            self._proposed(core) if core._proposal is None else shape
            for core, shape in zip(self.cores, shapes, strict=True)
        ]
        joint = joint_shape(shapes)  # one that was awaited may just have found that its loads are late
        for core, shape in zip(self.cores, shapes, strict=True):
            self._note(core, shape, joint)
        for core, executor, shape in zip(self.cores, self.executors, shapes, strict=True):
            self._step(core, executor, shape, joint)
        self.log.check(joint)

    def _proposed(self, core: CheckedCore) -> StepShape:
        """The shape that a rank proposes. In every other round one that has nothing to launch does not wait for others,
        but reads back what is in flight, and is awaited then."""
        shape = core.propose()
        if not shape.forwards and core._in_flight is not None and self.num_rounds % 2:
            core.checked_step(NO_STEP)
            shape = core.propose()
        most = core.config.max_num_batched_tokens
        assert max(shape.tokens, shape.draft_tokens) <= most, "I-32: dummies would be larger than any step"
        return shape

    def _step(self, core: CheckedCore, executor: ExpertsExecutor, shape: StepShape, joint: StepShape) -> None:
        executor.issued, executor.has_failed, executor.num_padded = NO_STEP, False, 0
        core.checked_step(joint)
        assert joint.covers(executor.issued), "I-32: a rank's step is larger than that of all"
        if executor.has_failed:
            assert shape.covers(executor.issued), "I-32"
            self.met |= {"rank that fails beside others"}
        else:
            assert executor.issued == shape, "I-32: the dry run's shape is the step's"
        assert executor.num_padded == joint.forwards - executor.issued.forwards, "I-32: passes"

    def _note(self, core: CheckedCore, shape: StepShape, joint: StepShape) -> None:
        happened = {
            "rank without a step": not shape.forwards,
            "rank with a smaller step": 0 < shape.tokens < joint.tokens,
            "rank that decodes beside prefill": shape.forwards and not shape.mixed and joint.mixed,
            "rank without drafts beside a draft model": joint.draft_passes and not shape.draft_passes,
            "several passes beside one": joint.forwards > shape.forwards > 0,
            "rank that reads back while others run": not shape.forwards and core._in_flight is not None,
        }
        self.met.update(name for name, did in happened.items() if did)

    def teardown(self) -> None:
        if not hasattr(self, "cores"):
            return
        for core in self.cores:
            core.fault = None
            core.prepare_all()
        for _ in range(sum(core.most_steps for core in self.cores)):
            for core in self.cores:
                core.let_moves_end(100)
            if not any(core.has_work or core.is_moving for core in self.cores):
                self.met |= {"all ranks at rest"}
                break
            self.step_together()
        for core in self.cores:
            core.check_end()
        self.reached.update(set.union(self.met, *(core.reached() for core in self.cores)))


class TestLockstep(LockstepMachine.TestCase):  # type: ignore[misc, name-defined]
    settings = settings(lives.TestEngine.settings, max_examples=40, stateful_step_count=15)


def test_the_lives_in_lockstep_reach_what_they_are_to_check() -> None:
    assert not [thing for thing in THINGS if not LockstepMachine.reached[thing] and thing not in RARE]

"""Contracts of the dry run: a plan's shape is that of its step, and making a plan changes nothing that a request or a
later plan could notice. Specification: I-32, S4-R6."""

from __future__ import annotations

from typing import Any

from hypothesis import settings
from hypothesis.stateful import initialize

from engine.config import SpeculativeConfig
from engine.lockstep.shape import NO_STEP, StepShape
from engine.scheduling.dry_run import shape_of
from tests.engine import test_state_machine as lives
from tests.support.deep_state import deep_state
from tests.support.engines import RecordingCore, policy
from tests.support.traffic import CONFIGS


def proposed(core: RecordingCore) -> list[StepShape]:
    """Run to the end and return the shape of each step, as it was before its step."""
    shapes = []
    while core.has_work:
        shapes.append(core.propose())
        core.step()
    return shapes


def engine(**overrides: Any) -> RecordingCore:
    return RecordingCore(**{"max_prefill_tokens": 6, "scheduler": policy(), **overrides})


def test_the_shape_of_a_long_prompt_is_that_of_its_next_chunk_and_not_of_the_whole_prompt() -> None:
    """S4-R6: a rank said how long its prompt was, and the others ran dummies larger than any step."""
    core = engine()
    core.send("r", range(1, 16), max_tokens=3, ignore_eos=True)
    assert proposed(core) == [StepShape(1, 6, 1), StepShape(1, 6, 1), StepShape(1, 3, 1), *[StepShape(1, 1)] * 2]


def test_decode_rows_beside_a_chunk_count_and_a_step_with_drafts_is_padded_as_mixed_ones_are() -> None:
    core = engine(num_speculative_tokens=3)
    core.send("a", [1, 2], max_tokens=20, ignore_eos=True)
    core.propose()
    core.step()
    core.send("b", range(1, 5), max_tokens=1)
    assert core.propose() == StepShape(1, 4 + 4, 1), "a row of 1 + 3 tokens, and the chunk"
    core.step()
    assert core.propose() == StepShape(1, 4, 1)


def test_a_prompt_that_the_engine_cuts_is_as_many_passes_of_which_the_largest_counts() -> None:
    core = engine(scheduler=policy(chunk_owner="engine"))
    core.send("r", range(1, 16), max_tokens=2, ignore_eos=True)
    assert proposed(core) == [StepShape(3, 6, 1), StepShape(1, 1)]


def test_the_draft_model_reads_in_its_first_pass_and_has_one_for_each_token_of_the_longest_draft() -> None:
    drafter = SpeculativeConfig(method="draft_model", model="a name", adaptive=False, free_tokens=8, model_cost=0.1)
    core = engine(num_speculative_tokens=2, speculative=drafter)
    core.send("r", range(1, 6), max_tokens=6, ignore_eos=True)
    first, second, *_ = proposed(core)
    assert first == StepShape(1, 5, 1)
    assert second == StepShape(1, 5, 1, draft_passes=4, draft_tokens=6), "the prompt and the token after it"


def test_there_is_no_step_while_nothing_runs_or_what_is_in_flight_must_be_read_first() -> None:
    core = engine(overlap=True)
    assert core.propose() == NO_STEP
    core.step()
    core.send("r", [1, 2], max_tokens=1)
    assert proposed(core) == [StepShape(1, 2, 1), NO_STEP]
    assert shape_of(core._scheduler.plan(core.now)) == NO_STEP


def test_a_picture_of_the_state_shows_what_changed_however_deep_and_nothing_that_is_only_remembered() -> None:
    core = engine()
    core.send("r", range(1, 16), max_tokens=3)
    before = deep_state(core._scheduler)
    request = core._scheduler.find("r")
    assert request is not None
    request.prefix_match = (7, (1,))
    assert deep_state(core._scheduler) == before
    core._blocks.allocate(1)
    assert deep_state(core._scheduler) != before
    before = deep_state(core._scheduler)
    request.token_ids.append(1)
    assert deep_state(core._scheduler) != before


class DryRunMachine(lives.EngineMachine):
    """Lives in which all that the scheduler holds is compared before and after each plan."""

    @initialize(config=CONFIGS)
    def start(self, config: dict[str, object]) -> None:
        super().start(config)
        self.core.looks_deep = True


class TestDryRun(DryRunMachine.TestCase):  # type: ignore[misc, name-defined]
    settings = settings(lives.TestEngine.settings, max_examples=12, stateful_step_count=12)

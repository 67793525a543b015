"""Owns the contract of the retention study: its loads are what they say, and its caches find what they must.
Never tests the policies themselves; tests/engine/scheduling does."""

from __future__ import annotations

import json
import statistics
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.retention import run as study
from benchmarks.retention.caches import Policy, furthest_next_use, one_pool, two_tiers
from benchmarks.retention.loads import AGENT_BLOCK, Load, Turn, agents_load, trace_load
from engine.scheduling.by_value import ByValue
from engine.scheduling.retention import LeastRecent
from loadtest.traces import Row

POLICIES = [LeastRecent, ByValue]


@pytest.fixture(scope="module")
def agents() -> Load:
    return agents_load(3, 5400.0)


def turn(start_s: float, *chain: int, num_prompt_blocks: int | None = None) -> Turn:
    count = len(chain) if num_prompt_blocks is None else num_prompt_blocks
    return Turn(start_s, start_s + 1, chain, count, 4 * count)


def load_of(*turns: Turn) -> Load:
    return Load("made", 4, turns)


# --- loads ------------------------------------------------------------------------------------------------------------


def test_the_same_seed_makes_the_same_load_and_another_one_another() -> None:
    assert agents_load(3, 300.0) == agents_load(3, 300.0) != agents_load(4, 300.0)


def test_an_agents_session_has_some_43_turns_that_grow_to_some_142_thousand_tokens(agents: Load) -> None:
    """A session's agent is told from its helpers by the system prompt. Late sessions are cut off, and left out."""
    talks: dict[tuple[str, int], list[Turn]] = {}
    for one in agents.turns:
        if one.session and one.num_prompt_blocks:
            talks.setdefault((one.session, one.chain[0]), []).append(one)
    firsts = Counter(first for _, first in talks)
    shared = {first for first, count in firsts.items() if count > 10}
    whole = [turns for (_, first), turns in talks.items() if first in shared and turns[0].start_s < 1800]
    sessions = {
        name: max((turns for turns in whole if turns[0].session == name), key=len)
        for name in {turns[0].session for turns in whole}
    }
    assert 33 < statistics.median(map(len, sessions.values())) < 53
    longest = [max(one.num_prompt_tokens for one in turns) for turns in sessions.values()]
    assert 110_000 < statistics.median(longest) < 175_000


def test_a_prompts_blocks_are_those_of_the_turn_before_up_to_a_thought_that_is_left_out(agents: Load) -> None:
    grown = shrunk = 0
    last: dict[tuple[str, int], Turn] = {}
    for one in agents.turns:
        if not one.session or not one.num_prompt_blocks:
            continue
        if (before := last.get((one.session, one.chain[0]))) is not None:
            is_longer = one.chain[: len(before.chain)] == before.chain
            grown, shrunk = grown + is_longer, shrunk + (not is_longer)
        last[one.session, one.chain[0]] = one
        assert len(set(one.chain)) == len(one.chain) >= one.num_prompt_blocks == one.num_prompt_tokens // AGENT_BLOCK
    assert grown > shrunk > 100


def test_a_flood_adds_a_tenant_whose_sessions_have_one_turn() -> None:
    plain, flooded = agents_load(3, 300.0), agents_load(3, 300.0, flooded=True)
    assert [one for one in flooded.turns if one.tenant != "crawler"] == list(plain.turns)
    sessions = [one.session for one in flooded.turns if one.tenant == "crawler"]
    assert len(set(sessions)) == len(sessions) > 100


def test_a_traces_load_has_its_full_blocks_within_the_window() -> None:
    rows = [Row(0, 600, 10, (1, 2)), Row(5, 1024, 10, (1, 3)), Row(10, 100, 10, (4,))]
    load = trace_load("made", rows, 0, 10)
    assert [(one.chain, one.num_prompt_tokens) for one in load.turns] == [((1,), 600), ((1, 3), 1024)]


def test_the_working_set_is_what_will_be_asked_for_again() -> None:
    load = load_of(turn(0, 1, 2), turn(10, 3), turn(20, 1, 2), turn(30, 3), turn(40, 4))
    assert load.working_set() == 3
    assert furthest_next_use(load, 3).hit_tokens == furthest_next_use(load, 99).hit_tokens == 12
    assert furthest_next_use(load, 2).hit_tokens == 8


def test_an_answers_blocks_are_found_by_the_next_turn() -> None:
    load = load_of(turn(0, 1, 2, num_prompt_blocks=1), turn(10, 1, 2, 3))
    assert [one_pool(load, 9, LeastRecent).hit_tokens, furthest_next_use(load, 9).hit_tokens] == [8, 8]


# --- caches -----------------------------------------------------------------------------------------------------------

TREES = st.lists(
    st.tuples(st.lists(st.integers(1, 3), min_size=1, max_size=5), st.floats(0.5, 9)), min_size=1, max_size=25
)


def tree_load(asked: list[tuple[list[int], float]]) -> Load:
    """Make a load whose blocks are named by the path that leads to them."""
    turns, now = [], 0.0
    for path, wait in asked:
        now += wait
        names = [int("".join(map(str, path[: number + 1]))) for number in range(len(path))]
        turns.append(turn(now, *names, num_prompt_blocks=max(len(names) - 1, 1)))
    return load_of(*turns)


@pytest.mark.parametrize("policy", POLICIES)
@given(asked=TREES, capacity=st.integers(1, 12))
def test_no_policy_finds_more_than_one_who_knows_the_future(
    policy: Policy, asked: list[tuple[list[int], float]], capacity: int
) -> None:
    load = tree_load(asked)
    most = furthest_next_use(load, capacity).hit_tokens
    assert one_pool(load, capacity, policy).hit_tokens <= most
    assert two_tiers(load, 2, capacity, policy, policy).hit_tokens <= furthest_next_use(load, capacity + 2).hit_tokens


@pytest.mark.parametrize("policy", POLICIES)
@given(asked=TREES)
def test_with_room_for_all_every_cache_finds_what_was_computed_before(
    policy: Policy, asked: list[tuple[list[int], float]]
) -> None:
    load = tree_load(asked)
    most = furthest_next_use(load, 999).hit_tokens
    assert one_pool(load, 999, policy).hit_tokens == most
    assert two_tiers(load, 1, 999, policy, policy).hit_tokens == most


def test_what_a_device_lost_is_found_in_the_tier() -> None:
    load = load_of(turn(0, 1, 2), turn(10, 3, 4), turn(20, 1, 2))
    assert one_pool(load, 2, LeastRecent).hit_tokens == 0
    assert two_tiers(load, 2, 4, LeastRecent, LeastRecent).hit_tokens == 8


def test_what_a_running_request_has_is_not_dropped() -> None:
    load = load_of(turn(0, 1, 2), Turn(0.5, 0.7, (3, 4), 2, 8), turn(0.8, 1, 2))
    assert one_pool(load, 2, LeastRecent).hit_tokens == 8
    assert two_tiers(load, 0, 2, LeastRecent, LeastRecent).hit_tokens == 0, "a tier holds nothing"


# --- the command ------------------------------------------------------------------------------------------------------


def test_a_small_study_is_written_with_its_tables(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(study, "SECONDS", 120.0)
    study.main(["--seeds", "5", "6", "--loads", "agents", "--out", str(tmp_path / "found.json")])
    document = json.loads((tmp_path / "found.json").read_text())
    assert {cell["seed"] for cell in document["cells"]} == {5, 6}
    printed = capsys.readouterr().out
    for made in (study.table(document), study.tiers_table(document), study.tenants_table(document)):
        assert made in printed
        assert len({line.count("|") for line in made.splitlines()}) == 1
    assert study.table(document).count("\n| agents |") == 4


def test_the_number_of_processes_is_refused_where_it_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        study.main(["--processes", "0"])
    assert "--processes is 1 or more, not 0" in capsys.readouterr().err

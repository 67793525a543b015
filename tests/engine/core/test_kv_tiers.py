"""Owns the proof that KV goes to lower tiers and comes back. Long: every way that a load may end has its test.
Never uses a model: the scripted executor checks every KV slot that a row builds on."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import pytest

from engine.config import KvTiersConfig
from engine.fake.kv_mover import BLOCK_BYTES, FakeMover
from engine.kv_tiers import BlockMove, MoveKind, MoveResult, Tier
from engine.prefix import extend_chain
from engine.protocol import Finished, SamplingParams, Scheduled, TimeCause, Token
from engine.scheduling.by_value import USED, ByValue
from engine.scheduling.planner import LONG_CHAIN
from engine.scheduling.request import Request
from engine.scheduling.tier_index import LEAST_LOADING
from engine.scheduling.tier_rates import TierRates
from engine.step import StepOutput, StepPlan
from tests.support.engines import RecordingCore, prompt_only
from tests.support.oracle import answer_of

LONG = tuple(range(1, 31))  # seven whole blocks of four, and two tokens
OTHER = tuple(range(31, 1, -1))
NEW = (3, 1, 4, 1, 5, 9)


def tiers(**options: Any) -> Callable[..., FakeMover]:
    return partial(FakeMover, **options)


class Engine(RecordingCore):
    """A core whose tiers are looked into."""

    def cancel_quietly(self, name: str) -> None:
        self.keep(self.abort(name))

    def find(self, name: str) -> Request | None:
        return self._scheduler.find(name)

    def mover_moves(self, kind: MoveKind) -> list[BlockMove]:
        """Return all moves that were begun."""
        return [move for move in self.begun if move.kind is kind]

    def watch(self) -> None:
        assert self.mover is not None
        self.begun: list[BlockMove] = []
        begin = self.mover.begin

        def watched(moves: Sequence[BlockMove], dropped: Sequence[tuple[Tier, bytes]] = ()) -> None:
            self.begun += moves
            begin(moves, dropped)

        self.mover.begin = watched  # type: ignore[method-assign]


class Failing:
    """Lets the loads of some blocks fail."""

    def __init__(self) -> None:
        self.digests: set[bytes] = set()

    def __call__(self, move: BlockMove) -> str | None:
        return "injected" if move.kind is MoveKind.LOAD and move.digest in self.digests else None


def core(mover: Callable[..., FakeMover], **overrides: Any) -> Engine:
    engine = Engine(mover=mover, **{"num_kv_blocks": 8, **overrides})
    engine.watch()
    return engine


def run(engine: Engine) -> None:
    """Step for as long as the thread of an engine would."""
    for _ in range(400):
        if not engine.is_awake:
            return
        engine.keep(engine.step())
    raise AssertionError(engine.load())


def settle(engine: Engine) -> None:
    """Let all moves end, and run."""
    assert engine.mover is not None
    for _ in range(400):
        engine.mover.release(100)
        if not engine.is_awake:
            return
        engine.keep(engine.step())
    raise AssertionError(engine.load())


def ask(engine: Engine, name: str, prompt: Sequence[int], **options: Any) -> Scheduled:
    engine.send(name, prompt, **{"max_tokens": 2, "ignore_eos": True, **options})
    run(engine)
    scheduled, *_, last = engine.events[name]
    assert isinstance(scheduled, Scheduled)
    assert isinstance(last, Finished), last
    return scheduled


def ask_beside(engine: Engine, name: str, prompt: Sequence[int]) -> bool:
    """Ask while moves are held; return whether it was answered."""
    engine.send(name, prompt, max_tokens=2, ignore_eos=True)
    for _ in range(10):
        engine.keep(engine.step())
    return isinstance(engine.events[name][-1], Finished)


def prepare_lost(engine: Engine) -> None:
    """Store a long prompt, and let the cache lose it. Moves are held."""
    for name, prompt in (("first", LONG), ("other", OTHER)):
        engine.send(name, prompt, max_tokens=2, ignore_eos=True)
        settle(engine)
    assert engine._blocks.reset_cache()


def answer(engine: Engine, name: str) -> list[int]:
    return [event.token_id for event in engine.events[name] if isinstance(event, Token)]


def tokens_of(prompt: Sequence[int], count: int) -> list[int]:
    return answer_of(prompt, SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True))[0]


def engine_hashes(engine: Engine, prompt: Sequence[int]) -> list[bytes]:
    chain: list[bytes] = []
    size = engine.config.block_size
    extend_chain(chain, prompt, len(prompt) // size, size)
    return chain


ALL_TIERS = [{"host_blocks": 40}, {"disk": {}}, {"host_blocks": 40, "disk": {}}]


def fresh(options: dict[str, Any]) -> dict[str, Any]:
    return {name: {} if name == "disk" else value for name, value in options.items()}


@pytest.mark.parametrize("options", ALL_TIERS)
@pytest.mark.parametrize("overlap", [False, True])
def test_what_the_cache_has_lost_is_loaded_instead_of_computed(options: dict[str, Any], overlap: bool) -> None:
    engine = core(tiers(**fresh(options)), overlap=overlap)
    assert ask(engine, "first", LONG).cached_tokens == 0
    ask(engine, "other", OTHER)  # the cache holds one of them
    assert ask(engine, "again", LONG).cached_tokens == 28
    assert answer(engine, "again") == answer(engine, "first")
    nearest = engine.load().tiers[0]
    assert (nearest.hit_blocks, nearest.failed_loads) == (7, 0)


def test_only_what_the_cache_lacks_is_loaded() -> None:
    engine = core(tiers(host_blocks=40), num_kv_blocks=14)
    ask(engine, "first", LONG)
    ask(engine, "other", OTHER)  # takes seven blocks besides the seven free ones: the tail's first
    held = len(engine._blocks.match(engine_hashes(engine, LONG)))
    assert 0 < held < 7
    assert ask(engine, "again", LONG).cached_tokens == 28
    assert engine.load().tiers[0].hit_blocks == 7 - held


def test_a_disk_serves_the_next_engine() -> None:
    disk: dict[bytes, list[Any]] = {}
    first = core(tiers(disk=disk))
    ask(first, "first", LONG)
    second = core(tiers(disk=disk))
    assert ask(second, "again", LONG).cached_tokens == 28
    assert answer(second, "again") == answer(first, "first")


def test_a_request_that_loads_takes_no_seat() -> None:
    engine = core(tiers(host_blocks=40, held=True), max_num_seqs=1, num_kv_blocks=24)
    prepare_lost(engine)
    engine.send("loads", LONG, max_tokens=2)
    engine.keep(engine.step())
    assert engine.load().num_loading == 1
    assert ask_beside(engine, "beside", NEW), "a seat is free"
    settle(engine)
    assert engine.events["loads"][0] == Scheduled("loads", 28)


def test_the_time_of_a_load_is_told() -> None:
    engine = core(tiers(host_blocks=40, held=True))
    prepare_lost(engine)
    engine.send("loads", LONG, max_tokens=2)
    engine.keep(engine.step())
    engine.now += 1.0
    settle(engine)
    last = engine.events["loads"][-1]
    assert isinstance(last, Finished)
    assert last.times is not None
    assert last.times.seconds[TimeCause.KV_LOAD] >= 1.0


def test_two_requests_share_one_load() -> None:
    engine = core(tiers(host_blocks=40, held=True))
    prepare_lost(engine)
    before = len(engine.mover_moves(MoveKind.LOAD))
    engine.send("one", LONG, max_tokens=2)
    engine.send("two", LONG, max_tokens=2)
    engine.keep(engine.step())
    assert engine.load().num_loading == 2
    assert len(engine.mover_moves(MoveKind.LOAD)) - before == 7
    engine.cancel_quietly("one")
    settle(engine)
    assert engine.events["two"][0] == Scheduled("two", 28), "what it waits for, too, goes on"


@pytest.mark.parametrize("lost", [0, 3, 6])
def test_after_a_failed_load_the_rest_is_computed(lost: int) -> None:
    failing = Failing()
    engine = core(tiers(host_blocks=40, failing=failing))
    ask(engine, "first", LONG)
    ask(engine, "other", OTHER)
    failing.digests = {engine_hashes(engine, LONG)[lost]}
    assert ask(engine, "again", LONG).cached_tokens == 4 * lost
    assert answer(engine, "again") == answer(engine, "first")
    assert engine.load().tiers[0].failed_loads == 1


def test_a_tier_that_never_answers_costs_the_timeout_and_no_more() -> None:
    engine = core(tiers(host_blocks=40, held=True), kv_tiers=KvTiersConfig(host_memory_gib=1.0, load_timeout_s=2.0))
    prepare_lost(engine)
    engine.send("late", LONG, max_tokens=2, ignore_eos=True)
    engine.keep(engine.step())
    assert not engine.has_work, "its thread sleeps"
    assert engine.next_deadline == pytest.approx(engine.now + 2.0, abs=0.02)
    engine.now = engine.next_deadline or 0.0
    for _ in range(20):
        engine.keep(engine.step())
    assert engine.events["late"][0] == Scheduled("late", 0)
    assert engine.load().tiers[0].late_loads == 1


def test_an_abort_while_loading_gives_everything_back() -> None:
    engine = core(tiers(host_blocks=40, held=True))
    prepare_lost(engine)
    engine.send("gone", LONG, max_tokens=2)
    engine.keep(engine.step())
    engine.cancel_quietly("gone")
    assert engine.load().num_held_blocks == 0
    engine.keep(engine.step())
    assert engine.find("gone") is None


def test_a_load_that_was_given_up_writes_nothing_into_anothers_blocks() -> None:
    engine = core(tiers(host_blocks=40, held=True))
    prepare_lost(engine)
    engine.send("gone", LONG, max_tokens=2)
    engine.keep(engine.step())
    engine.cancel_quietly("gone")
    engine.send("next", tuple(reversed(LONG)), max_tokens=2, ignore_eos=True)
    for _ in range(20):
        if not answer(engine, "next"):
            engine.keep(engine.step())
    settle(engine)  # what was under way ends now
    assert answer(engine, "next") == tokens_of(tuple(reversed(LONG)), 2)


def test_a_deadline_ends_a_request_that_loads() -> None:
    engine = core(tiers(host_blocks=40, held=True))
    prepare_lost(engine)
    engine.send("late", LONG, max_tokens=2, timeout_s=0.5)
    engine.keep(engine.step())
    engine.now += 1.0
    engine.keep(engine.step())
    assert [type(event).__name__ for event in engine.events["late"]] == ["Failed"]
    assert engine.load().num_held_blocks == 0


def test_running_requests_come_before_loads_when_memory_runs_out() -> None:
    engine = core(tiers(host_blocks=40, held=True), num_kv_blocks=11, scheduler=prompt_only())
    prepare_lost(engine)
    engine.send("runs", NEW, max_tokens=30, ignore_eos=True)
    engine.keep(engine.step())
    engine.send("loads", LONG, max_tokens=2, ignore_eos=True)
    for _ in range(40):
        engine.keep(engine.step())
    assert len(answer(engine, "runs")) == 30
    assert engine.load().num_preemptions == 0
    settle(engine)
    assert isinstance(engine.events["loads"][-1], Finished)


def test_a_block_is_stored_as_it_was_before_the_step_that_overwrites_it() -> None:
    """Memory runs out: the victim's blocks go to the host in the step in which others take them."""
    engine = core(tiers(host_blocks=40), num_kv_blocks=9, scheduler=prompt_only(preempt_policy="offload"))
    for name, prompt in (("a", LONG[:10]), ("b", OTHER[:10])):
        engine.send(name, prompt, max_tokens=16, ignore_eos=True)
    run(engine)
    assert engine.load().num_preemptions > 0
    assert engine.load().tiers[0].hit_blocks > 0, "it came back without being computed"
    for name, prompt in (("a", LONG[:10]), ("b", OTHER[:10])):
        assert answer(engine, name) == tokens_of(prompt, 16)


def test_a_load_that_would_take_longer_than_computing_is_not_made() -> None:
    engine = core(tiers(host_blocks=40))
    ask(engine, "first", LONG)
    ask(engine, "other", OTHER)
    assert engine._tiers is not None
    for _ in range(200):
        engine._tiers.rates.note_step(1, 1e-9, prefills=True)
    slow = MoveResult(BlockMove(0, MoveKind.LOAD, Tier.HOST, b"", 0), seconds=5.0)
    engine._tiers.rates.note_move(slow, engine.now)
    assert ask(engine, "again", LONG).cached_tokens == 0
    engine.now += 3600.0  # a tier that was slow an hour ago is tried again
    for _ in range(2000):
        engine._tiers.rates.note_step(1, 1.0, prefills=True)
    ask(engine, "other again", OTHER)
    assert ask(engine, "at last", LONG).cached_tokens == 28


def test_the_host_tier_keeps_its_bound() -> None:
    engine = core(tiers(host_blocks=3))
    ask(engine, "first", LONG)
    ask(engine, "other", OTHER)
    load = engine.load().tiers[0]
    assert (load.num_blocks, load.used_bytes) == (3, 3 * BLOCK_BYTES)
    assert load.stored_blocks - load.evicted_blocks == 3


def test_a_full_host_tier_learns_from_the_return_of_what_it_has_dropped() -> None:
    """Regression: it had forgotten a dropped block by the time that it was stored again."""
    engine = core(tiers(host_blocks=8), num_kv_blocks=16)
    for number in range(4):
        ask(engine, f"r{number}", tuple((number + 2) * place % 29 + 1 for place in range(1, 31)))
    first = tuple(2 * place % 29 + 1 for place in range(1, 31))
    head = engine_hashes(engine, first)[0]
    kept = engine._tiers._kept  # type: ignore[union-attr]
    assert isinstance(kept, ByValue)
    assert head in kept._ghosts
    engine._blocks.reset_cache()
    ask(engine, "again", first)
    assert kept._blocks[head].kind == USED


def test_a_busy_tier_is_asked_again() -> None:
    engine = core(tiers(disk={}, most_storing=1))
    ask(engine, "first", LONG)
    load = engine.load().tiers[0]
    assert load.num_blocks == 7
    assert load.refused_stores > 0


def test_what_another_engine_removed_is_not_waited_for() -> None:
    engine = core(tiers(disk={}))
    ask(engine, "first", LONG)
    ask(engine, "other", OTHER)
    assert engine.mover is not None
    engine.mover.lose(Tier.DISK, engine_hashes(engine, LONG)[2])
    assert ask(engine, "again", LONG).cached_tokens == 8


def test_a_reset_wipes_all_tiers() -> None:
    engine = core(tiers(host_blocks=40, disk={}))
    ask(engine, "first", LONG)
    assert engine.reset_prefix_cache() == 3 * 7
    assert [load.num_blocks for load in engine.load().tiers] == [0, 0]
    assert ask(engine, "again", LONG).cached_tokens == 0


def test_a_reset_while_loading_ends_in_computing() -> None:
    engine = core(tiers(host_blocks=40, held=True))
    prepare_lost(engine)
    engine.send("loads", LONG, max_tokens=2, ignore_eos=True)
    engine.keep(engine.step())
    engine.reset_prefix_cache()
    settle(engine)
    assert engine.events["loads"][0] == Scheduled("loads", 0)


def test_salted_prompts_share_no_tier() -> None:
    engine = core(tiers(host_blocks=40))
    ask(engine, "first", LONG, cache_salt="one")
    ask(engine, "other", OTHER)
    assert ask(engine, "again", LONG, cache_salt="two").cached_tokens == 0


def test_an_idle_engine_finishes_its_stores_and_then_sleeps() -> None:
    engine = core(tiers(host_blocks=40), max_num_batched_tokens=30, num_kv_blocks=20)
    engine.send("first", LONG, max_tokens=1)
    while engine.has_work:
        engine.keep(engine.step())
    assert engine.load().tiers[0].num_blocks + len(engine._tiers._known[Tier.HOST].storing) == 7  # type: ignore[union-attr]
    assert not engine.has_work


def test_nobody_is_admitted_in_a_step_that_ends_a_load() -> None:
    """Regression: blocks of the load counted twice, as freed and as shared by the request that was admitted."""
    engine = core(tiers(host_blocks=40, held=True), num_kv_blocks=11, scheduler=prompt_only(), max_num_seqs=2)
    prepare_lost(engine)
    engine.send("head", LONG[:13], max_tokens=1, ignore_eos=True)
    settle(engine)
    engine.send("runs", NEW, max_tokens=38, ignore_eos=True)
    engine.keep(engine.step())
    engine.send("loads", LONG, max_tokens=2, ignore_eos=True)  # holds three cached blocks, and four that come
    engine.keep(engine.step())
    assert engine.load().num_loading == 1
    engine.send("shares", LONG[:12] + (5,) * 17, max_tokens=2, ignore_eos=True)
    for _ in range(40):
        engine.keep(engine.step())
    settle(engine)
    assert isinstance(engine.events["shares"][-1], Finished)


@pytest.mark.parametrize("how", ["abort", "late"])
def test_a_block_that_no_longer_comes_is_looked_up_anew(how: str) -> None:
    """Regression: a second request counted on a block that the first one loaded, after the disk had lost it."""
    engine = core(tiers(disk={}, held=True), max_num_seqs=1, num_kv_blocks=24)
    prepare_lost(engine)
    engine.send("one", LONG, max_tokens=2, ignore_eos=True)
    engine.keep(engine.step())
    engine.now += 1.0
    engine.send("two", LONG, max_tokens=2, ignore_eos=True)
    assert engine.mover is not None
    engine.mover.lose(Tier.DISK, engine_hashes(engine, LONG)[2])
    engine.keep(engine.step())
    assert engine.load().num_loading == 1
    if how == "abort":
        engine.cancel_quietly("one")
    else:
        engine.now = engine.next_deadline or 0.0
    engine.keep(engine.step())
    settle(engine)
    assert isinstance(engine.events["two"][-1], Finished)


@pytest.mark.parametrize("max_tokens", [3, 4, 5, 6, 7])
def test_with_overlap_the_last_end_lets_those_run_that_waited_for_memory(max_tokens: int) -> None:
    """Regression: nothing could run beside a load when the step was planned, so that the engine slept, although the
    results it then read made room."""
    engine = core(tiers(host_blocks=40, held=True), num_kv_blocks=14, overlap=True, scheduler=prompt_only())
    prepare_lost(engine)
    engine.send("runs", NEW, max_tokens=max_tokens, ignore_eos=True)
    engine.keep(engine.step())
    engine.send("loads", LONG, max_tokens=2, ignore_eos=True)
    engine.keep(engine.step())
    assert engine.load().num_loading == 1
    engine.send("waits", (7,) * 28, max_tokens=2, ignore_eos=True)
    for _ in range(60):
        if not engine.has_work:
            break
        engine.keep(engine.step())
    assert not engine._scheduler.plan(engine.now).rows, "the engine sleeps, but a plan would have rows"


def test_an_engine_sleeps_when_the_cache_has_lost_all_that_was_to_be_stored() -> None:
    engine = core(tiers(disk={}, held=True, most_storing=1), scheduler=prompt_only())
    engine.send("first", LONG[:28], max_tokens=1, ignore_eos=True)
    for _ in range(4):
        engine.keep(engine.step())
    for number in range(8):
        engine.send(f"r{number}", (number, 3), max_tokens=1, ignore_eos=True)
    settle(engine)
    assert not engine.has_work


def test_a_tier_that_was_late_is_not_waited_for_again_and_again() -> None:
    engine = core(tiers(host_blocks=40, held=True), kv_tiers=KvTiersConfig(host_memory_gib=1.0, load_timeout_s=2.0))
    prepare_lost(engine)
    waited = []
    for number in range(3):
        began = engine.now
        engine.send(f"r{number}", LONG, max_tokens=2, ignore_eos=True)
        engine.keep(engine.step())
        if engine.load().num_loading:
            engine.now = engine.next_deadline or 0.0
        for _ in range(20):
            if not isinstance((engine.events[f"r{number}"] or [None])[-1], Finished):
                engine.keep(engine.step())
        waited.append(engine.now - began)
        engine._blocks.reset_cache()
    assert waited[0] > 2.0 > 1.0 > waited[2]


def test_an_urgent_request_does_not_wait_for_the_loads_of_others() -> None:
    engine = core(tiers(host_blocks=40, held=True), num_kv_blocks=9)
    prepare_lost(engine)
    engine.send("low", LONG, max_tokens=2, ignore_eos=True, priority=5)
    engine.keep(engine.step())
    assert engine.load().num_loading == 1
    engine.send("urgent", (7,) * 20, max_tokens=2, ignore_eos=True, priority=-5)
    run(engine)
    assert isinstance(engine.events["urgent"][-1], Finished)


def test_an_urgent_request_that_ends_the_last_load_does_not_leave_the_engine_asleep() -> None:
    """Regression: nothing ran, so that the step that ended the load had no rows. The engine then waited for the end of
    a load that was given up, until another request came."""
    engine = core(tiers(host_blocks=40, held=True))
    prepare_lost(engine)
    engine.send("low", LONG, max_tokens=2, ignore_eos=True, priority=5)
    run(engine)
    assert engine.load().num_loading == 1
    engine.send("urgent", (7,) * 24, max_tokens=2, ignore_eos=True)
    run(engine)
    assert isinstance(engine.events["urgent"][-1], Finished)


def test_loads_are_handed_out_without_a_walk_over_those_that_left() -> None:
    """An iteration over a plain dict passes the places of what was taken: 60,000 loads took 1.4 ms of each
    step."""
    walks = 0

    class Walked(OrderedDict[int, BlockMove]):
        def __iter__(self) -> Iterator[int]:
            nonlocal walks
            walks += 1
            return super().__iter__()

    engine = core(tiers(host_blocks=40, held=True))
    index = engine._tiers
    assert index is not None
    moves = [index.begin_load(bytes([number]), Tier.HOST, number) for number in range(10)]
    index._queued = Walked(index._queued)
    assert index.take_moves(beside_rows=False).moves == tuple(moves)
    assert not index.has_queued
    assert walks == 0


def forget_after_a_look(engine: Engine) -> None:
    """Let a request look at the tiers for a prompt that is too long to be looked up in every step, while it waits for
    memory, and let the tiers lose it then."""
    long = tuple(1 + (number * number) % 29 for number in range(4 * LONG_CHAIN + 40))
    engine.send("first", long, max_tokens=2, ignore_eos=True)
    settle(engine)
    engine._blocks.reset_cache()
    engine.send("runs", tuple(reversed(long[:400])), max_tokens=200, ignore_eos=True)
    while not engine.events["runs"]:
        engine.keep(engine.step())
    engine.send("long", long, max_tokens=2, ignore_eos=True)
    engine.keep(engine.step())
    request = engine.find("long")
    assert request is not None
    assert request.tier_match is not None
    assert request.tier_match.reach > LONG_CHAIN
    engine.reset_prefix_cache()
    engine.cancel_quietly("runs")


def long_core() -> Engine:
    sizes = {"max_model_len": 1300, "max_prefill_tokens": 512, "max_num_batched_tokens": 512}
    return core(tiers(host_blocks=2000, move_s=1e-9), num_kv_blocks=300, tick_ms=1.0, **sizes)


def test_a_load_that_finds_its_tier_empty_does_not_leave_the_engine_asleep() -> None:
    """Regression: it ended where it began, and the engine waited for its end until another request came."""
    engine = long_core()
    forget_after_a_look(engine)
    run(engine)
    assert isinstance(engine.events["long"][-1], Finished)


def test_a_load_that_finds_its_tier_empty_is_not_planned_again() -> None:
    engine = long_core()
    forget_after_a_look(engine)
    engine.keep(engine.step())
    engine.keep(engine.step())
    assert engine.events["long"] == [Scheduled("long", 0)]


def test_the_time_after_a_load_that_found_its_tier_empty_is_no_time_of_a_load() -> None:
    engine = long_core()
    forget_after_a_look(engine)
    engine.keep(engine.step())
    engine.now += 1.0  # it waits for its turn
    run(engine)
    times = engine.finished("long").times
    assert times is not None
    assert TimeCause.KV_LOAD not in times.seconds


def test_what_a_tier_lost_is_stored_again_while_the_cache_has_it() -> None:
    engine = core(tiers(disk={}), num_kv_blocks=24)
    ask(engine, "first", LONG)
    lost = engine_hashes(engine, LONG)[0]
    assert engine.mover is not None
    engine.mover.lose(Tier.DISK, lost)
    ask(engine, "again", LONG)
    ask(engine, "once more", LONG)
    assert lost in engine.tier_digests(100)[Tier.DISK]


def test_loads_beside_rows_come_in_portions() -> None:
    """500 loads at once stretched a step from 15 to 300 ms."""
    engine = core(tiers(host_blocks=90, held=True), num_kv_blocks=40)
    prepare_lost(engine)
    engine.send("runs", NEW, max_tokens=30, ignore_eos=True)
    engine.keep(engine.step())
    before = len(engine.mover_moves(MoveKind.LOAD))
    engine.send("loads", LONG, max_tokens=2, ignore_eos=True)
    engine.keep(engine.step())
    assert len(engine.mover_moves(MoveKind.LOAD)) - before == LEAST_LOADING
    settle(engine)
    assert engine.events["loads"][0] == Scheduled("loads", 28)


def begin_to_load(*prompts: Sequence[int]) -> Engine:
    """Return an engine with a running request and requests that load these prompts, in portions. Moves are held."""
    late = KvTiersConfig(host_memory_gib=1.0, load_timeout_s=2.0)
    engine = core(tiers(host_blocks=90, held=True), num_kv_blocks=60, max_num_seqs=4, kv_tiers=late)
    prepare_lost(engine)
    engine.send("runs", NEW, max_tokens=60, ignore_eos=True)
    engine.keep(engine.step())
    assert engine.mover is not None
    engine.mover.release(100)  # its stores
    for number, prompt in enumerate(prompts):
        engine.send(f"loads {number}", prompt, max_tokens=2, ignore_eos=True)
    engine.keep(engine.step())
    assert engine.load().num_loading == len(prompts)
    return engine


def test_loads_that_wait_for_those_of_others_are_not_late() -> None:
    """Regression: half of the streams that moved with their KV were computed again: their loads had to wait until those
    before them were done, for longer than a load may take, while the tier answered all the time."""
    engine = begin_to_load(LONG, OTHER)
    assert engine.mover is not None
    while engine.load().num_loading:
        engine.now += 0.9
        engine.mover.release(2)
        engine.keep(engine.step())
    settle(engine)
    assert [engine.events[f"loads {number}"][0] for number in (0, 1)] == [
        Scheduled("loads 0", 28),
        Scheduled("loads 1", 28),
    ]
    assert engine.load().tiers[0].late_loads == 0


def test_loads_that_wait_for_those_of_others_are_late_once_the_tier_answers_no_more() -> None:
    engine = begin_to_load(LONG, OTHER)
    began = engine.now
    while engine.load().num_loading:
        assert engine.now < began + 2.5
        engine.now += 0.1
        engine.keep(engine.step())
    assert engine.load().tiers[0].late_loads == 2


def test_short_rests_of_prompts_do_not_hide_what_prefill_costs() -> None:
    """Regression: a step of 8 tokens takes a twentieth of one of 8,192, and the mean of both rates was far too high."""
    rates = TierRates()
    for _ in range(64):
        rates.note_step(8, 0.020, prefills=True)
        rates.note_step(8192, 0.4, prefills=True)
    assert rates.prefill_s(8200) == pytest.approx(0.42, rel=0.1)


def test_a_step_that_waited_for_the_step_before_counts_only_its_own_time() -> None:
    """With overlap, a step is launched while the one before it runs. Prompts seemed to take twice their time, and
    loads were made that took longer than the prompts."""
    now, ends = 0.0, {-1: 0.0}
    engine = core(tiers(), num_kv_blocks=64, overlap=True)
    engine._stopwatch = lambda: now
    launch, collect = engine._executor.launch, engine._executor.collect

    def timed_launch(step: StepPlan) -> None:
        launch(step)
        ends[step.step_id] = max(now, ends[step.step_id - 1]) + 1.0  # a device computes one step after another

    def timed_collect() -> StepOutput:
        nonlocal now
        output = collect()
        now = max(now, ends[output.step_id])
        return output

    engine._executor.launch = timed_launch  # type: ignore[method-assign]
    engine._executor.collect = timed_collect  # type: ignore[method-assign]
    engine.send("a", LONG, max_tokens=8, ignore_eos=True)
    settle(engine)
    assert engine._tiers is not None
    assert engine._tiers.rates.step_s == pytest.approx(1.0)

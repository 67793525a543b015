"""The benchmark of KV tiers, on scripted engines whose answers depend on the KV that they read.
Its traces are what they say, no wrong answer and no prompt that was not loaded gets into a figure, and its document
keeps what it has."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from benchmarks.engine import kv_tiers
from benchmarks.engine.tiers import agents, cost, trace, warm, worker
from benchmarks.engine.tiers.driver import Asked, Clock, DrivenEngine
from engine.config import EngineConfig, KvTiersConfig, ResolvedConfig
from engine.fake.executor import FakeExecutor
from engine.fake.kv_mover import BLOCK_BYTES, FakeMover
from engine.kv_tiers import BlockMove, MoveKind
from engine.protocol import TokenLogprobs
from tests.support.engines import resolved_config

SMALL = warm.WarmLoad(prompt=640, answer=4, host_gib=2**-10)
SHAPE = trace.Shape(sessions=4, turns=6, first_prompt=64, prompts=6 * 150, answers=30, once=5, once_prompt=64)
VOCABULARY = 64


def executor_of(config: ResolvedConfig, mover: partial[FakeMover] | None = None) -> FakeExecutor:
    alphabet = range(config.vocab_size)
    return FakeExecutor(config.num_kv_blocks, config.block_size, alphabet, eos_token_id=0, mover=mover)


class Machine:
    """Makes scripted engines, whose directories outlive them."""

    def __init__(self, **options: Any) -> None:
        self._options = options
        self._disks: dict[str, dict[bytes, list[Any]]] = {}

    @contextmanager
    def __call__(self, *, kv_tiers: KvTiersConfig, **settings: Any) -> Iterator[DrivenEngine]:
        config = resolved_config(
            block_size=16, max_num_batched_tokens=64, max_prefill_tokens=64, vocab_size=VOCABULARY, **settings
        )
        config = replace(config, kv_tiers=kv_tiers)
        options = dict(self._options)
        if path := kv_tiers.disk_path:
            options["disk"] = self._disks.setdefault(path, {})
        host_blocks = int(kv_tiers.host_memory_gib * 2**30) // BLOCK_BYTES
        mover = partial(FakeMover, host_blocks=host_blocks, **options) if kv_tiers.any else None
        engine = DrivenEngine(executor_of(config, mover), config)
        yield engine
        engine.shutdown()


# --- prompts that come back -------------------------------------------------------------------------------------------


def test_a_prompt_comes_back_from_both_tiers_with_the_computed_answer(tmp_path: Path) -> None:
    found = warm.one_round(Machine(), SMALL, random.Random(1), tmp_path)
    for name in warm.ROWS:
        assert found[f"{name}_ratio"] == pytest.approx(found[f"{name}_ms"] / found["computed_ms"])


def test_a_tier_that_serves_nothing_gets_no_figure(tmp_path: Path) -> None:
    def fails(move: BlockMove) -> str | None:
        return "injected" if move.kind is MoveKind.LOAD else None

    with pytest.raises(RuntimeError, match=r"64 tokens of 'host' were there, not 608 to 640"):
        warm.one_round(Machine(failing=fails), SMALL, random.Random(1), tmp_path)


def asked(cached: int, logprob: float = -1.5) -> Asked:
    return Asked(0.5, cached, ((7, TokenLogprobs(7, logprob)),))


def test_an_answer_that_differs_by_a_bit_gets_no_figure() -> None:
    rest = {"computed": asked(0), "stored": asked(0), "host": asked(640), "disk_cold": asked(640)}
    warm.check({**rest, "disk": asked(640)}, SMALL)
    with pytest.raises(RuntimeError, match="the answer of 'disk' differs"):
        warm.check({**rest, "disk": asked(640, logprob=-1.5000000000000002)}, SMALL)


def test_a_prompt_that_should_have_been_computed_but_was_not_gets_no_figure() -> None:
    rest = {"stored": asked(0), "host": asked(640), "disk": asked(640), "disk_cold": asked(640)}
    with pytest.raises(RuntimeError, match="16 tokens of 'computed' were there"):
        warm.check({**rest, "computed": asked(16)}, SMALL)


def test_files_are_as_they_were_once_their_pages_were_dropped(tmp_path: Path) -> None:
    (tmp_path / "below").mkdir()
    (tmp_path / "below" / "file").write_bytes(b"kept" * 5000)
    warm.drop_pages(tmp_path)
    assert (tmp_path / "below" / "file").read_bytes() == b"kept" * 5000


# --- traces -----------------------------------------------------------------------------------------------------------


def of_session(turns: Sequence[trace.Turn], name: str) -> list[trace.Turn]:
    return [turn for turn in turns if turn.session == name]


def test_drawn_sessions_have_the_tokens_that_were_asked_for() -> None:
    """Prompts may be a token a turn off: what is added to each is a whole number."""
    shape = trace.Shape.of(3, 43)
    turns = trace.drawn(shape, 1000, seed=5)
    lengths = agents.prompt_lengths(turns)
    for number in range(shape.sessions):
        mine = [at for at, turn in enumerate(turns) if turn.session == f"session {number}"]
        assert len(mine) == 43
        assert sum(turns[at].answer for at in mine) == 444
        assert abs(sum(lengths[at] for at in mine) - 142_000) <= 43 * 43
        assert lengths[mine[0]] == shape.first_prompt
    assert [turn.at for turn in turns] == sorted(turn.at for turn in turns)
    assert len(of_session(turns, "")) == 43


def test_drawn_sessions_of_another_seed_have_no_prompt_in_common() -> None:
    one, other = (trace.drawn(SHAPE, 10_000, seed) for seed in (1, 2))
    assert trace.drawn(SHAPE, 10_000, 1) == one
    assert not {turn.tokens for turn in one} & {turn.tokens for turn in other}


@pytest.mark.parametrize(("total", "weights"), [(444, [1.0] * 43), (10, [100.0, 0.001, 1.0]), (3, [1.0, 2.0, 3.0])])
def test_parts_add_up_and_none_is_empty(total: int, weights: list[float]) -> None:
    found = trace.parts(total, weights)
    assert (sum(found), len(found)) == (total, len(weights))
    assert min(found) >= 1


def test_sessions_that_begin_longer_than_all_their_prompts_are_refused() -> None:
    with pytest.raises(ValueError, match="6 prompts of 100 tokens do not begin with 64"):
        trace.drawn(replace(SHAPE, prompts=100), 1000, seed=1)


def test_recorded_sessions_are_what_agents_sent_once_for_each_user() -> None:
    turns = trace.recorded(lambda text: list(text.encode()), users=2, seed=1)
    recorded = (trace.RECORDED / "codex-turns.jsonl").read_text(encoding="utf-8").splitlines()
    for user in (0, 1):
        mine = of_session(turns, f"codex-turns {user}")
        assert len(mine) == len(recorded)
        assert {turn.salt for turn in mine} == {f"user {user}"}
    last = json.loads(bytes(of_session(turns, "codex-turns 0")[-1].tokens).decode().splitlines()[-1])
    assert last == json.loads(recorded[-1])["body"]["input"][-1]


def test_the_working_set_counts_each_block_of_sessions_once() -> None:
    first, more = tuple(range(40)), tuple(range(100, 120))
    turns = [
        trace.Turn(0, "a", first, 4),  # 44 tokens: two full blocks
        trace.Turn(1, "a", more, 16),  # 80: three more, of which one was begun before
        trace.Turn(2, "b", first, 4, continues=False),  # the same prompt, but its answer may be another
        trace.Turn(3, "c", first, 4, continues=False, salt="other"),
        trace.Turn(4, "", first, 64, continues=False),
    ]
    assert trace.working_set(turns, 16) == 5 + 0 + 2
    assert trace.longest(turns) == 104
    assert agents.prompt_lengths(turns) == [40, 64, 40, 40, 40]


class Noting(DrivenEngine):
    """Notes its name and the length of each prompt that it is asked for."""

    def __init__(self, name: str, noted: list[tuple[str, int]]) -> None:
        config = resolved_config(block_size=16, max_num_batched_tokens=64, max_prefill_tokens=64, vocab_size=VOCABULARY)
        super().__init__(executor_of(config), config)
        self._name, self._noted = name, noted

    def ask(self, prompt: Sequence[int], *args: Any, **more: Any) -> Asked:
        self._noted.append((self._name, len(prompt)))
        return super().ask(prompt, *args, **more)


# --- agents -----------------------------------------------------------------------------------------------------------


def test_a_tier_that_holds_the_sessions_hits_what_an_unlimited_pool_hits() -> None:
    turns = trace.drawn(SHAPE, VOCABULARY, seed=3)
    found = agents.measure_trace(Machine(), "drawn", [turns], agents.pools([1.0, 0.25], 1, ["int8"]), BLOCK_BYTES)
    hits = {cell["pool"]: cell["hit_share"][0] for cell in found["cells"]}
    best = 1 - sum(len(turn.tokens) for turn in turns if turn.session) / (4 * 900)
    assert hits["unlimited"] == pytest.approx(best, abs=0.08)  # but for blocks that were not full
    assert hits["alone"] < hits["unlimited"]
    assert hits["value 1"] >= 0.95 * hits["unlimited"]
    assert all(hits["alone"] <= hits[name] for name in ("value 0.25", "lru 0.25", "lru 1"))
    assert found["cells"][0]["ratio_p50"] == [1.0, 1.0, 1.0]
    assert (found["sessions"], found["turns"], found["once"]) == (4, 24, 5)


def test_an_answer_that_differs_from_the_unlimited_pools_gets_no_figure() -> None:
    turns = [trace.Turn(0, "a", (1,) * 20, 1)]
    right, wrong = (agents.Played([Asked(0.1, 0, ((token, None),))], {}) for token in (1, 2))
    assert agents.figures(turns, right, right)["ratio_p50"] == 1
    with pytest.raises(RuntimeError, match="answers differ"):
        agents.figures(turns, wrong, right)


def test_a_tier_in_8_bits_has_half_the_bytes_and_its_other_answers_are_counted() -> None:
    turns = [trace.Turn(0, "a", (1,) * 20, 1), trace.Turn(1, "a", (1,), 1), trace.Turn(2, "", (1,) * 20, 1)]
    right, wrong = (agents.Played([Asked(0.1, 0, ((token, None),))] * 3, {}) for token in (1, 2))
    assert agents.figures(turns, wrong, right, is_exact=False)["other_answers"] == 2
    assert agents.figures(turns, right, right, is_exact=False)["other_answers"] == 0
    compared = agents.pools([0.5, 1.0], 1, ["int8"])
    narrow = next(pool for pool in compared if not pool.is_exact)
    whole = next(pool for pool in compared if pool.name == "value 1")
    given, other = (agents._settings(pool, turns, 2**20)["kv_tiers"] for pool in (narrow, whole))
    assert given.host_memory_gib == other.host_memory_gib / 2
    assert (given.dtype, other.dtype) == ("int8", "auto")
    assert narrow.text() == "a quarter, host tier of 50 % in `int8` by `value`"


def test_all_engines_are_asked_for_a_turn_before_any_is_for_the_next_and_each_is_the_first_in_turn() -> None:
    """One after another, each had minutes of its own, and what the machine did besides counted for one of them."""
    turns = [trace.Turn(number, "a", (1, 2, 3), 2) for number in range(3)]
    asked_for: list[tuple[str, int]] = []
    engines = {name: Noting(name, asked_for) for name in ("one", "other")}
    agents.play(engines, turns, "one")
    found = [asked_for[at : at + 2] for at in range(2, len(asked_for), 2)]  # behind those that do not count
    assert [[name for name, _ in pair] for pair in found] == [["one", "other"], ["other", "one"], ["one", "other"]]
    assert [{size for _, size in pair} for pair in found] == [{3}, {8}, {13}]
    for engine in engines.values():
        engine.shutdown()


def test_all_sessions_go_on_with_the_right_answer_after_another_one() -> None:
    """Or every later prompt of it would be another one, too."""
    turns = [trace.Turn(0, "a", (1, 2, 3), 2), trace.Turn(1, "a", (4, 5), 2)]
    prompts: list[tuple[int, ...]] = []

    class Wrong(Noting):
        def ask(self, prompt: Sequence[int], *args: Any, **more: Any) -> Asked:
            prompts.append(tuple(prompt))
            return replace(super().ask(prompt, *args, **more), answer=((60, None), (61, None)))

    engines = {"right": Noting("right", []), "wrong": Wrong("wrong", [])}
    played = agents.play(engines, turns, "right")
    assert played["wrong"].asked[0].token_ids == (60, 61)
    assert prompts[-1] == (1, 2, 3, *played["right"].asked[0].token_ids, 4, 5)
    for engine in engines.values():
        engine.shutdown()


def test_prompts_that_come_once_take_part_and_are_not_counted() -> None:
    turns = [trace.Turn(0, "a", (1,) * 20, 1), trace.Turn(1, "", (2,) * 20, 1, continues=False)]
    answer = ((1, None),)
    played = agents.Played([Asked(0.1, 16, answer), Asked(9.0, 0, answer)], {"hit_blocks": 3})
    found = agents.figures(turns, played, played)
    assert found["hit_share"] == 0.8
    assert (found["first_p90_ms"], found["hit_blocks"]) == (100, 3)


def test_the_clock_skips_pauses_and_never_goes_back() -> None:
    clock = Clock()
    began = clock()
    clock.skip_to(began + 1000)
    assert 1000 <= clock() - began < 1100
    clock.skip_to(began)
    assert clock() - began >= 1000


# --- the cost ---------------------------------------------------------------------------------------------------------


class Scripted(cost.Side):
    """An engine whose steps take what a test says."""

    def __init__(self, name: str, times: Sequence[float]) -> None:
        self.name = name
        self._times = iter(times)

    def run(self, command: str, number: int) -> list[float]:
        return [next(self._times)] * number


def test_steps_are_compared_with_those_of_the_same_round() -> None:
    times = {cost.OFF: [10, 20, 40], cost.BEFORE: [10, 25, 40], cost.HOST: [10.2, 22, 41], cost.BOTH: [11, 20, 44]}
    sides = [Scripted(name, found) for name, found in times.items()]
    cells = cost._cells("decode", cost.run_rounds(sides, "decode", 4, 3))
    found = {cell["side"]: cell.get("ratio") for cell in cells}
    assert found == pytest.approx({cost.OFF: 1.0, cost.BEFORE: None, cost.HOST: 1.025, cost.BOTH: 1.1})
    phase = {"cells": cells}
    assert cost.worst(phase, (cost.HOST, cost.BOTH)) == pytest.approx(1.1)
    assert cost.worst({"cells": []}, (cost.OFF,)) is None


def test_each_side_begins_as_often() -> None:
    begun = []

    class Noted(Scripted):
        def run(self, command: str, number: int) -> list[float]:
            begun.append(self.name)
            return super().run(command, number)

    cost.run_rounds([Noted(name, [1.0] * 4) for name in "abcd"], "decode", 1, 4)
    assert [begun[at] for at in range(0, 16, 4)] == ["a", "b", "c", "d"]


def test_an_engines_process_runs_the_steps_that_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def create(model: str, asked: EngineConfig) -> tuple[FakeExecutor, ResolvedConfig]:
        config = resolved_config(
            block_size=16, num_kv_blocks=40, max_model_len=200, max_num_batched_tokens=16, max_prefill_tokens=16
        )
        mover = partial(FakeMover, host_blocks=8) if asked.kv_tiers.any else None
        return executor_of(config, mover), config

    monkeypatch.setattr(worker, "prepare_model", lambda *_, **__: "")
    monkeypatch.setattr(worker, "create_executor", create)
    for tiers in ({}, {"kv_tiers": {"host_memory_gib": 1.0}}):
        engine = worker.Worker({"max_num_seqs": 4, **tiers}, rows=3, context=20)
        assert len(engine.decode(5)) == 5
        assert engine._core.load().num_running == 3
        assert len(engine.decode(2)) == 2, "the streams go on"
        assert len(engine.prefill(48)) == 3
        assert engine._core.load().num_running == 0
        assert not engine._core.is_moving
        assert bool(engine._core.load().tiers) == bool(tiers)
        engine.shutdown()


@pytest.mark.slow
def test_the_cost_is_measured_in_a_process_for_each_engine(tmp_path: Path) -> None:
    small = cost.CostLoad(rows=2, context=20, steps=4, prompt=40, rounds=1)
    cells = cost.measure_cost(small, None, tmp_path)["cells"]
    names = [cost.OFF, cost.HOST, cost.BOTH, cost.AGAIN]
    assert [(cell["step"], cell["side"]) for cell in cells] == list(itertools.product(("decode", "prefill"), names))
    assert all(cell["step_ms"][0] > 0 for cell in cells)
    assert list(tmp_path.iterdir()) == [], "the files are gone"


# --- the document -----------------------------------------------------------------------------------------------------


def test_a_phase_is_measured_anew_and_the_others_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.json"
    kept = {"rounds": 1, "rows": 2, "prompt_tokens": 3, "cells": [], "commit": "then"}
    out.write_text(json.dumps({"benchmark": "kv_tiers", "phases": {"warm": {"commit": "then"}, "cost": kept}}))
    monkeypatch.setattr(kv_tiers, "default_engine", Machine())
    small = ["--rounds", "2", "--prompt", "640", "--seed", "3", "--directory", str(tmp_path)]
    kv_tiers.main(["--phases", "warm", *small, "--out", str(out)])
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert document == json.loads(out.read_text())
    assert document["phases"]["cost"] == kept
    found = document["phases"]["warm"]
    assert (found["seed"], found["rounds"], found["prompt_tokens"]) == (3, 2, 640)
    assert found["cpu"]
    assert found["disk_ratio"][1] <= found["disk_ratio"][0] <= found["disk_ratio"][2]


def test_what_was_not_measured_has_no_figure() -> None:
    lines = kv_tiers.table({"phases": {}}).splitlines()[2:]
    assert len(lines) == 7
    assert all(line.endswith("| – |") for line in lines)
    assert {warm.table(None), agents.table(None), cost.table(None)} == {"Not measured yet."}


def test_a_commit_that_is_not_there_is_refused_before_anything_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        kv_tiers.main(["--against", "no-such-commit"])
    assert "--against: no-such-commit is not a commit of this repository" in capsys.readouterr().err

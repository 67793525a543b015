"""Owns the proof that engine/DESIGNS.md is true: each snippet is a config, and gives its design's plans. Long: five
designs.
Never changes a mode: examples run as they are written, and other traces scale down only budgets and memory."""

from __future__ import annotations

import copy
import re
from dataclasses import dataclass, fields, replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import TypeAdapter

import engine
from engine.config import ConfigError, EngineConfig, ResolvedConfig
from engine.presets import PRESETS
from engine.step import RowKind, StepPlan
from serve_app.settings.application import AppSettings
from tests.support.engines import RecordingCore, answer_alone
from tests.support.plan_rows import chunks

DESIGNS = ["S1", "S2", "S3", "S4", "S5"]


@cache
def snippets() -> dict[str, dict[str, Any]]:
    """Map each design to the mapping under `args:` in its snippet."""
    text = (Path(engine.__file__).parent / "DESIGNS.md").read_text()
    found = re.findall(r"^## (S\d)(?:(?!^## ).)*?^```yaml\n(.*?)^```$", text, flags=re.DOTALL | re.MULTILINE)
    return {name: yaml.safe_load(body) for name, body in found}


def design(name: str) -> EngineConfig:
    return TypeAdapter(EngineConfig).validate_python(snippets()[name]["engine"])


def core_of(name: str, scheduler: dict[str, Any] | None = None, **scaled: Any) -> RecordingCore:
    """Make a core that runs the design with `scaled` settings; `scheduler` scales its counts of tokens."""
    asked = replace(design(name), **{"block_size": 4, "max_model_len": 256, "num_kv_blocks": 200, **scaled})
    return core_from(replace(asked, scheduler=replace(asked.scheduler, **(scheduler or {}))))


def core_from(asked: EngineConfig) -> RecordingCore:
    shared = {f.name for f in fields(ResolvedConfig)} & {f.name for f in fields(EngineConfig)}
    settings = {key: getattr(asked, key) for key in shared if getattr(asked, key) is not None}
    settings.setdefault("max_prefill_tokens", asked.max_num_batched_tokens)
    return RecordingCore(**{**settings, "dtype": "none"})


def step(core: RecordingCore) -> StepPlan:
    core.keep(core.step())
    return core.plans[-1]


def sizes(plan: StepPlan) -> list[int]:
    return [size for _, size in chunks(plan)]


def decodes(plan: StepPlan) -> list[str]:
    return [row.request_id for row in plan.rows if row.kind is RowKind.DECODE]


def partials(plan: StepPlan) -> list[str]:
    return [row.request_id for row in plan.rows if row.kind is RowKind.MIDDLE]


# --- all five --------------------------------------------------------------------------------------------------------


def test_every_design_has_one_snippet_and_it_is_a_valid_config() -> None:
    text = (Path(engine.__file__).parent / "DESIGNS.md").read_text()
    assert list(snippets()) == DESIGNS
    assert text.count("```yaml") == len(DESIGNS)
    for name in DESIGNS:
        assert list(snippets()[name]) == ["engine"]
        assert isinstance(design(name), EngineConfig)


def test_a_snippet_sizes_the_engine_and_its_preset_is_the_whole_schedule() -> None:
    schedules = [snippet["engine"]["scheduler"] for snippet in snippets().values()]
    assert schedules == [{"preset": name} for name in PRESETS]


@pytest.mark.parametrize("name", DESIGNS)
def test_a_snippet_stands_under_args_as_it_is(name: str) -> None:
    assert AppSettings.model_validate(snippets()[name]).engine == design(name)


TIGHT: dict[str, Any] = dict(num_kv_blocks=14, max_num_seqs=6, max_num_batched_tokens=22)
SCALED: dict[str, dict[str, Any]] = {
    "S1": dict(max_prefill_tokens=16),
    "S2": dict(),
    "S3": dict(max_prefill_tokens=16),
    "S4": dict(),
    "S5": dict(max_prefill_tokens=16, scheduler=dict(reserve_clip=4)),
}


@pytest.mark.parametrize(("name", "temperature"), list(product(DESIGNS, (0.0, 1.0))))
def test_the_tokens_are_those_of_each_request_alone(name: str, temperature: float) -> None:
    """Chunks, neighbours, prefix hits, overtaking and preemptions decide when a token comes, but never which."""
    core = core_of(name, **TIGHT, **SCALED[name])
    prompts = {f"r{i}": [1, 2, 3, 4, *[i + 1] * length] for i, length in enumerate((5, 30, 1, 17, 12, 9, 26, 3))}
    sampling = {"temperature": temperature, "seed": 7, "max_tokens": 18, "ignore_eos": True}
    for request_id, prompt in prompts.items():
        core.send(request_id, prompt, **sampling)
        step(core)
    core.run()
    assert {i: core.tokens(i) for i in prompts} == {
        i: answer_alone(prompt, **sampling) for i, prompt in prompts.items()
    }
    assert core.load().num_held_blocks == 0
    assert (core.load().num_preemptions > 0) is (design(name).scheduler.preempt_policy != "none"), "the trace is tight"


@pytest.mark.parametrize(("name", "computed"), [("S1", 8), ("S2", 8), ("S3", 4), ("S4", 4), ("S5", 4)])
def test_a_repeated_prompt_is_computed_anew_where_the_design_has_no_prefix_cache(name: str, computed: int) -> None:
    core = core_of(name)
    core.send("once", [1] * 8, max_tokens=1)
    core.run()
    core.send("again", [1] * 8, max_tokens=1)
    assert chunks(step(core)) == [("again", computed)]


# --- each design's own examples -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Example:
    """A row of a table in DESIGNS.md."""

    design: str
    settings: str
    num_decoding: int
    prompts: tuple[int, ...]
    steps: tuple[str, ...]
    """The chunks and decode rows of each step as the table writes them, in order."""
    is_whole: bool
    """Whether the steps are all that it takes to compute the prompts."""

    def __str__(self) -> str:
        return f"{self.design} {self.prompts} {self.settings}"

    def config(self) -> EngineConfig:
        engine = copy.deepcopy(snippets()[self.design]["engine"])
        for name, value in yaml.safe_load("\n".join(re.findall("`(.+?)`", self.settings)) or "{}").items():
            *section, name = name.split(".")
            assert section in ([], ["scheduler"])
            (engine["scheduler"] if section else engine)[name] = value
        return TypeAdapter(EngineConfig).validate_python(engine)


def examples() -> list[Example]:
    text = (Path(engine.__file__).parent / "DESIGNS.md").read_text()
    found = []
    for name, section in re.findall(r"^## (S\d)((?:(?!^## ).)*)", text, flags=re.DOTALL | re.MULTILINE):
        for line in re.findall(r"^\|(.*)\|$", section, flags=re.MULTILINE):
            settings, decoding, prompts, steps = (cell.strip() for cell in line.split("|"))
            if decoding.isdigit():
                listed = steps.removesuffix("; …")
                expanded = tuple(step for part in listed.split("; ") for step in _repeated(part))
                lengths = tuple(int(length) for length in prompts.split(", "))
                found.append(Example(name, settings, int(decoding), lengths, expanded, listed == steps))
    return found


def _repeated(part: str) -> list[str]:
    count, _, step = part.rpartition(" × ")
    return [step] * int(count or 1)


def written(plan: StepPlan) -> str:
    rows = len(decodes(plan))
    return ", ".join([*map(str, sizes(plan)), *([f"{rows}d"] if rows else [])])


def test_every_design_has_examples() -> None:
    assert sorted({example.design for example in examples()}) == DESIGNS


@pytest.mark.parametrize("example", examples(), ids=str)
def test_a_design_gives_its_own_examples(example: Example) -> None:
    """Run the snippet as it is written, except for what the example changes and the memory of the machine."""
    asked = example.config()
    longest = asked.max_model_len or 2**17
    core = core_from(replace(asked, max_model_len=longest, num_kv_blocks=2**18 // asked.block_size))
    for number in range(example.num_decoding):
        core.send(f"stream {number}", [31 - number] * 64, max_tokens=60, ignore_eos=True)
    for _ in range(example.num_decoding):  # they share a step, unless its budget is small
        step(core)
    names = [f"prompt {number}" for number in range(len(example.prompts))]
    for number, (name, length) in enumerate(zip(names, example.prompts, strict=True)):
        core.send(name, [number + 1] * length, max_tokens=1)
    plans = [step(core) for _ in example.steps]
    assert [written(plan) for plan in plans] == list(example.steps)
    if example.is_whole:
        assert all(
            core.finished(name).usage.prompt_tokens == len_ for name, len_ in zip(names, example.prompts, strict=True)
        )


# --- S1 --------------------------------------------------------------------------------------------------------------


def test_s1_every_step_carries_all_decode_rows_and_the_whole_prefill_budget_beside_them() -> None:
    core = core_of("S1", max_prefill_tokens=16, max_num_batched_tokens=24)
    for name in ("a", "b", "c"):
        core.send(name, [1, 2], max_tokens=30, ignore_eos=True)
    step(core)
    core.send("long", [3] * 100, max_tokens=1)
    core.send("next", [4] * 20, max_tokens=1)
    plans = [step(core) for _ in range(8)]
    assert all(decodes(plan) == ["a", "b", "c"] for plan in plans)
    assert [chunks(plan) for plan in plans[:6]] == [[("long", 16)]] * 6
    assert [chunks(plan) for plan in plans[6:]] == [[("long", 4), ("next", 12)], [("next", 8)]]


def test_s1_a_request_that_does_not_fit_for_life_blocks_those_behind_it_and_nobody_is_preempted() -> None:
    """S1-B11, B13."""
    core = core_of("S1", num_kv_blocks=10)
    core.send("runs", [1] * 8, max_tokens=17, ignore_eos=True)  # 24 positions: 6 blocks
    core.send("large", [2] * 8, max_tokens=13, ignore_eos=True)  # 5 blocks
    core.send("small", [3] * 2, max_tokens=2)
    assert chunks(step(core)) == [("runs", 8)]
    while core.has_work:
        step(core)
    firsts = list(dict.fromkeys(row.request_id for plan in core.plans for row in plan.rows))
    assert firsts == ["runs", "large", "small"]
    assert core.load().num_preemptions == 0


# --- S2 --------------------------------------------------------------------------------------------------------------


def test_s2_spends_one_budget_on_decode_rows_first_and_on_ready_prompts_after_them() -> None:
    """S2-B3, B4: terminal rows sample, others return nothing."""
    core = core_of("S2", max_num_batched_tokens=16, max_num_seqs=8)
    for name in ("a", "b", "c"):
        core.send(name, [1, 2], max_tokens=30, ignore_eos=True)
    step(core)
    core.send("long", [3] * 30, max_tokens=1)
    core.send("next", [4] * 9, max_tokens=1)
    plans = [step(core) for _ in range(3)]
    assert [chunks(plan) for plan in plans] == [[("long", 13)], [("long", 13)], [("long", 4), ("next", 9)]]
    assert all(plan.num_tokens == 16 and decodes(plan) == ["a", "b", "c"] for plan in plans)
    assert [kind_of(plan, "long") for plan in plans] == [RowKind.MIDDLE, RowKind.MIDDLE, RowKind.LAST]
    assert all(row.sampling is None for plan in plans for row in plan.rows if row.kind is RowKind.MIDDLE)


def kind_of(plan: StepPlan, request_id: str) -> RowKind:
    return next(row.kind for row in plan.rows if row.request_id == request_id)


def test_s2_a_last_chunk_of_one_token_is_not_a_decode_row() -> None:
    """S2-R4."""
    core = core_of("S2", max_num_batched_tokens=8, max_num_seqs=4)
    core.send("a", [1] * 9, max_tokens=2)
    assert [(chunks(plan), kind_of(plan, "a")) for plan in (step(core), step(core))] == [
        ([("a", 8)], RowKind.MIDDLE),
        ([("a", 1)], RowKind.LAST),
    ]


def test_s2_full_seats_leave_prefill_a_token_and_a_config_in_which_they_would_not_is_refused() -> None:
    """S2-R14: 3,000 decode rows at a budget of 2,048 starved prefill, and always the same rows were dropped."""
    with pytest.raises(ConfigError, match=r"max_num_batched_tokens \(2048\) must be at least max_num_seqs \+ 1"):
        replace(design("S2"), max_num_seqs=3000)
    core = core_of("S2", max_num_batched_tokens=9, max_num_seqs=8)
    for i in range(7):
        core.send(f"d{i}", [i + 1], max_tokens=40, ignore_eos=True)
    step(core)
    core.send("p", [9] * 6, max_tokens=1)
    plans = [step(core) for _ in range(3)]
    assert [(len(decodes(plan)), sizes(plan)) for plan in plans] == [(7, [2])] * 3


def test_s2_a_request_that_does_not_fit_is_passed_by() -> None:
    core = core_of("S2", num_kv_blocks=12)
    core.send("runs", [1] * 24, max_tokens=8, ignore_eos=True)
    step(core)
    core.send("large", [2] * 30, max_tokens=1)
    core.send("small", [3] * 4, max_tokens=1)
    assert chunks(step(core)) == [("small", 4)]


def test_s2_starts_what_fits_now_and_takes_memory_from_the_latest_arrival_which_keeps_its_place() -> None:
    core = core_of("S2", num_kv_blocks=8, max_num_seqs=3, max_num_batched_tokens=64)
    for i, (name, length) in enumerate({"a": 8, "long": 12, "last": 8, "waits": 4}.items()):
        core.send(name, [i + 1] * length, max_tokens=8, ignore_eos=True)
    assert sizes(step(core)) == [8, 12, 8]
    while not core.load().num_preemptions:
        step(core)
    assert core.waiting == ["last", "waits"]


# --- S3 --------------------------------------------------------------------------------------------------------------


def test_s3_a_long_prompt_shares_budget_and_queue_and_decoding_never_waits_for_it() -> None:
    """S3-B1; and deliberately not S3-B6: upstream's decode rows wait while such a prompt is computed."""
    core = core_of("S3", max_prefill_tokens=16, max_num_batched_tokens=24)
    core.send("stream", [1, 2], max_tokens=30, ignore_eos=True)
    step(core)
    core.send("echo", [3] * 40, max_tokens=1)
    core.send("next", [4] * 20, max_tokens=1)
    plans = [step(core) for _ in range(4)]
    assert [sizes(plan) for plan in plans] == [[16], [16], [8, 8], [12]]
    assert all(decodes(plan) == ["stream"] for plan in plans)


def test_s3_a_smaller_request_overtakes_one_that_does_not_fit_for_life_and_a_prefix_is_computed_once() -> None:
    core = core_of("S3", num_kv_blocks=10)
    core.send("runs", [1] * 8, max_tokens=17, ignore_eos=True)
    core.send("large", [2] * 8, max_tokens=13, ignore_eos=True)
    core.send("small", [3] * 8, max_tokens=2)
    assert chunks(step(core)) == [("runs", 8), ("small", 8)]
    core.run()
    core.send("again", [2] * 8, max_tokens=1)
    assert chunks(step(core)) == [("again", 4)], "the last block never counts as a hit"
    assert core.load().num_preemptions == 0


# --- S4 --------------------------------------------------------------------------------------------------------------


def test_s4_a_step_is_prefill_or_decode_and_resumes_before_it_admits() -> None:
    """S4-B2, B10."""
    core = core_of("S4", max_num_batched_tokens=20, max_num_seqs=8)
    for name in ("a", "b"):
        core.send(name, [1, 2], max_tokens=30, ignore_eos=True)
    step(core)
    core.send("long", [3] * 38, max_tokens=1)
    core.send("next", [4] * 10, max_tokens=1)
    plans = [step(core) for _ in range(5)]
    assert [chunks(plan) for plan in plans] == [
        [("long", 20)],
        [("long", 18), ("next", 2)],
        [("next", 8)],
        [],
        [],
    ]
    assert [decodes(plan) for plan in plans] == [[], [], [], ["a", "b"], ["a", "b"]]


def test_s4_decoding_waits_no_longer_than_its_bound() -> None:
    """S4-R15: a long prompt held decoding up until all of it was computed."""
    core = core_of("S4", dict(decode_starve_ms=40), max_num_batched_tokens=9, max_num_seqs=8)
    core.send("a", [1, 2], max_tokens=30, ignore_eos=True)
    step(core)
    core.send("long", [3] * 160, max_tokens=1)
    kinds = "".join("d" if decodes(step(core)) else "p" for _ in range(16))
    assert max(len(run) for run in kinds.split("d")) == 4, kinds  # the clock ticks 10 ms a step


def test_s4_never_runs_more_requests_than_seats() -> None:
    """S4-R1."""
    core = core_of("S4", max_num_batched_tokens=64, max_num_seqs=4)
    for i in range(20):
        core.send(str(i), [i + 1] * 12, max_tokens=6, ignore_eos=True)
    while core.has_work:
        assert len(step(core).rows) <= 4
        assert core.load().num_running <= 4


def test_s4_takes_memory_from_the_latest_arrival_which_waits_at_the_front_with_its_answer_to_compute() -> None:
    """S4-B11, R9."""
    core = core_of("S4", num_kv_blocks=7, enable_prefix_caching=False)
    for i, name in enumerate(("a", "b", "c", "waits")):
        core.send(name, [i + 1] * 8, max_tokens=12, ignore_eos=True)
    while not core.load().num_preemptions:
        step(core)
    assert core.waiting == ["c", "waits"]
    answered = len(core.tokens("c"))
    core.run()
    _, again, *_ = [row for plan in core.plans for row in plan.rows if row.request_id == "c" and row.start == 0]
    assert (again.kind, again.end) == (RowKind.LAST, 8 + answered)


# --- S5 --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("ratio", "admitted"), [(0.7, [["a"], ["b"]]), (1.0, [["a"], []])])
def test_s5_admits_beside_the_share_of_running_answers_and_those_admitted_now_in_full(
    ratio: float, admitted: list[list[str]]
) -> None:
    """S5-B3 to B5. Beside a's prompt 13 blocks are free. In the first step a's 24 tokens count in full:
    2 + ceil(48 / 4) = 14 blocks. In the second they count by the share: 2 + ceil((24 + 23 * 0.7) / 4) = 13 blocks.
    By a share of 1, it would be 14."""
    core = core_of("S5", dict(ratio_init=ratio), num_kv_blocks=15, enable_prefix_caching=False)
    for i, name in enumerate(("a", "b")):
        core.send(name, [i + 1] * 8, max_tokens=24, ignore_eos=True)
    assert [[name for name, _ in chunks(step(core))] for _ in range(2)] == admitted


def test_s5_has_one_active_chunk_and_fills_the_rest_of_its_step() -> None:
    """S5-B1, R17."""
    core = core_of("S5", max_prefill_tokens=16, max_num_batched_tokens=32, max_num_seqs=8)
    for i, (name, length) in enumerate({"first": 36, "short": 5, "second": 30}.items()):
        core.send(name, [i + 1] * length, max_tokens=1)
    plans = [step(core) for _ in range(5)]
    assert [chunks(plan) for plan in plans] == [
        [("first", 16)],
        [("first", 16)],
        [("first", 4), ("short", 5), ("second", 4)],  # 7 are left, cut down to a block
        [("second", 16)],
        [("second", 10)],
    ]
    assert all(len(partials(plan)) <= 1 for plan in plans)


def test_s5_decodes_only_in_steps_without_prefill_and_only_those_lower_the_share() -> None:
    """S5-B8, B12."""
    core = core_of("S5", max_prefill_tokens=8, max_num_batched_tokens=32, max_num_seqs=8)
    core.send("a", [1, 2], max_tokens=30, ignore_eos=True)
    step(core)
    core.send("long", [3] * 24, max_tokens=1)
    seen = []
    for _ in range(4):
        plan = step(core)
        seen.append((len(sizes(plan)), len(decodes(plan)), core.load().reserve_ratio < 0.7))
    assert seen == [(1, 0, False), (1, 0, False), (1, 0, False), (0, 1, True)]


def test_s5_retracts_the_shortest_answer_then_the_longest_prompt_and_puts_it_behind_all_who_wait() -> None:
    """S5-B10, B11, B13."""
    core = core_of("S5", dict(reserve_clip=1), num_kv_blocks=12, enable_prefix_caching=False, max_num_seqs=3)
    for i, (name, length) in enumerate({"elder": 8, "short prompt": 8, "long prompt": 12, "waits": 4}.items()):
        core.send(name, [i + 1] * length, max_tokens=20, ignore_eos=True)
    while not core.load().num_preemptions:
        step(core)
    assert core.waiting == ["waits", "long prompt"]
    used = sum(len(core.tokens(name)) - 1 for name in ("elder", "short prompt"))  # before this step's tokens
    assert core.load().reserve_ratio == min((used + 20 * 2) / (2 * 20 + 1), 1.0)

"""Owns the promise that a recurrent state is that of its request's own tokens, wherever and however often it is moved.
Never uses bfloat16 where two orders of addition may flip a near tie."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Collection
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.config import ResolvedConfig, SchedulerConfig, SpeculativeConfig
from engine.core.core import EngineCore
from engine.execution.executor import TorchExecutor
from engine.protocol import Failed, SamplingParams, Submission, Token
from engine.scheduling.request import Request, create_request
from engine.step import StepPlan
from tests.golden.bench import Bench
from tests.golden.models import make_executor
from tests.golden.test_families import GREEDY, NEW_TOKENS, PROMPTS
from tests.support.compiler import needs_compiler
from tests.support.tiny_models import HYBRIDS, RENAMED, VOCAB, edit_config, greedy_answer, save_model

STRIDE = 16
SNAPSHOTS = SchedulerConfig(state_snapshot_tokens=STRIDE)
LONG_PROMPT = torch.randint(0, VOCAB, (273,), generator=torch.Generator().manual_seed(4)).tolist()


class Hybrid(Bench):
    """The bench of one family; `copies` counts the copies of states that its plans ask for."""

    def __init__(self, kind: str, directory: Path, kernels: str) -> None:
        model = save_model(kind, directory)
        self.want = [greedy_answer(model, prompt, NEW_TOKENS) for prompt in PROMPTS]
        executor, resolved = make_executor(directory, "float32", num_threads=1, scheduler=SNAPSHOTS, kernels=kernels)
        super().__init__(executor, resolved, PROMPTS)
        self.copies: Counter[str] = Counter()
        launch = executor.launch

        def counted(plan: StepPlan) -> None:
            uses = [row.state for row in plan.rows if row.state is not None]
            self.copies["move"] += len(plan.state_moves)
            self.copies["restore"] += sum(use.restore is not None for use in uses)
            self.copies["save"] += sum(use.save is not None for use in uses)
            launch(plan)

        executor.launch = counted  # type: ignore[method-assign]


SLOW = pytest.mark.slow
NATIVE = [
    pytest.param((kind, "native"), id=kind, marks=[needs_compiler, *[SLOW] * (kind in RENAMED)]) for kind in HYBRIDS
]
TORCH = [pytest.param((kind, "torch_cpu"), id=f"{kind} torch_cpu", marks=SLOW) for kind in ("qwen3_next", "qwen3_5")]
"""Plans are the same, and tests/engine/models/test_recurrent_state.py holds copies of states by both kernels."""


@pytest.fixture(scope="module", params=[*NATIVE, *TORCH])
def hybrid(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Hybrid:
    kind, kernels = request.param
    return Hybrid(kind, tmp_path_factory.mktemp(kind), kernels)


@pytest.fixture(autouse=True)
def _counted_anew(request: pytest.FixtureRequest) -> None:
    if "hybrid" in request.fixturenames:
        request.getfixturevalue("hybrid").copies.clear()


@pytest.mark.parametrize("overlap", [False, True])
def test_text_is_the_same_when_slots_are_handed_on(hybrid: Hybrid, overlap: bool) -> None:
    """The first to finish has slot 0, and the last slot's request takes its place (S1-B3)."""
    prompts = [PROMPTS[3], PROMPTS[0], PROMPTS[2], PROMPTS[1]]
    want = [hybrid.want[3], hybrid.want[0], hybrid.want[2], hybrid.want[1]]
    settings = {"max_num_batched_tokens": 24, "max_prefill_tokens": 24, "max_num_seqs": 3, "overlap": overlap}
    assert hybrid.serve(prompts, GREEDY, enable_prefix_caching=False, **settings) == want
    assert hybrid.copies["move"] > 0


def test_a_hit_starts_from_the_snapshot_of_its_prefix_and_nowhere_else(hybrid: Hybrid) -> None:
    """Another prompt has the same first 50 tokens: KV and state are hit together, at 48."""
    other = PROMPTS[0][:50] + PROMPTS[1]
    (want,) = hybrid.serve([other], GREEDY, enable_prefix_caching=False)
    hybrid.copies.clear()
    hybrid.cached.clear()
    texts = hybrid.serve([PROMPTS[0], other], GREEDY, max_num_seqs=1)
    assert texts == [hybrid.want[0], want]
    assert hybrid.cached == {"0": 0, "1": 48}
    assert hybrid.copies["restore"] == 1
    assert hybrid.copies["save"] > 50 // STRIDE


def test_without_a_snapshot_there_is_no_hit(hybrid: Hybrid) -> None:
    plain = dataclasses.replace(hybrid.resolved.scheduler, state_snapshot_tokens=0)
    assert hybrid.serve(PROMPTS, GREEDY, rounds=2, scheduler=plain) == hybrid.want
    assert set(hybrid.cached.values()) == {0}


def test_text_is_the_same_with_so_few_snapshots_that_they_are_overwritten_all_the_time(hybrid: Hybrid) -> None:
    few = dataclasses.replace(hybrid.resolved.scheduler, state_snapshots=2)
    budget = {"max_num_batched_tokens": 20, "max_prefill_tokens": 20, "max_num_seqs": 3}
    assert hybrid.serve(PROMPTS, GREEDY, rounds=3, scheduler=few, **budget) == hybrid.want
    assert hybrid.copies["save"] > 2


@pytest.mark.parametrize("how", ["lifo", "retract"])
def test_a_preempted_request_goes_on_from_a_snapshot(hybrid: Hybrid, how: str) -> None:
    policy = dataclasses.replace(
        SNAPSHOTS, reserve_mode="prompt", preempt_policy=how, watermark_blocks=0, requeue="front"
    )
    prompts = [PROMPTS[1], PROMPTS[0][:30], PROMPTS[2]]
    want = [hybrid.serve([prompt], GREEDY, enable_prefix_caching=False)[0] for prompt in prompts]
    hybrid.copies.clear()
    budget = {"max_num_batched_tokens": 24, "max_prefill_tokens": 24, "max_num_seqs": 3}
    assert hybrid.serve(prompts, GREEDY, num_kv_blocks=6, scheduler=policy, **budget) == want
    assert hybrid.preemptions > 0
    assert hybrid.copies["restore"] > 0


def test_sampled_text_depends_on_the_seed_only(hybrid: Hybrid) -> None:
    params = SamplingParams(temperature=0.9, top_p=0.95, seed=5, max_tokens=12, ignore_eos=True)
    alone = [hybrid.serve([prompt], params, enable_prefix_caching=False)[0] for prompt in PROMPTS]
    budget = {"max_num_batched_tokens": 7, "max_prefill_tokens": 7, "max_num_seqs": 4}
    assert hybrid.serve(PROMPTS, params, rounds=2, **budget) == alone


@pytest.mark.parametrize(
    ("kind", "kernels"),
    [
        *(pytest.param(*param.values[0], id=param.id, marks=param.marks) for param in NATIVE),
        ("qwen3_next", "torch_cpu"),
        *(pytest.param(kind, "torch_cpu", marks=SLOW) for kind in HYBRIDS if kind != "qwen3_next"),
    ],
)
def test_a_budget_of_4_and_a_whole_prompt_of_273_tokens_give_the_same_text(
    kind: str, kernels: str, tmp_path: Path
) -> None:
    """S1-N5. By torch's operators the whole prompt is solved as 5 systems of equations, the last one of 17 tokens;
    with a budget of 4 it is 69."""
    want = greedy_answer(save_model(kind, tmp_path), LONG_PROMPT, NEW_TOKENS)
    edit_config(tmp_path, max_position_embeddings=512)
    bench = Bench(*make_executor(tmp_path, "float32", num_threads=1, kernels=kernels), [LONG_PROMPT])
    texts = {}
    for tokens in (4, 512):
        budget = {"max_num_batched_tokens": tokens, "max_prefill_tokens": tokens, "max_num_seqs": 2}
        (texts[tokens],) = bench.serve([LONG_PROMPT], GREEDY, enable_prefix_caching=False, **budget)
        assert bench.steps >= 273 // tokens
    assert bytes(texts[4]) == bytes(texts[512]) == bytes(want)


# --- random lives -----------------------------------------------------------------------------------------------------

SHARED = PROMPTS[0]
TEXTS = [SHARED, SHARED[:50] + PROMPTS[1], SHARED[:33], PROMPTS[1], SHARED[:64] + PROMPTS[3], PROMPTS[2]]
"""Several begin alike, and one is the beginning of others."""


@pytest.fixture(scope="module")
def alone(hybrid: Hybrid) -> list[list[int]]:
    return [hybrid.serve([text], GREEDY, enable_prefix_caching=False)[0] for text in TEXTS]


class Guesses:
    """Drafts that are right, or wrong from some token on. They replace those of prompt lookup."""

    method = "suffix"

    def __init__(self, texts: list[list[int]]) -> None:
        """`texts` are what the requests will answer."""
        self._texts = texts
        self._made = 0
        self.judged: Counter[tuple[int, int]] = Counter()

    def propose(self, decoding: Collection[Request]) -> list[tuple[Request, tuple[int, ...]]]:
        found = []
        for request in decoding:
            drafts = self._texts[int(request.request_id)][request.num_output :][:3]
            self._made += 1
            if (wrong := self._made % 5) < len(drafts):
                drafts[wrong] = (drafts[wrong] + 1) % VOCAB
            found.append((request, tuple(drafts)))
        return found

    def judge(self, request: Request, num_drafted: int, num_accepted: int) -> None:
        self.judged[num_drafted, num_accepted] += 1

    def forget(self, request_id: str) -> None:
        pass


DRAFTING = {"num_speculative_tokens": 3, "speculative": SpeculativeConfig(method="suffix", num_tokens=3, free_tokens=8)}


@pytest.mark.parametrize("tokens", [9, 24, 512])
def test_text_with_drafts_is_that_without(hybrid: Hybrid, alone: list[list[int]], tokens: int) -> None:
    """Drafts are right, or wrong from the first, second or third on; beside chunks, in slots that are handed on, from
    snapshots and from the start."""
    config = dataclasses.replace(
        hybrid.resolved, max_num_batched_tokens=tokens, max_prefill_tokens=tokens, max_num_seqs=2, **DRAFTING
    )
    guesses = Guesses([alone[which] for which in (0, 1, 2, 3, 4, 5, 0)])
    texts = live(
        hybrid.executor, config, [(which, number, None) for number, which in enumerate([*range(6), 0])], guesses
    )
    assert list(texts.values()) == [*alone, alone[0]]
    assert {(3, 3), (3, 2), (3, 1), (3, 0)} <= guesses.judged.keys()
    assert min(hybrid.copies[what] for what in ("move", "restore", "save")) > 0


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_no_life_changes_a_text(hybrid: Hybrid, alone: list[list[int]], data: st.DataObject) -> None:
    """I-1, I-9: any budget, memory that runs out, few snapshots, a step in flight, arrivals and aborts at any time."""
    tokens = data.draw(st.sampled_from([4, 7, 24, 200]), label="budget")
    scheduler = dataclasses.replace(
        hybrid.resolved.scheduler,
        state_snapshot_tokens=data.draw(st.sampled_from([0, STRIDE, 2 * STRIDE]), label="stride"),
        state_snapshots=data.draw(st.sampled_from([1, 3, 64]), label="snapshots"),
        reserve_mode=data.draw(st.sampled_from(["ratio", "prompt"]), label="reserve"),
        preempt_policy=data.draw(st.sampled_from(["lifo", "retract"]), label="preempt"),
        watermark_blocks=0,
        chunk_align=data.draw(st.sampled_from([None, 1]), label="align"),
    )
    loop = data.draw(st.sampled_from(["plain", "overlap", "drafts", "drafts"]), label="loop")
    config = dataclasses.replace(
        hybrid.resolved,
        scheduler=scheduler,
        num_kv_blocks=data.draw(st.sampled_from([8, 12, 160]), label="blocks"),
        overlap=loop == "overlap",
        drafting_limit=tokens - 1,
        max_num_batched_tokens=tokens,
        max_prefill_tokens=tokens,
        max_num_seqs=min(3, tokens - 1),
        **DRAFTING if loop == "drafts" else {},
    )
    lives = [
        (
            data.draw(st.integers(0, len(TEXTS) - 1)),
            data.draw(st.integers(0, 20)),
            data.draw(st.sampled_from([None, None, 9])),
        )
        for _ in range(7)
    ]
    guesses = Guesses([alone[which] for which, _, _ in lives]) if loop == "drafts" else None
    texts = live(hybrid.executor, config, lives, guesses)
    for number, (which, _, abort) in enumerate(lives):
        assert texts[number] == alone[which] if abort is None else alone[which][: len(texts[number])] == texts[number]


def live(
    executor: TorchExecutor,
    config: ResolvedConfig,
    lives: list[tuple[int, int, int | None]],
    guesses: Guesses | None = None,
) -> dict[int, list[int]]:
    """Return what requests answer. Each of `lives` is (which text, the step of its arrival,
    how many steps until it is aborted)."""
    core = EngineCore(executor, config)
    if guesses is not None:
        core._speculation = core._applier._speculation = guesses  # type: ignore[assignment]
    texts: dict[int, list[int]] = {number: [] for number in range(len(lives))}
    step = 0
    while core.has_work or step <= 20:
        for number, (which, arrival, abort) in enumerate(lives):
            if arrival == step:
                submission = Submission(str(number), tuple(TEXTS[which]), GREEDY)
                assert not core.submit(create_request(submission, core.config, number))
            if abort is not None and arrival + abort == step:
                core.abort(str(number))
        for event in core.step() if core.has_work else ():
            assert not isinstance(event, Failed), event
            if isinstance(event, Token):
                texts[int(event.request_id)].append(event.token_id)
        step += 1
    return texts

"""Owns the executor's contract with recurrent states: where they are, when they are copied, and what is refused.
Never measures time; the golden tests compare texts with those of transformers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.build.executor import create_executor
from engine.config import ConfigError, EngineConfig, ResolvedConfig, SchedulerConfig, SpeculativeConfig
from engine.core.core import EngineCore
from engine.execution.device import LOST_STATE, StateLostError
from engine.execution.executor import TorchExecutor
from engine.models.config import read_model_config
from engine.models.kv_cache import bytes_per_block
from engine.models.recurrent_state import RecurrentState, bytes_per_slot
from engine.protocol import Failed, Finished, SamplingParams, Submission
from engine.scheduling.request import create_request
from engine.step import RowKind, ScheduledRequest, StateUse, StepPlan
from tests.support.compiler import needs_compiler
from tests.support.plans import chunk, decode, forced_logits, run
from tests.support.tiny_models import VOCAB, save_model

TOKENS = torch.randint(0, VOCAB, (70,), generator=torch.Generator().manual_seed(5)).tolist()
BLOCKS, OTHER_BLOCKS = (9, 3, 11, 0, 7), (1, 2, 4, 5, 6)
SNAPSHOTS = SchedulerConfig(state_snapshot_tokens=16, state_snapshots=3)
BYTES = 2 * (3 * 104 * 4 + 6 * 8 * 12 * 4)
"""The bytes of a state, of two layers in float32:
the past inputs of a convolution of 4 in 104 channels, and 6 matrices of 8 x 12."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("qwen3_5")
    save_model("qwen3_5", directory)
    return directory


def make(directory: Path, **settings: Any) -> tuple[TorchExecutor, ResolvedConfig]:
    engine = {"dtype": "float32", "num_kv_blocks": 12, "max_num_seqs": 4, "num_threads": 1}
    return create_executor(directory, EngineConfig(**engine | {"scheduler": SNAPSHOTS} | settings))


BOTH = [pytest.param("native", marks=needs_compiler), "torch_cpu"]


@pytest.fixture(params=BOTH)
def executor(checkpoint: Path, request: pytest.FixtureRequest) -> TorchExecutor:
    return make(checkpoint, kernels=request.param)[0]


def state_of(executor: TorchExecutor) -> RecurrentState:
    assert executor.model.state is not None
    return executor.model.state


def in_slot(row: ScheduledRequest, slot: int, **use: Any) -> ScheduledRequest:
    return row._replace(state=StateUse(slot, **use))


def follow(executor: TorchExecutor, prompt: list[int], blocks: tuple[int, ...], slot: int, count: int) -> list[int]:
    """Compute a prompt and its greedy answer, alone in a slot."""
    tokens = [*prompt, *run(executor, in_slot(chunk("a", prompt, 0, len(prompt), blocks), slot))[0]]
    while len(tokens) < len(prompt) + count:
        tokens += run(executor, in_slot(decode("a", tokens[-1], len(tokens) - 1, blocks), slot))[0]
    return tokens[len(prompt) :]


# --- memory -----------------------------------------------------------------------------------------------------------


def test_a_slot_is_as_large_as_it_is_said_to_be_and_blocks_are_of_layers_with_attention_alone(checkpoint: Path) -> None:
    executor, resolved = make(checkpoint)
    model, state = read_model_config(checkpoint), state_of(executor)
    assert bytes_per_slot(model, torch.float32) == BYTES
    assert state.conv.nbytes + state.delta.nbytes == BYTES * (4 + 3), "seats, and snapshots"
    assert bytes_per_block(model, 16, torch.float32) == 2 * 1 * 16 * 2 * 16 * 4, "one layer of three has K and V"
    assert bytes_per_slot(model, torch.bfloat16) == BYTES - 2 * 3 * 104 * 2, "the matrices stay in float32"
    assert f"{BYTES} bytes for each of 4 requests, and 3 snapshots, one every 16" in resolved.reasons["recurrent_state"]


def test_without_snapshots_none_is_allocated_and_the_start_says_that_there_are_no_prefix_hits(checkpoint: Path) -> None:
    executor, resolved = make(checkpoint, scheduler=SchedulerConfig())
    assert state_of(executor).delta.shape[1] == 4
    assert "no prefix hits: state_snapshot_tokens is 0" in resolved.reasons["recurrent_state"]


def test_states_are_of_the_memory_for_kv_and_what_they_leave_is_blocks(checkpoint: Path) -> None:
    block = 2 * 16 * 2 * 16 * 4
    _, resolved = make(checkpoint, num_kv_blocks=None, kv_cache_memory_gib=2**-10)
    assert resolved.num_kv_blocks == (2**20 - 7 * BYTES) // block
    assert f"less {7 * BYTES} bytes of recurrent state" in resolved.reasons["num_kv_blocks"]
    with pytest.raises(
        ConfigError, match=f"its recurrent states take {7 * BYTES} .* and one block .* takes {block} by"
    ):
        make(checkpoint, num_kv_blocks=None, kv_cache_memory_gib=2**-15)


def test_a_model_without_linear_attention_has_no_states(tmp_path: Path) -> None:
    save_model("llama", tmp_path)
    executor, resolved = make(tmp_path, scheduler=SchedulerConfig())
    assert executor.model.state is None
    assert not resolved.recurrent_state
    assert not executor.capabilities.recurrent_state
    assert "recurrent_state" not in resolved.reasons


# --- copies -----------------------------------------------------------------------------------------------------------


def numbered(executor: TorchExecutor) -> RecurrentState:
    """Fill the states of each slot and snapshot with its number."""
    state = state_of(executor)
    for states in (state.conv, state.delta):
        for place in range(states.shape[1]):
            states[:, place] = place
    return state


def numbers(state: RecurrentState) -> list[int]:
    """Return what each slot and snapshot holds, which is the same in all of its layers."""
    found = []
    for place in range(state.delta.shape[1]):
        values = {*state.conv[:, place].unique().tolist(), *state.delta[:, place].unique().tolist()}
        assert len(values) == 1, "half of a state was copied"
        found.append(int(values.pop()))
    return found


def test_moves_are_made_in_their_order_then_restores_and_saves_at_the_end(executor: TorchExecutor) -> None:
    state = numbered(executor)
    row = chunk("a", TOKENS, 16, 20, BLOCKS)
    plan = StepPlan(0, (in_slot(row, 1, restore=2), in_slot(row, 2, save=0)), state_moves=((3, 2), (2, 0)))
    state.place(plan)
    assert numbers(state) == [3, 6, 3, 3, 4, 5, 6]
    state.save(plan)
    assert numbers(state) == [3, 6, 3, 3, 3, 5, 6]


def test_moves_and_restores_are_made_even_if_the_step_then_fails(
    executor: TorchExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any) -> None:
        raise ValueError("no")

    state = numbered(executor)
    monkeypatch.setattr(executor.model, "forward", fails)
    row = in_slot(chunk("a", TOKENS, 16, 20, BLOCKS), 1, restore=2, save=0)
    with pytest.raises(ValueError, match="no"):
        executor.launch(StepPlan(0, (row,), state_moves=((3, 0),)))
    assert numbers(state) == [3, 6, 2, 3, 4, 5, 6], "and nothing is saved of it"


def test_a_row_from_0_starts_from_zeros_whatever_its_slot_holds(executor: TorchExecutor) -> None:
    want = forced_logits(executor, TOKENS, BLOCKS, 16)
    state = state_of(executor)
    state.conv.fill_(torch.nan)
    state.delta.fill_(torch.nan)
    assert torch.equal(forced_logits(executor, TOKENS, BLOCKS, 16), want)
    assert state.delta[:, 1:].isnan().all(), "no request has the other slots"


def test_a_moved_a_saved_and_a_restored_state_go_on_where_they_were(executor: TorchExecutor) -> None:
    want = follow(executor, TOKENS[:32], BLOCKS, 0, 5)
    run(executor, in_slot(chunk("a", TOKENS[:32], 0, 16, BLOCKS), 3, save=1))
    restored = in_slot(chunk("a", TOKENS[:32], 16, 32, BLOCKS), 2, restore=1)
    first = run(executor, restored)[0]
    executor.launch(StepPlan(0, (in_slot(decode("a", first[0], 32, BLOCKS), 0),), state_moves=((2, 0),)))
    assert [*first, *executor.collect().sampled[0]] == want[:2]


def test_rows_whose_slots_are_in_another_order_keep_their_own(executor: TorchExecutor) -> None:
    want = [follow(executor, TOKENS[:20], BLOCKS, 0, 3), follow(executor, TOKENS[20:50], OTHER_BLOCKS, 0, 3)]
    texts = [
        [*run(executor, in_slot(chunk("a", TOKENS[:20], 0, 20, BLOCKS), 2))[0]],
        [*run(executor, in_slot(chunk("b", TOKENS[20:50], 0, 30, OTHER_BLOCKS), 0))[0]],
    ]
    for step in range(2):
        one = in_slot(decode("a", texts[0][-1], 20 + step, BLOCKS), 2)
        other = in_slot(decode("b", texts[1][-1], 30 + step, OTHER_BLOCKS), 0)
        for text, tokens in zip(texts, run(executor, one, other), strict=True):
            text += tokens
    assert texts == want


# --- drafts -----------------------------------------------------------------------------------------------------------


def states_at(executor: TorchExecutor, slot: int) -> list[torch.Tensor]:
    state = state_of(executor)
    return [state.conv[:, slot].clone(), state.delta[:, slot].clone()]


@pytest.mark.parametrize("kernels", BOTH)
@pytest.mark.parametrize("num_right", [0, 1, 2, 3])
def test_after_drafts_a_state_is_that_of_the_tokens_that_count(checkpoint: Path, num_right: int, kernels: str) -> None:
    """The row is beside a row of one token, a row whose drafts are all wrong, and a chunk;
    slots are in another order."""
    executor, expected = (make(checkpoint, kernels=kernels)[0] for _ in "ab")
    texts = {
        "a": follow(expected, TOKENS[:20], BLOCKS, 0, 6),
        "b": follow(expected, TOKENS[20:50], OTHER_BLOCKS, 1, 6),
    }
    run(executor, in_slot(chunk("a", TOKENS[:20], 0, 20, BLOCKS), 2))
    run(executor, in_slot(chunk("b", TOKENS[20:50], 0, 30, OTHER_BLOCKS), 0))
    run(executor, in_slot(chunk("c", TOKENS[:5], 0, 5, (8,)), 3))
    wrong = [(token + 1) % VOCAB for token in texts["a"]]
    drafts = [*texts["a"][1 : 1 + num_right], *wrong[1 + num_right : 4]]
    rows = (
        in_slot(decode("c", 7, 5, (8,)), 3),
        in_slot(decode("a", texts["a"][0], 20, BLOCKS)._replace(token_ids=(texts["a"][0], *drafts)), 2),
        in_slot(decode("b", texts["b"][0], 30, OTHER_BLOCKS)._replace(token_ids=(texts["b"][0], VOCAB - 1)), 0),
        in_slot(chunk("d", TOKENS[50:], 0, 20, (10, 6)), 1),
    )
    sampled = run(executor, *rows)
    assert sampled[1] == tuple(texts["a"][1 : 2 + num_right])
    assert sampled[2] == (texts["b"][1],)
    # The same tokens, one at a time and alone.
    follow(expected, TOKENS[:20], BLOCKS, 0, 2 + num_right)
    follow(expected, TOKENS[20:50], OTHER_BLOCKS, 1, 2)
    run(expected, in_slot(chunk("c", TOKENS[:5], 0, 5, (8,)), 2))
    run(expected, in_slot(decode("c", 7, 5, (8,)), 2))
    run(expected, in_slot(chunk("d", TOKENS[50:], 0, 20, (10, 6)), 3))
    for slot, same in ((2, 0), (0, 1), (3, 2), (1, 3)):
        for got, want in zip(states_at(executor, slot), states_at(expected, same), strict=True):
            torch.testing.assert_close(got, want, atol=2e-5, rtol=2e-5)


def test_a_step_whose_drafts_are_all_right_computes_nothing_again(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor = make(checkpoint, kernels="torch_cpu")[0]
    text = follow(executor, TOKENS[:20], BLOCKS, 0, 4)
    run(executor, in_slot(chunk("a", TOKENS[:20], 0, 20, BLOCKS), 0))
    ops, calls = executor.model._ops, []  # type: ignore[attr-defined]

    def counted(*inputs: Any) -> torch.Tensor:
        calls.append(len(inputs[0]))
        return ops.delta_rule(*inputs)

    monkeypatch.setattr(executor.model, "_ops", replace(ops, delta_rule=counted))
    right = decode("a", text[0], 20, BLOCKS)._replace(token_ids=tuple(text[:3]))
    assert run(executor, in_slot(right, 0)) == (tuple(text[1:4]),)
    assert calls == [3, 3], "two layers of three tokens"
    calls.clear()
    wrong = decode("a", text[3], 23, BLOCKS)._replace(token_ids=(text[3], VOCAB - 1, VOCAB - 1))
    assert len(run(executor, in_slot(wrong, 0))[0]) == 1
    assert calls == [3, 3, 1, 1], "and the accepted ones again, without the rest of the model"


# --- what is refused --------------------------------------------------------------------------------------------------


def test_two_rows_of_one_slot_are_refused_before_anything_is_computed(executor: TorchExecutor) -> None:
    before = [state.clone() for state in states_at(executor, 1)]
    rows = (chunk("a", TOKENS, 0, 20, BLOCKS), chunk("b", TOKENS, 0, 20, OTHER_BLOCKS))
    with pytest.raises(ValueError, match=r"rows share a slot of states, \[1, 1\]"):
        executor.launch(StepPlan(1, tuple(in_slot(row, 1) for row in rows)))
    assert all(torch.equal(*states) for states in zip(states_at(executor, 1), before, strict=True))
    assert run(executor, *(in_slot(row, slot) for slot, row in enumerate(rows))) == ((), ())


def test_a_plan_that_says_nothing_of_states_is_refused(executor: TorchExecutor) -> None:
    row = chunk("a", TOKENS, 0, 20, BLOCKS)
    for bad, message in (
        (row, "state None, and there are 4 slots"),
        (in_slot(row, 4), r"state StateUse\(slot=4.*and there are 4 slots"),
    ):
        with pytest.raises(ValueError, match=message):
            run(executor, bad)


def test_adapters_are_refused_by_name(checkpoint: Path) -> None:
    with pytest.raises(ConfigError, match="has linear attention: adapters are not computed for linear attention"):
        make(checkpoint, max_loras=1)


def test_what_a_grammar_forces_is_drafted_by_default_and_looked_up_drafts_where_they_are_asked_for(
    checkpoint: Path,
) -> None:
    _, resolved = make(checkpoint, kernels="torch_cpu")
    assert resolved.num_speculative_tokens == 4
    assert resolved.speculative.method == "none"
    assert resolved.reasons["speculative"].startswith("none: these kernels' sums depend on how many rows a step has")
    EngineCore(*make(checkpoint, kernels="torch_cpu", speculative=SpeculativeConfig(method="suffix")))


@needs_compiler
def test_the_native_kernels_are_chosen_which_give_the_same_bits_in_any_batch(checkpoint: Path) -> None:
    _, resolved = make(checkpoint, batch_invariant=True)
    assert resolved.kernels == "native"
    assert resolved.speculative.method == "suffix"


def test_a_step_without_memory_fails_its_own_requests_and_is_not_run_again(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of the layers may have advanced their states in place, and a second run would advance those twice."""
    executor, resolved = make(checkpoint)
    core = EngineCore(executor, resolved)
    forward, calls = executor.model.forward, []

    def out_of_memory_once(plan: StepPlan, newest: Any) -> Any:
        computed = forward(plan, newest)
        calls.append([row.request_id for row in plan.rows])
        if len(calls) == 1:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes")
        return computed

    monkeypatch.setattr(executor.model, "forward", out_of_memory_once)
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    assert not core.submit(create_request(Submission("a", tuple(TOKENS[:20]), params), core.config, 0))
    events = core.step()
    assert not core.submit(create_request(Submission("b", tuple(TOKENS[:20]), params), core.config, 1))
    while core.has_work:
        events += core.step()
    ends = {event.request_id: event for event in events if isinstance(event, Failed | Finished)}
    assert isinstance(ends["a"], Failed)
    assert isinstance(ends["b"], Finished)
    assert calls[0] == ["a"]
    assert ["a"] not in calls[1:]


def test_a_want_of_memory_says_that_states_are_lost(executor: TorchExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_memory(*_: Any) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes")

    monkeypatch.setattr(executor.model, "forward", no_memory)
    with pytest.raises(StateLostError, match=LOST_STATE):
        executor.launch(StepPlan(0, (in_slot(chunk("a", TOKENS, 0, 20, BLOCKS), 0),)))


def test_rows_of_a_plan_are_decoded_chunks_or_both(executor: TorchExecutor) -> None:
    """Each row gets beside the others what it gets alone."""
    want = follow(executor, TOKENS[:20], BLOCKS, 0, 2)
    other = run(executor, in_slot(chunk("b", TOKENS[20:50], 0, 30, OTHER_BLOCKS), 1))
    first = run(executor, in_slot(chunk("a", TOKENS[:20], 0, 20, BLOCKS), 0))
    rows = (
        in_slot(decode("a", first[0][0], 20, BLOCKS), 0),
        in_slot(chunk("b", TOKENS[20:50], 0, 30, OTHER_BLOCKS), 1),
    )
    assert rows[0].kind is RowKind.DECODE
    assert run(executor, *rows) == ((want[1],), other[0])


@pytest.mark.parametrize("kind", ["qwen3_next", "qwen3_5"])
def test_weights_that_are_made_up_give_finite_logits(kind: str, tmp_path: Path) -> None:
    """Benchmarks run on such weights: decays must not overflow, and no tensor may be left unfilled."""
    save_model(kind, tmp_path)
    executor, _ = make(tmp_path, load_format="dummy")
    logits = forced_logits(executor, TOKENS, BLOCKS, 16)
    assert logits.isfinite().all()
    assert logits.std() > 0.1

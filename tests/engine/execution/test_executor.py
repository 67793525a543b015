"""Owns the executor's contract at the seam, on tiny checkpoints that transformers computes too. Long: each kind of row.
Never measures time; the golden tests compare the default model with recorded tolerances."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from engine.batch.inputs import build_inputs
from engine.batch.row_order import NO_LOGIT
from engine.batch.sampler import uniform
from engine.build.end_tokens import end_tokens
from engine.build.executor import create_executor
from engine.config import ConfigError, EngineConfig, SchedulerConfig
from engine.execution.answers import LOST_TOKEN
from engine.execution.executor import TorchExecutor
from engine.models.weights import CheckpointError
from engine.step import (
    DRAFT_TOKEN,
    PENDING_TOKEN,
    Capabilities,
    ExecutorOutOfMemoryError,
    LogitControls,
    PromptScoring,
    RowKind,
    RowSampling,
    ScheduledRequest,
    StateUse,
    StepPlan,
)
from kernels import reference
from tests.support.compiler import needs_compiler
from tests.support.plans import chunk, decode, forced_logits, forced_logits_together, greedy, greedy_text, run
from tests.support.tiny_models import KINDS, VOCAB, edit_config, save_model

TOKENS = torch.randint(0, VOCAB, (70,), generator=torch.Generator().manual_seed(5)).tolist()
BLOCKS = (9, 3, 11, 0, 7)
OTHER_BLOCKS = (1, 2, 4, 5, 6)


def make(directory: Path, **settings: Any) -> TorchExecutor:
    return create_executor(directory, EngineConfig(**{"dtype": "float32", "num_kv_blocks": 12} | settings))[0]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("llama")
    save_model("llama", directory)
    return directory


@pytest.fixture
def executor(checkpoint: Path) -> Iterator[TorchExecutor]:
    executor = make(checkpoint)
    yield executor
    executor.shutdown()


@pytest.mark.parametrize("kind", KINDS)
def test_logits_equal_transformers_for_every_family_and_chunk_size(kind: str, tmp_path: Path) -> None:
    model = save_model(kind, tmp_path)
    with torch.inference_mode():
        want = model(torch.tensor([TOKENS])).logits[0].float()
    executor = make(tmp_path, num_threads=1)
    for size in (1, 4, 16, 17, None):
        torch.testing.assert_close(forced_logits(executor, TOKENS, BLOCKS, size), want, atol=2e-4, rtol=1e-4)
    sequences, tables = [TOKENS, TOKENS[:33]], [BLOCKS, OTHER_BLOCKS]
    for got, tokens in zip(forced_logits_together(executor, sequences, tables, 16), sequences, strict=True):
        torch.testing.assert_close(got, want[: len(tokens)], atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize(("settings", "length"), [({}, 60), ({"max_model_len": 256}, 70)])
def test_longrope_is_the_model_of_short_texts_unless_longer_ones_are_asked_for(
    tmp_path: Path, settings: dict[str, int], length: int
) -> None:
    """transformers chooses by each text's length.
    Here that would compute a cached prefix in one way and use it in another."""
    model = save_model("phi3_long", tmp_path)
    with torch.inference_mode():
        want = model(torch.tensor([TOKENS[:length]])).logits[0].float()
    executor, resolved = create_executor(tmp_path, EngineConfig(dtype="float32", num_kv_blocks=12, **settings))
    assert resolved.max_model_len == settings.get("max_model_len", 64)
    torch.testing.assert_close(forced_logits(executor, TOKENS[:length], BLOCKS, 16), want, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("kind", "kernels"),
    [
        ("gemma3", "torch_cpu"),
        ("gemma3", "reference"),
        ("phi3", "torch_cpu"),
        ("qwen2_window", "torch_cpu"),
        ("qwen3_moe", "torch_cpu"),
        ("mixtral", "torch_cpu"),
        ("qwen3_next", "torch_cpu"),
        ("qwen3_5_moe", "torch_cpu"),
        ("qwen3_next", "reference"),
        ("qwen3_5", "reference"),
    ],
)
def test_torch_and_reference_kernels_equal_transformers_too(kind: str, kernels: str, tmp_path: Path) -> None:
    model = save_model(kind, tmp_path)
    with torch.inference_mode():
        want = model(torch.tensor([TOKENS])).logits[0].float()
    executor = make(tmp_path, kernels=kernels, num_threads=1)
    for size in (1, 17, None):
        torch.testing.assert_close(forced_logits(executor, TOKENS, BLOCKS, size), want, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("kernels", [pytest.param("native", marks=needs_compiler), "torch_cpu", "reference"])
def test_all_kernels_compute_the_same_model(checkpoint: Path, kernels: str) -> None:
    fast = forced_logits(make(checkpoint), TOKENS, BLOCKS, 16)
    executor, resolved = create_executor(checkpoint, EngineConfig(dtype="float32", num_kv_blocks=12, kernels=kernels))
    assert resolved.kernels == kernels
    torch.testing.assert_close(forced_logits(executor, TOKENS, BLOCKS, 16), fast, atol=2e-4, rtol=1e-4)


def test_greedy_tokens_equal_those_of_transformers(tmp_path: Path) -> None:
    model = save_model("qwen3", tmp_path)
    prompt = torch.tensor([TOKENS[:20]])
    answer = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=30, do_sample=False, eos_token_id=None
    )
    assert greedy_text(make(tmp_path), TOKENS[:20], BLOCKS, 30, chunk_size=8) == answer[0, 20:].tolist()


def test_each_row_kind_returns_what_it_should(executor: TorchExecutor) -> None:
    prompt = TOKENS[:20]
    assert run(executor, chunk("a", prompt, 0, 19, BLOCKS)) == ((),)
    first = run(executor, chunk("a", prompt, 19, 20, BLOCKS))  # a last chunk of one token is no decode row
    mixed = run(
        executor,
        decode("a", first[0][0], 20, BLOCKS),
        chunk("b", TOKENS, 0, 30, OTHER_BLOCKS),
    )
    assert [len(tokens) for tokens in (*first, *mixed)] == [1, 1, 0]


def test_a_mixed_step_gives_every_row_what_it_gets_alone(executor: TorchExecutor) -> None:
    alone = greedy_text(executor, TOKENS[:20], BLOCKS, 3)
    other = greedy_text(executor, TOKENS[5:40], OTHER_BLOCKS, 1)
    first = run(executor, chunk("a", TOKENS[:20], 0, 20, BLOCKS))[0]
    second, middle = run(executor, decode("a", first[0], 20, BLOCKS), chunk("b", TOKENS[5:40], 0, 17, OTHER_BLOCKS))
    third, last = run(executor, decode("a", second[0], 21, BLOCKS), chunk("b", TOKENS[5:40], 17, 35, OTHER_BLOCKS))
    assert [*first, *second, *third] == alone
    assert (middle, list(last)) == ((), other)


def test_two_requests_may_share_the_blocks_of_a_prefix(executor: TorchExecutor) -> None:
    """To the executor a prefix-cache hit is a row that starts where another request's KV ends."""
    whole = greedy_text(executor, TOKENS[:40], BLOCKS, 4)
    prompt, shared = TOKENS[:40], (*BLOCKS[:2], *OTHER_BLOCKS)
    tokens = [*run(executor, chunk("hit", prompt, 32, 40, shared))[0]]
    while len(tokens) < 4:
        tokens += run(executor, decode("hit", tokens[-1], 39 + len(tokens), shared))[0]
    assert tokens == whole


def test_what_a_freed_block_held_never_leaks(checkpoint: Path) -> None:
    executor = make(checkpoint)
    clean = greedy_text(executor, TOKENS[:20], BLOCKS, 5)
    for tensors in executor.model.cache.layers:
        for tensor in tensors:
            tensor.fill_(torch.nan)
    assert greedy_text(executor, TOKENS[:20], BLOCKS, 5, chunk_size=7) == clean


def test_a_row_without_finite_logits_fails_alone(checkpoint: Path) -> None:
    executor = make(checkpoint)
    good, bad = chunk("good", [1, 2, 3], 0, 3, (0,)), chunk("bad", [1, 7], 0, 2, (1,))
    (expected,) = run(executor, good)
    executor.model.decoder.weights.embedding[7] = torch.nan  # the row that reads this token gets NaN
    executor.launch(StepPlan(1, (bad, good)))
    output = executor.collect()
    assert output.failed == ((0, NO_LOGIT),)
    assert output.sampled == ((), expected)


def test_collect_returns_launched_steps_in_order(executor: TorchExecutor) -> None:
    for step_id in (4, 5):
        executor.launch(StepPlan(step_id, (chunk("a", TOKENS, 0, 3, BLOCKS),)))
    assert [executor.collect().step_id for _ in "ab"] == [4, 5]
    executor.forget(["a"])


def test_a_last_chunk_that_asks_for_no_token_gets_none_and_its_neighbours_get_theirs(executor: TorchExecutor) -> None:
    expected = run(executor, chunk("b", TOKENS[:9], 0, 9, OTHER_BLOCKS))[0]
    silent = chunk("a", TOKENS[:20], 0, 20, BLOCKS)._replace(sampling=None)
    assert run(executor, silent, chunk("b", TOKENS[:9], 0, 9, OTHER_BLOCKS)) == ((), expected)


def test_the_random_number_of_a_sample_is_that_of_the_position_it_fills(executor: TorchExecutor) -> None:
    drawn = RowSampling(temperature=5.0, top_k=0, top_p=1.0, min_p=0.0, seed=42)
    for end in (1, 9, 40):
        row = chunk("a", TOKENS[:end], 0, end, BLOCKS)._replace(sampling=drawn)
        logits = executor.logits(StepPlan(0, (row,)))[-1]
        assert run(executor, row) == ((reference.sample(logits, uniform(42, end), temperature=5.0),),)
    row = decode("a", 5, 40, BLOCKS)._replace(sampling=drawn)
    logits = executor.logits(StepPlan(0, (row,)))[-1]
    assert run(executor, row) == ((reference.sample(logits, uniform(42, 41), temperature=5.0),),)


# Overlap: a step is launched before the one before it is collected.


def test_steps_that_go_on_from_pending_tokens_give_the_text_of_known_ones(executor: TorchExecutor) -> None:
    assert executor.capabilities == Capabilities(mixed_rows=True, overlap=True, drafts=True)
    texts = [greedy_text(executor, TOKENS[:20], BLOCKS, 4), greedy_text(executor, TOKENS[5:40], OTHER_BLOCKS, 4)]
    prompts = [chunk("a", TOKENS[:20], 0, 20, BLOCKS), chunk("b", TOKENS[5:40], 0, 35, OTHER_BLOCKS)]
    plans = [StepPlan(0, tuple(prompts))]
    for i in range(3):
        rows = (decode("b", PENDING_TOKEN, 35 + i, OTHER_BLOCKS), decode("a", PENDING_TOKEN, 20 + i, BLOCKS))
        plans.append(StepPlan(1 + i, rows))
    executor.launch(plans[0])
    got: dict[str, list[int]] = {"a": [], "b": []}
    for number, plan in enumerate(plans):
        if number + 1 < len(plans):
            executor.launch(plans[number + 1])
        for row, tokens in zip(plan.rows, executor.collect().sampled, strict=True):
            got[row.request_id] += tokens
    assert [got["a"], got["b"]] == texts


def test_a_row_that_goes_on_from_a_failed_one_fails_alone(checkpoint: Path) -> None:
    """The row was planned before anybody knew of the failure.
    An older token of the request must not take the missing one's place."""
    executor = make(checkpoint)
    text = greedy_text(executor, TOKENS[:20], OTHER_BLOCKS, 2)
    run(executor, chunk("bad", TOKENS[:5], 0, 5, BLOCKS), chunk("good", TOKENS[:20], 0, 20, OTHER_BLOCKS))
    executor.model.decoder.weights.embedding[7] = torch.nan  # the row that reads this token gets NaN
    executor.launch(StepPlan(1, (decode("bad", 7, 5, BLOCKS),)))
    lost = decode("bad", PENDING_TOKEN, 6, BLOCKS)
    executor.launch(StepPlan(2, (lost, decode("good", PENDING_TOKEN, 20, OTHER_BLOCKS))))
    assert executor.collect().failed == ((0, NO_LOGIT),)
    output = executor.collect()
    assert (output.failed, output.sampled) == (((0, LOST_TOKEN),), ((), (text[1],)))


def test_what_is_kept_of_a_request_goes_when_it_is_forgotten(executor: TorchExecutor) -> None:
    run(executor, chunk("a", TOKENS, 0, 70, BLOCKS), chunk("b", TOKENS[:9], 0, 9, OTHER_BLOCKS))
    executor.forget(["a", "never seen"])
    lost = decode("a", PENDING_TOKEN, 70, BLOCKS)._replace(sampling=greedy(num_logprobs=1))
    executor.launch(StepPlan(1, (lost, decode("b", PENDING_TOKEN, 9, OTHER_BLOCKS))))
    output = executor.collect()
    assert (output.failed, output.logprobs) == (((0, LOST_TOKEN),), {})
    executor.forget(["b"])
    assert not executor._answers.newest


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (ScheduledRequest("r", RowKind.MIDDLE, 0, (), (1,), None), "1 blocks for 0..0"),
        (ScheduledRequest("r", RowKind.MIDDLE, 10, (5,) * 7, (1,), None), "1 blocks for 10..17"),
        (ScheduledRequest("r", RowKind.DECODE, 3, (PENDING_TOKEN, 6), (1,), greedy()), "drafts follow a token"),
        (ScheduledRequest("r", RowKind.DECODE, 3, (6, DRAFT_TOKEN), (1,), greedy()), "no draft model has filled them"),
        (ScheduledRequest("r", RowKind.DECODE, 3, (5,), (1,), None), "kind decode with sampling None"),
        (ScheduledRequest("r", RowKind.MIDDLE, 0, (5,), (1,), greedy()), "kind middle with sampling"),
        (ScheduledRequest("r", RowKind.LAST, 0, (PENDING_TOKEN,), (1,), greedy()), "a chunk's tokens are known"),
        (ScheduledRequest("r", RowKind.LAST, 0, (5,), (1,), greedy(), state=StateUse(0)), "no recurrent state"),
        (
            ScheduledRequest("r", RowKind.LAST, 4, (5, 6), (1,), greedy(), scoring=PromptScoring(3, (5,), 0)),
            "scores 3..4 of",
        ),
        (
            ScheduledRequest("r", RowKind.LAST, 4, (5, 6), (1,), greedy(), scoring=PromptScoring(5, (6, 7), 0)),
            "scores 5..7 of",
        ),
    ],
)
def test_a_plan_that_breaks_the_contract_fails_alone(
    executor: TorchExecutor, row: ScheduledRequest, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        executor.launch(StepPlan(1, (row,)))
    assert len(run(executor, chunk("a", TOKENS, 0, 70, BLOCKS))[0]) == 1


def test_rows_may_come_in_any_order_and_each_gets_its_own_answer(executor: TorchExecutor) -> None:
    """Attention takes decode rows of one token first, while a plan may have rows with drafts among them."""
    first, second = (greedy_text(executor, TOKENS[:n], at, 4) for n, at in ((20, BLOCKS), (30, OTHER_BLOCKS)))
    third = run(executor, chunk("c", TOKENS[:9], 0, 9, (8, 10)))[0]
    rows = (
        decode("a", first[0], 20, BLOCKS)._replace(token_ids=(first[0], first[1], 0)),
        decode("b", second[0], 30, OTHER_BLOCKS),
        chunk("c", TOKENS[:9], 0, 9, (8, 10)),
    )
    want = [tuple(first[1:3]), (second[1],), third]
    for order in permutations(range(3)):
        assert run(executor, *(rows[i] for i in order)) == tuple(want[i] for i in order)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("wrong_at", [0, 1, 2, 3])
def test_drafts_are_accepted_up_to_the_first_that_would_not_have_been_sampled(
    executor: TorchExecutor, wrong_at: int, temperature: float
) -> None:
    """Their log-probabilities, penalties included, are those of one token after another."""
    controls = LogitControls(presence_penalty=1.0, frequency_penalty=0.5)
    sampling = replace(greedy(num_logprobs=2), temperature=temperature, seed=3, controls=controls)
    prompt, text, scores = TOKENS[:20], [], []
    row = chunk("a", prompt, 0, 20, BLOCKS)._replace(sampling=sampling)
    for position in range(20, 25):
        executor.launch(StepPlan(position, (row,)))
        output = executor.collect()
        text += output.sampled[0]
        scores += output.logprobs[0]
        row = decode("a", text[-1], position, BLOCKS)._replace(sampling=sampling, answer=tuple(text))
    drafts = [token if i != wrong_at else (token + 1) % VOCAB for i, token in enumerate(text[1:4])]
    row = decode("a", text[0], 20, BLOCKS)._replace(token_ids=(text[0], *drafts), sampling=sampling, answer=(text[0],))
    executor.launch(StepPlan(30, (row,)))
    output = executor.collect()
    assert output.sampled == (tuple(text[1 : wrong_at + 2]),)
    for got, want in zip(output.logprobs[0], scores[1:], strict=False):
        assert [token for token, _ in got.top] == [token for token, _ in want.top]
        assert got.logprob == pytest.approx(want.logprob, abs=1e-4)
    assert len(output.logprobs[0]) == wrong_at + 1


def test_a_plan_without_rows_or_with_moves_of_a_state_that_the_model_lacks_is_refused(executor: TorchExecutor) -> None:
    with pytest.raises(ValueError, match="no rows"):
        run(executor)
    with pytest.raises(ValueError, match="state moves"):
        executor.launch(StepPlan(1, (chunk("a", TOKENS, 0, 3, BLOCKS),), state_moves=((0, 1),)))


def test_a_token_outside_the_vocabulary_fails_its_own_step_only(executor: TorchExecutor) -> None:
    with pytest.raises(IndexError):
        run(executor, chunk("a", [VOCAB], 0, 1, BLOCKS))
    executor.launch(StepPlan(8, (chunk("a", TOKENS, 0, 70, BLOCKS),)))
    assert executor.collect().step_id == 8


@settings(deadline=None)
@given(
    rows=st.lists(st.tuples(st.booleans(), st.integers(0, 70), st.integers(1, 40)), min_size=1, max_size=6),
    block_size=st.integers(1, 20),
)
def test_slots_and_positions_equal_a_naive_count(rows: list[tuple[bool, int, int]], block_size: int) -> None:
    plan_rows, slots, positions, next_block = [], [], [], 0
    for is_decode, start, count in sorted(rows, reverse=True):
        length = 1 if is_decode else count
        blocks = tuple(range(next_block, next_block + -(-(start + length) // block_size) + 1))[::-1]
        next_block += len(blocks)
        kind = RowKind.DECODE if is_decode else RowKind.MIDDLE
        sampling = greedy() if is_decode else None
        plan_rows.append(ScheduledRequest("r", kind, start, (7,) * length, blocks, sampling))
        for position in range(start, start + length):
            positions.append(position)
            slots.append(blocks[position // block_size] * block_size + position % block_size)
    inputs = build_inputs(StepPlan(0, tuple(plan_rows)), block_size)
    assert inputs.slots.tolist() == slots
    assert inputs.positions.tolist() == positions
    assert inputs.sampled_tokens.tolist() == list(range(sum(is_decode for is_decode, _, _ in rows)))


def test_two_engines_in_one_process_do_not_mix(checkpoint: Path, tmp_path: Path) -> None:
    save_model("qwen2", tmp_path)
    first, second = make(checkpoint), make(tmp_path, block_size=8, num_kv_blocks=20)
    want = [greedy_text(executor, TOKENS[:20], BLOCKS, 4) for executor in (first, second)]
    for executor in (first, second):
        executor.launch(StepPlan(0, (chunk("a", TOKENS[:20], 0, 20, BLOCKS),)))
    got = [executor.collect().sampled[0] for executor in (first, second)]
    assert [tokens[0] for tokens in got] == [text[0] for text in want]
    second.shutdown()
    second.shutdown()
    assert greedy_text(first, TOKENS[:20], BLOCKS, 4) == want[0]


def test_the_thread_count_is_set_in_the_thread_that_runs_the_steps(checkpoint: Path) -> None:
    executor, seen = make(checkpoint, num_threads=1), []

    def step() -> None:
        torch.set_num_threads(2)
        run(executor, chunk("a", TOKENS, 0, 70, BLOCKS))
        seen.append(torch.get_num_threads())

    before = torch.get_num_threads()
    thread = threading.Thread(target=step)
    thread.start()
    thread.join()
    torch.set_num_threads(before)
    assert seen == [1]


def test_dummy_weights_need_only_the_config(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((checkpoint / "config.json").read_text())
    texts = [greedy_text(make(tmp_path, load_format="dummy"), TOKENS[:9], BLOCKS, 5) for _ in "ab"]
    assert texts[0] == texts[1]
    with pytest.raises(CheckpointError):
        make(tmp_path)


def test_seeded_sampling_does_not_depend_on_chunks_or_neighbours(executor: TorchExecutor) -> None:
    drawn = RowSampling(temperature=1.0, top_k=50, top_p=0.9, min_p=0.0, seed=42)
    last = ScheduledRequest("a", RowKind.LAST, 30, tuple(TOKENS[30:40]), BLOCKS, drawn)
    run(executor, chunk("a", TOKENS, 0, 30, BLOCKS))
    alone = run(executor, last)
    together = run(executor, decode("b", 3, 0, OTHER_BLOCKS), last)
    whole = run(executor, ScheduledRequest("a", RowKind.LAST, 0, tuple(TOKENS[:40]), BLOCKS, drawn))
    assert alone[0] == together[1] == whole[0]


# How the machine and the checkpoint resolve a config.


def resolve(directory: Path, **settings: Any) -> Any:
    return create_executor(directory, EngineConfig(**{"num_kv_blocks": 4, "load_format": "dummy"} | settings))[1]


def test_chunks_halve_where_attention_costs_as_much_as_the_matrix_products(checkpoint: Path) -> None:
    """A layer has matrices of 48 by 96 + 2 * 32, of 96 by 48, and three of 48 by 80; attention has two of 96."""
    resolved = resolve(checkpoint)
    assert resolved.scheduler.chunk_halving_context == (48 * (96 + 64) + 96 * 48 + 3 * 48 * 80) // (2 * 96)
    assert "192 for each token that it attends to" in resolved.reasons["chunk_halving_context"]
    asked = resolve(checkpoint, scheduler=SchedulerConfig(chunk_halving_context=0))
    assert asked.scheduler.chunk_halving_context == 0
    whole = resolve(checkpoint, scheduler=SchedulerConfig(chunk_owner="engine"))
    assert whole.scheduler.chunk_halving_context is None


def test_defaults_come_from_the_checkpoint(checkpoint: Path) -> None:
    resolved = resolve(checkpoint)
    assert (resolved.max_model_len, resolved.vocab_size, resolved.eos_token_ids) == (256, VOCAB, (2,))
    assert resolved.max_prefill_tokens == resolved.max_num_batched_tokens == 512
    assert set(resolved.reasons) == {
        "max_model_len",
        "eos_token_ids",
        "device",
        "dtype",
        "num_kv_blocks",
        "num_threads",
        "kernels",
        "quantize",
        "chunk_halving_context",
        "speculative",
    }


def test_a_context_longer_than_the_checkpoint_serves_is_refused_with_the_numbers(checkpoint: Path) -> None:
    assert resolve(checkpoint, max_model_len=256).max_model_len == 256
    with pytest.raises(ConfigError, match=r"max_model_len is 257, .* at most 256 positions"):
        resolve(checkpoint, max_model_len=257)


def test_rope_scaling_lets_a_context_grow(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((checkpoint / "config.json").read_text())
    edit_config(tmp_path, rope_parameters={"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4})
    assert resolve(tmp_path).max_model_len == 256
    assert resolve(tmp_path, max_model_len=1024).max_model_len == 1024


def test_kv_blocks_follow_from_memory_and_type(checkpoint: Path) -> None:
    one_mib = 1 / 1024
    blocks = {
        dtype: resolve(checkpoint, num_kv_blocks=None, kv_cache_memory_gib=one_mib, dtype=dtype).num_kv_blocks
        for dtype in ("float32", "bfloat16")
    }
    per_token = 2 * 3 * 2 * 16  # K and V, layers, KV heads, head_dim
    assert blocks == {"float32": 2**20 // (per_token * 16 * 4), "bfloat16": 2**20 // (per_token * 16 * 2)}
    with pytest.raises(ConfigError, match="one block of this model takes"):
        resolve(checkpoint, num_kv_blocks=None, kv_cache_memory_gib=1e-6)


@pytest.mark.parametrize(("flags", "dtype"), [({"avx2"}, "float32"), ({"avx512_bf16"}, "bfloat16"), (set(), "float32")])
def test_auto_takes_bfloat16_only_where_the_cpu_has_it(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, flags: set[str], dtype: str
) -> None:
    monkeypatch.setattr("engine.build.resolve.cpu_flags", lambda: frozenset(flags))
    resolved = resolve(checkpoint, dtype="auto")
    assert resolved.dtype == dtype
    assert "bf16" in resolved.reasons["dtype"]


def test_float16_is_refused_where_nothing_computes_in_it(checkpoint: Path) -> None:
    with pytest.raises(ConfigError, match="dtype is float16, but this engine runs on the CPU"):
        resolve(checkpoint, dtype="float16")


def test_end_tokens_come_from_the_generation_config_first(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((checkpoint / "config.json").read_text())
    assert resolve(tmp_path).eos_token_ids == (2,)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [5, 2]}')
    assert resolve(tmp_path).eos_token_ids == (5, 2)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": "x"}')
    with pytest.raises(CheckpointError, match="eos_token_id is 'x'"):
        resolve(tmp_path)


def test_a_checkpoint_without_an_lm_head_starts_and_says_that_it_makes_embeddings_alone(tmp_path: Path) -> None:
    """The largest of Qwen3's models for embeddings ties nothing, and has none; it was refused."""
    save_model("llama", tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    del stored["lm_head.weight"]
    save_file({name.removeprefix("model."): stored[name] for name in stored}, tmp_path / "model.safetensors")
    executor, resolved = create_executor(tmp_path, EngineConfig(num_kv_blocks=4, dtype="float32"))
    executor.shutdown()
    assert resolved.headless
    assert resolved.reasons["lm_head"] == "the checkpoint has none: the model makes embeddings alone"
    save_file(stored, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"lm_head\.weight missing"):
        create_executor(tmp_path, EngineConfig(num_kv_blocks=4, dtype="float32"))


def test_no_position_is_served_at_which_the_checkpoint_wants_dual_chunk_attention(
    checkpoint: Path, tmp_path: Path
) -> None:
    """Qwen2.5's models of a million tokens were served with ordinary attention throughout."""
    config = json.loads((checkpoint / "config.json").read_text())
    chunks = {"chunk_size": 64, "local_size": 8, "original_max_position_embeddings": 64}
    (tmp_path / "config.json").write_text(json.dumps(config | {"dual_chunk_attention_config": chunks}))
    resolved = resolve(tmp_path)
    assert resolved.max_model_len == 64
    assert "dual_chunk_attention_config" in resolved.reasons["max_model_len"]
    assert resolve(tmp_path, max_model_len=40).max_model_len == 40
    with pytest.raises(ConfigError, match=r"max_model_len is 65, .* at most 64 positions without dual chunk attention"):
        resolve(tmp_path, max_model_len=65)


TOKENIZER = {"added_tokens": [{"id": 5, "content": "<|im_end|>"}], "model": {"vocab": {"a": 0, "</s>": 7}}}


@pytest.mark.parametrize(
    ("config", "named", "tokenizer", "ends"),
    [
        ({"eos_token": "<|im_end|>"}, {}, TOKENIZER, (2, 5)),
        ({"eos_token": {"content": "</s>", "lstrip": False}}, {}, TOKENIZER, (2, 7)),
        ({"eos_token": "b"}, {}, {"model": {"vocab": [["a", 0.0], ["b", -1.0]]}}, (2, 1)),
        ({"eos_token": "<|im_end|>"}, {"eos_token": "</s>"}, TOKENIZER, (2, 7)),
        ({"eos_token": "<|im_end|>", "added_tokens_decoder": {}}, {"eos_token": "</s>"}, TOKENIZER, (2, 5)),
        ({"eos_token": "<|im_end|>"}, {}, {"added_tokens": [{"id": 2, "content": "<|im_end|>"}]}, (2,)),
        ({"eos_token": "<|im_end|>"}, {}, {"added_tokens": [{"id": VOCAB, "content": "<|im_end|>"}]}, (2,)),
        ({"eos_token": "unknown"}, {}, TOKENIZER, (2,)),
        ({"eos_token": None}, {}, TOKENIZER, (2,)),
        ({"eos_token": "<|im_end|>"}, {}, None, (2,)),
    ],
    ids=[
        "an added token",
        "an object",
        "Unigram's",
        "the old map",
        "no longer the map",
        "known",
        "beyond the model's vocabulary",
        "in no vocabulary",
        "none",
        "no tokenizer",
    ],
)
def test_the_tokenizers_own_end_of_sequence_ends_answers_too(
    checkpoint: Path,
    tmp_path: Path,
    config: dict[str, Any],
    named: dict[str, Any],
    tokenizer: dict[str, Any] | None,
    ends: tuple[int, ...],
) -> None:
    """Answers of fine-tunes ran to max_tokens and wrote further turns: their tokenizers end a turn with <|im_end|>, but
    generation_config.json still names the base model's end of text."""
    (tmp_path / "config.json").write_text((checkpoint / "config.json").read_text())
    files = {"tokenizer_config.json": config, "special_tokens_map.json": named, "tokenizer.json": tokenizer}
    for name, content in files.items():
        if content is not None:
            (tmp_path / name).write_text(json.dumps(content))
    found, why = end_tokens(tmp_path, VOCAB)
    assert found == ends
    assert ("the tokenizer's eos_token" in why) == (len(ends) > 1)
    assert "2 of config.json" in why


def test_end_tokens_of_a_checkpoint_with_other_inputs_stand_beside_its_text_decoders_shape(
    checkpoint: Path, tmp_path: Path
) -> None:
    config = json.loads((checkpoint / "config.json").read_text())
    ends = config.pop("eos_token_id")
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert resolve(tmp_path).eos_token_ids == ()
    (tmp_path / "config.json").write_text(json.dumps(config | {"text_config": {"eos_token_id": ends}}))
    assert resolve(tmp_path).eos_token_ids == (2,)


def test_experts_that_do_not_fit_the_native_kernels_run_on_torch_and_it_says_why(tmp_path: Path) -> None:
    save_model("qwen3_moe", tmp_path)
    edit_config(tmp_path, moe_intermediate_size=41)
    resolved = resolve(tmp_path)
    assert resolved.kernels == "torch_cpu"
    assert "not native: a matrix has 41 inputs, and they take even numbers" in resolved.reasons["kernels"]


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"kernels": "native"}, "kernels is native. The native kernels cannot run: head_dim is 8"),
        ({"quantize": "int8"}, "quantize is int8, but the kernels are torch_cpu"),
        ({"batch_invariant": True}, "batch_invariant is true, but the kernels are torch_cpu: .* head_dim is 8"),
    ],
)
def test_what_needs_the_native_kernels_is_refused_where_the_model_does_not_fit_them(
    tmp_path: Path, settings: dict[str, Any], why: str
) -> None:
    save_model("yarn", tmp_path)
    with pytest.raises(ConfigError, match=why):
        make(tmp_path, **settings)


def test_a_model_that_does_not_fit_the_native_kernels_runs_on_torch_and_says_why(tmp_path: Path) -> None:
    save_model("yarn", tmp_path)
    assert "head_dim is 8" in resolve(tmp_path).reasons["kernels"]


def test_a_step_larger_than_the_memory_set_aside_is_computed_all_the_same(checkpoint: Path) -> None:
    small = make(checkpoint, max_num_seqs=1, max_num_batched_tokens=4)
    tokens = forced_logits(small, TOKENS, BLOCKS, None)
    torch.testing.assert_close(tokens, forced_logits(make(checkpoint), TOKENS, BLOCKS, 16), atol=2e-4, rtol=1e-4)
    assert greedy_text(small, TOKENS[:30], BLOCKS, 5) == greedy_text(make(checkpoint), TOKENS[:30], BLOCKS, 5)


@needs_compiler
def test_a_step_for_which_there_is_no_memory_leaves_smaller_ones_as_they_were(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor = make(checkpoint, max_num_seqs=1, max_num_batched_tokens=8)
    whole = greedy_text(make(checkpoint), TOKENS[:30], BLOCKS, 5)

    def no_memory(*_: object, **__: object) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes")

    with monkeypatch.context() as patch:
        patch.setattr("kernels.cpu.native.program.torch.zeros", no_memory)
        with pytest.raises(ExecutorOutOfMemoryError):
            executor.launch(StepPlan(0, (chunk("a", TOKENS, 0, 30, BLOCKS),)))
        assert greedy_text(executor, TOKENS[:30], BLOCKS, 5, chunk_size=8) == whole
    assert greedy_text(executor, TOKENS[:30], BLOCKS, 5) == whole

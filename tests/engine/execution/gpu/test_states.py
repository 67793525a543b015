"""Owns recurrent states on a device: the same texts as on the CPU, captured or not, and memory that is counted.
Never needs a GPU: Triton's interpreter runs the kernels, and captures are made on the CPU."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.batch.inputs import check_plan
from engine.build.executor import create_executor
from engine.build.gpu import start_on_device
from engine.build.trial_steps import largest_step
from engine.config import ConfigError, EngineConfig, ResolvedConfig, SchedulerConfig, SpeculativeConfig
from engine.core.core import EngineCore
from engine.execution.device import StateLostError
from engine.execution.gpu.executor import DeviceExecutor
from engine.execution.gpu.memory import MemoryUse, check_states_fit
from engine.protocol import SamplingParams, Submission, Token
from engine.scheduling.request import create_request
from engine.step import StateUse, StepPlan
from kernels import choice
from kernels.choice import TRITON_TABLE
from kernels.eager.ops import TORCH, Ops
from tests.support.engines import resolved_config
from tests.support.fake_device import FakeDevice
from tests.support.fake_flash import FakeFlash
from tests.support.plans import chunk, decode
from tests.support.tiny_models import VOCAB, save_model

GENERATOR = torch.Generator().manual_seed(5)
PROMPTS = [torch.randint(0, VOCAB, (length,), generator=GENERATOR).tolist() for length in (37, 5, 21)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "num_kv_blocks": 20,
    "num_threads": 1,
    "max_num_seqs": 3,
    "max_num_batched_tokens": 24,
    "scheduler": SchedulerConfig(state_snapshot_tokens=16, state_snapshots=4),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("qwen3_5")
    save_model("qwen3_5", directory)
    return directory


@pytest.fixture
def _flash(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm_flash_attn", FakeFlash(any_dtype=True))  # type: ignore[arg-type]
    monkeypatch.setattr("kernels.flash.packages.DTYPES", (torch.float32, torch.bfloat16))


def create(model: Path, device: FakeDevice | None = None, **settings: Any) -> tuple[DeviceExecutor, ResolvedConfig]:
    return start_on_device(model, EngineConfig(**SETTINGS | settings), device or FakeDevice(), "a test").build()


def serve(core: EngineCore, rounds: int, prompts: Sequence[list[int]] = PROMPTS) -> list[list[int]]:
    """Serve the same prompts in several rounds, of which later ones hit the cache;
    return the texts of the last round."""
    texts: dict[str, list[int]] = {}
    for _ in range(rounds):
        texts = {str(number): [] for number in range(len(prompts))}
        for number, prompt in enumerate(prompts):
            assert not core.submit(create_request(Submission(str(number), tuple(prompt), GREEDY), core.config, number))
        while core.has_work:
            for event in core.step():
                if isinstance(event, Token):
                    texts[event.request_id].append(event.token_id)
    return list(texts.values())


@pytest.fixture
def _states_by_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use Triton's kernels for states only, in its interpreter."""
    triton = import_module(TRITON_TABLE).TRITON
    table = replace(TORCH, causal_conv=triton.causal_conv, delta_rule=triton.delta_rule, states_capturable=True)
    monkeypatch.setattr("kernels.choice.TORCH", table)


def check_texts(
    model: Path, *, rounds: int, captured: bool, prompts: Sequence[list[int]] = PROMPTS, **settings: Any
) -> None:
    want = serve(EngineCore(*create_executor(model, EngineConfig(**SETTINGS))), 1, prompts)
    executor, resolved = create(model, overlap=True, **settings)
    core = EngineCore(executor, resolved)
    try:
        assert serve(core, rounds, prompts) == want
        assert bool(core.load().graph_hits) is captured
        assert not core.load().graph_misses
    finally:
        executor.shutdown()


@pytest.mark.usefixtures("_flash")
@pytest.mark.parametrize("attention", ["vllm_flash_attn", "torch"])
def test_a_device_gives_the_texts_of_the_cpu_with_hits_moves_and_overlap(model: Path, attention: str) -> None:
    check_texts(model, rounds=2, captured=False, attention=attention, cuda_graphs="none")


SIZES = {"cuda_graph_decode_rows": (3,), "cuda_graph_mixed_tokens": (24,), "cuda_graph_mixed_rows": (3,)}


@pytest.mark.slow
@pytest.mark.usefixtures("_flash", "_states_by_triton")
def test_captured_steps_padded_with_rows_that_have_no_slot_give_the_same_texts(model: Path) -> None:
    check_texts(model, rounds=1, captured=True, prompts=PROMPTS[1:], cuda_graphs="all", **SIZES)


@pytest.mark.slow
@pytest.mark.usefixtures("_flash", "_states_by_triton")
def test_a_hybrid_with_experts_is_captured_where_both_can_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Experts run on torch, which may be captured on this device only.
    What Triton computes of experts is tested elsewhere."""
    save_model("qwen3_5_moe", tmp_path)
    why = (
        "none: without Triton, mixtures of experts synchronize with the GPU, which CUDA graphs cannot capture; 0 sizes"
    )
    assert create(tmp_path)[1].reasons["cuda_graphs"] == why
    monkeypatch.setattr("kernels.choice.TORCH", replace(choice.TORCH, experts_capturable=True))
    check_texts(tmp_path, rounds=1, captured=True, prompts=PROMPTS[1:2], cuda_graphs="all", **SIZES)


@pytest.mark.usefixtures("_flash", "_states_by_triton")
def test_captures_leave_states_alone(model: Path) -> None:
    executor, _ = create(model, **SIZES)
    state = executor.model.state
    assert state is not None
    assert executor.model._captured
    assert not state.conv.any()
    assert not state.delta.any()


@pytest.mark.usefixtures("_flash")
def test_where_torch_computes_states_nothing_is_captured_and_the_start_says_why(model: Path) -> None:
    why = "without Triton, linear attention reads data on the CPU, which CUDA graphs cannot capture"
    assert create(model)[1].reasons["cuda_graphs"] == f"none: {why}; 0 sizes"
    with pytest.raises(ConfigError, match=f"cuda_graphs is all, but .* compute the linear attention: {why}"):
        create(model, cuda_graphs="all")


def test_the_table_of_triton_has_kernels_for_states_that_can_be_captured() -> None:
    table: Ops = import_module(TRITON_TABLE).TRITON
    assert table.states_capturable
    assert table.delta_rule is not TORCH.delta_rule
    assert table.causal_conv is not TORCH.causal_conv


def test_states_have_their_part_of_the_memory(model: Path) -> None:
    plain, fewer = (create(model, attention="torch", num_kv_blocks=None, max_num_seqs=seqs)[1] for seqs in (3, 1))
    slot, block = 7104, 2 * 16 * 2 * 16 * 4
    assert abs((fewer.num_kv_blocks - plain.num_kv_blocks) * block - 2 * slot) <= block
    assert "recurrent states 0.00" in plain.reasons["num_kv_blocks"]
    _, asked = create(model, attention="torch", num_kv_blocks=None, kv_cache_memory_gib=2**-10)
    assert asked.num_kv_blocks == (2**20 - 7 * slot) // block


def test_states_that_do_not_fit_are_refused_with_what_makes_them_large() -> None:
    use = MemoryUse(total=100, others=10, weights=50, activations=0, states=40)
    check_states_fit(use)
    with pytest.raises(ConfigError, match="recurrent states of max_num_seqs requests and state_snapshots snapshots"):
        check_states_fit(MemoryUse(total=100, others=10, weights=51, activations=0, states=40))


def test_the_largest_step_of_a_hybrid_has_a_state_for_each_row() -> None:
    config = resolved_config(recurrent_state=True, max_num_seqs=3, max_num_batched_tokens=40)
    check_plan(largest_step(config), config.block_size, 3)


def test_drafts_are_refused_on_a_device_and_none_are_made_unasked(model: Path) -> None:
    """A state can only be taken back once it is known which drafts count,
    and by then a device may be a step further."""
    executor, resolved = create(model, attention="torch")
    assert resolved.num_speculative_tokens == 0
    assert (
        resolved.reasons["speculative"] == "none: on a GPU, recurrent state is not rolled back after a rejected draft"
    )
    with pytest.raises(ConfigError, match=r"num_speculative_tokens is 2, .* engine runs on fake GPU: on a GPU"):
        EngineCore(*create(model, attention="torch", num_speculative_tokens=2))
    with pytest.raises(ConfigError, match="on a GPU, recurrent state is not rolled back"):
        create(model, attention="torch", speculative=SpeculativeConfig(method="suffix"))
    row = decode("a", 5, 20, (0, 1))._replace(token_ids=(5, 6), state=StateUse(0))
    with pytest.raises(ValueError, match="drafts, which this executor takes no state back from"):
        executor.launch(StepPlan(0, (row,)))


def test_a_step_without_memory_is_not_run_again(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    executor, _ = create(model, attention="torch")

    def no_memory(*_: Any) -> None:
        raise torch.cuda.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(executor.model, "start", no_memory)
    row = chunk("a", PROMPTS[0], 0, 20, (0, 1))
    with pytest.raises(StateLostError):
        executor.launch(StepPlan(0, (row._replace(state=StateUse(0)),)))

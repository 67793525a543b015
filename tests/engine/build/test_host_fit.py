"""An engine on the CPU takes no more memory than there is, and says by name and number what would not fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from engine.build.executor import check_executor, create_executor
from engine.build.host_fit import HostBudget, HostUse, host_use
from engine.config import ConfigError, EngineConfig
from engine.execution.executor import TorchExecutor
from engine.host.memory import HostMemory
from engine.host.shares import Room
from engine.models.adapter_files import read_adapter
from engine.models.config import read_model_config
from engine.models.parameters import num_bytes
from engine.models.vision import VisionEncoder, encoding_bytes
from engine.models.vision_config import PixelConfig, VisionConfig
from engine.models.vision_weights import allocate_vision, vision_table
from kernels.eager.ops import TORCH_CPU
from tests.support.live_tensors import LiveTensors
from tests.support.tiny_adapters import ATTENTION, FUSED, MLP, RANK, save_adapter
from tests.support.tiny_models import save_model
from tests.support.tiny_vision import save_vision_model

GIB, MIB = 2**30, 2**20
USE = HostUse(weights=2 * GIB, step=GIB // 4)
MEMORY = HostMemory(20 * GIB, 20 * GIB, "a test's file")
BLOCK = MIB


def budget(use: HostUse = USE, **room: Any) -> HostBudget:
    asked: dict[str, Any] = {"free": 19 * GIB, "share": 19 * GIB, "engines": 1, "memory": MEMORY} | room
    return HostBudget(use=use, room=Room(**asked))


def blocks(config: EngineConfig, of: HostBudget, *, states: int = 0, most: int = 10**9) -> tuple[int, str]:
    return of.blocks(config, BLOCK, states, most)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"kv_cache_memory_gib": 100.0},
            r"kv_cache_memory_gib is 100.0, which takes 100.00 GiB, but only 16.75 GiB is left",
        ),
        (
            {"num_kv_blocks": 20_000},
            r"num_kv_blocks is 20000, which takes 19.53 GiB, but only 16.75 GiB is left after weights",
        ),
    ],
)
def test_more_than_there_is_is_refused_by_name_with_both_numbers(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        blocks(EngineConfig(**settings), budget())
    assert "weights 2.00" in str(caught.value)
    assert "20.00 GiB of 20.00 GiB are free (a test's file), and 5% is kept free" in str(caught.value)


def test_what_just_fits_is_served() -> None:
    assert blocks(EngineConfig(kv_cache_memory_gib=16.75), budget())[0] == 16.75 * 1024
    with pytest.raises(ConfigError):
        blocks(EngineConfig(kv_cache_memory_gib=16.76), budget())


def test_weights_and_an_encoder_cache_that_do_not_fit_are_named() -> None:
    with pytest.raises(ConfigError, match=r"needs 40.25 GiB without any KV cache \(weights 40.00, .* 20.00 GiB"):
        blocks(EngineConfig(num_kv_blocks=1), budget(HostUse(weights=40 * GIB, step=GIB // 4)))
    with pytest.raises(ConfigError, match=r"encoder_cache_memory_gib 30\.00"):
        blocks(EngineConfig(num_kv_blocks=1), budget(HostUse(weights=GIB, step=0, encoder_cache=30 * GIB)))
    with pytest.raises(ConfigError, match=r"needs 31.00 GiB .*, num_speculative_tokens drafts 30\.00"):
        blocks(EngineConfig(num_kv_blocks=1), budget(HostUse(weights=GIB, step=0, drafts=30 * GIB)))


def test_unset_is_most_of_what_is_left_of_this_engines_share() -> None:
    assert blocks(EngineConfig(), budget())[0] == int(0.8 * 16.75 * 1024)
    of_two, reason = blocks(EngineConfig(), budget(share=19 * GIB // 2, engines=2))
    assert of_two == int(0.8 * (9.5 - 2.25) * 1024)
    assert "shared by 2 engines" in reason
    late, reason = blocks(EngineConfig(), budget(free=3 * GIB, share=19 * GIB // 2, engines=2, promised=4 * GIB))
    assert late == int(0.8 * 0.75 * 1024)
    assert "4.00 GiB are promised to engines that have not taken it yet" in reason


def test_unset_is_never_more_than_is_of_use() -> None:
    found, reason = blocks(EngineConfig(), budget(), most=300)
    assert found == 300
    assert "all that max_num_seqs requests of max_model_len tokens can hold" in reason


def test_recurrent_states_come_out_of_the_same_memory() -> None:
    assert blocks(EngineConfig(), budget(), states=GIB)[0] == int(0.8 * 16.75 * 1024) - 1024
    assert blocks(EngineConfig(kv_cache_memory_gib=4.0), budget(), states=GIB)[0] == 3 * 1024
    with pytest.raises(ConfigError, match=r"num_kv_blocks is 16384, which takes 17.00 GiB"):
        blocks(EngineConfig(num_kv_blocks=16 * 1024), budget(), states=GIB)


def test_a_share_too_small_for_one_block_is_refused_with_the_way_out() -> None:
    with pytest.raises(ConfigError, match=r"kv_cache_memory_gib is unset, .* 10 engines .* or serve fewer engines"):
        blocks(EngineConfig(), budget(share=19 * GIB // 10, engines=10))


def test_where_the_system_says_nothing_unset_is_two_gib_and_nothing_is_refused() -> None:
    unknown = HostBudget(use=USE, room=None)
    assert blocks(EngineConfig(), unknown) == (2048, "2 GiB: this system does not say what is free")
    assert blocks(EngineConfig(kv_cache_memory_gib=100.0), unknown)[0] == 100 * 1024


# --- on real checkpoints ---------------------------------------------------------------------------------------------


def settings(**more: Any) -> EngineConfig:
    return EngineConfig(**{"dtype": "float32", "num_threads": 1, "kernels": "torch_cpu"} | more)


@pytest.mark.parametrize("kind", ["llama", "qwen3_moe", "qwen3_next"])
def test_weights_take_what_they_were_said_to(kind: str, tmp_path: Path) -> None:
    save_model(kind, tmp_path)
    model = read_model_config(tmp_path)
    executor, _ = create_executor(tmp_path, settings(num_kv_blocks=4))
    assert isinstance(executor, TorchExecutor)
    weights = executor.model.decoder.weights  # type: ignore[attr-defined]
    said = host_use(tmp_path, model, settings(), torch.float32, native=False).weights
    assert said == num_bytes(model, weights)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("hidden", "inner", "patch"),
    [(128, 160, 4), (128, 600, 4), (64, 80, 14)],
    ids=["attention", "MLP", "pixels"],
)
def test_encoding_an_image_takes_what_it_was_said_to(hidden: int, inner: int, patch: int, dtype: torch.dtype) -> None:
    """Each shape has its peak in another part of the encoder."""
    vision = VisionConfig(
        depth=2,
        hidden_size=hidden,
        intermediate_size=inner,
        num_heads=2,
        channels=3,
        patch_size=patch,
        temporal_patch_size=2,
        merge_size=2,
        window_size=8 * patch,
        full_attention=(1,),
        output_size=96,
        rope_theta=10000.0,
        token_id=3,
        position_sections=(2, 3, 3),
    )
    weights = allocate_vision(vision, dtype)
    table = list(vision_table(weights).values())
    for tensor in table:
        tensor.zero_()
    encoder = VisionEncoder(vision, PixelConfig(), weights, TORCH_CPU)
    with torch.no_grad(), LiveTensors(table) as live:
        encoder.encode((1, 16, 12), bytes(16 * 12 * vision.side**2 * vision.channels))
    assert live.most <= encoding_bytes(vision, 16 * 12, dtype) <= 1.5 * live.most


def test_the_largest_image_that_the_encoder_cache_holds_is_counted(tmp_path: Path) -> None:
    save_vision_model(tmp_path)
    model = read_model_config(tmp_path)

    def said(**changes: Any) -> int:
        return host_use(tmp_path, model, settings(**changes), torch.float32, native=False).encoding

    assert model.vision is not None
    assert said() == encoding_bytes(model.vision, 64, torch.float32)  # as its preprocessor_config.json says
    assert said(encoder_cache_memory_gib=8 * 96 * 4 / GIB) == encoding_bytes(model.vision, 8, torch.float32)
    assert "encoding the largest image" in HostUse(weights=0, step=0, encoding=GIB).text()


@pytest.mark.parametrize(
    ("kind", "modules"), [("llama", ATTENTION + MLP), ("qwen3_moe", ATTENTION + MLP), ("phi3", FUSED)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_adapters_take_what_they_were_said_to(
    kind: str, modules: tuple[str, ...], dtype: torch.dtype, tmp_path: Path
) -> None:
    """Regression guard: a stack of queries, keys and values counted its outputs once, but has them for each part."""
    adapter = save_adapter(save_model(kind, tmp_path / "model"), tmp_path / "adapter", modules=modules)
    model = read_model_config(tmp_path / "model")
    _, deltas = read_adapter(adapter, model, dtype, RANK)
    config = settings(max_loras=3, max_lora_rank=RANK)
    said = host_use(tmp_path / "model", model, config, dtype, native=False).adapters
    assert said == 3 * sum(delta.a.nbytes + delta.b.nbytes for delta in deltas.values()) > 0


@pytest.mark.parametrize("start", [create_executor, check_executor])
def test_an_engine_is_refused_before_it_reads_a_weight(
    start: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_model("llama", tmp_path)
    monkeypatch.setattr("engine.build.model.load_weights", lambda *_, **__: pytest.fail("weights were read"))
    for name, value in {"kv_cache_memory_gib": 1e6, "num_kv_blocks": 10**12}.items():
        with pytest.raises(ConfigError, match=f"{name} is {value}, which takes"):
            start(tmp_path, settings(**{name: value}))


def test_a_second_engine_does_not_take_what_the_first_was_promised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_model("llama", tmp_path / "model")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr("engine.host.shares.host_memory", lambda: MEMORY)
    monkeypatch.setattr("engine.host.shares._resident", lambda process: 0)
    monkeypatch.setattr("engine.models.kv_cache.torch.zeros", lambda *size, **options: torch.empty(0))
    asked = settings(kv_cache_memory_gib=12.0)
    first, _ = create_executor(tmp_path / "model", asked)
    with pytest.raises(ConfigError, match=r"which takes 12.00 GiB, but only .* are promised to engines that have not"):
        create_executor(tmp_path / "model", asked)
    first.shutdown()
    create_executor(tmp_path / "model", asked)[0].shutdown()


def test_a_check_promises_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_model("llama", tmp_path / "model")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert check_executor(tmp_path / "model", settings(num_kv_blocks=4)).num_kv_blocks == 4
    (directory,) = tmp_path.glob("chunkserve-memory-*")
    assert [path.name for path in directory.iterdir()] == ["lock"]

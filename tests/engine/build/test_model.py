"""Every model is put together by one builder, which tells the parts what differs between devices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.build.model import ModelBuilder
from engine.config import EngineConfig
from engine.models.config import read_model_config
from engine.models.decoder import Decoder
from engine.models.kv_cache import KVCache
from engine.models.recurrent_state import RecurrentState
from engine.models.weights import CheckpointError, dummy_weights, load_weights
from tests.support.engines import resolved_config
from tests.support.tiny_models import save_model

Parts = tuple[Decoder, KVCache, RecurrentState | None]


def builder(directory: Path, *, engine: dict[str, Any] | None = None, **differences: Any) -> Any:
    """Make a builder whose runner is just the parts that it is given."""
    asked = EngineConfig(**{"num_kv_blocks": 5} | (engine or {}))
    resolved = resolved_config(num_kv_blocks=5, block_size=16, max_num_seqs=3, dtype="bfloat16", max_model_len=64)
    return ModelBuilder(
        model_dir=directory,
        model=read_model_config(directory),
        config=asked,
        resolved=resolved,
        runner=lambda *parts: parts,  # type: ignore[arg-type, return-value]
        **differences,
    )


def test_a_runner_gets_the_checkpoints_decoder_and_a_cache_of_as_many_blocks_as_are_resolved(tmp_path: Path) -> None:
    save_model("llama", tmp_path)
    decoder, cache, state = builder(tmp_path).build()
    config = read_model_config(tmp_path)
    assert torch.equal(decoder.weights.lm_head.weight, load_weights(tmp_path, config, torch.bfloat16).lm_head.weight)
    assert [len(tensor) for pair in cache.layers for tensor in pair] == [5] * 2 * config.num_layers
    assert {tensor.dtype for pair in cache.layers for tensor in pair} == {torch.bfloat16}
    assert state is None


def test_a_model_with_recurrent_state_gets_its_slots_in_the_same_way(tmp_path: Path) -> None:
    save_model("qwen3_next", tmp_path)
    _, cache, state = builder(tmp_path).build()
    assert state is not None
    assert (state.num_slots, state.conv.dtype) == (3, torch.bfloat16)
    assert len(cache.layers) == read_model_config(tmp_path).num_attention_layers


def test_a_cache_may_be_of_another_size_and_type_than_what_is_resolved(tmp_path: Path) -> None:
    """The start on a GPU measures with a small cache, and a CPU may keep its cache in int8."""
    save_model("llama", tmp_path)
    made = builder(tmp_path, engine={"kv_cache_dtype": "int8"})
    _, cache, _ = made.attach(made.load(), 2)
    assert {(len(tensor), tensor.dtype) for pair in cache.layers for tensor in pair} == {(2, torch.int8)}


def test_all_parts_are_where_the_builder_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_model("qwen3_next", tmp_path)
    there = torch.device("meta")
    asked: list[torch.device] = []

    def weights(*given: Any, device: torch.device, rounded: bool) -> Any:
        assert not rounded
        asked.append(device)
        return dummy_weights(*given)

    monkeypatch.setattr("engine.build.model.dummy_weights", weights)
    _, cache, state = builder(tmp_path, engine={"load_format": "dummy"}, device=there).build()
    assert asked == [there]
    assert state is not None
    tensors = [tensor for pair in cache.layers for tensor in pair] + [state.conv, state.delta]
    assert {tensor.device for tensor in tensors} == {there}


def others() -> dict[str, Tensor]:
    return {"encoder.weight": torch.full((3, 8), torch.nan), "encoder.norm": torch.full((8,), torch.nan)}


def test_what_a_checkpoint_holds_besides_is_filled_with_the_decoder_or_missed_by_name(tmp_path: Path) -> None:
    save_model("llama", tmp_path)
    with pytest.raises(CheckpointError, match=r"encoder\.(weight|norm)"):
        builder(tmp_path, others=others()).load()
    first, second = others(), others()
    for tensors in (first, second):
        builder(tmp_path, engine={"load_format": "dummy"}, others=tensors).load()
    assert torch.equal(first["encoder.weight"], second["encoder.weight"])
    assert 0.1 < first["encoder.weight"].std() < 1, "activations stay near one"
    assert first["encoder.norm"].tolist() == [1.0] * 8

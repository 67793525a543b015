"""Contracts of the assembly: what is loaded for which config."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from engine.build.engine import build_engine
from engine.checkpoints.prepare import ModelError
from engine.config import EngineConfig, FakeConfig
from engine.protocol import Event, Finished, SamplingParams, Token

TINY = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 64,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "eos_token_id": 0,
}


def answer(model: str, config: EngineConfig) -> list[Event]:
    async def main() -> list[Event]:
        engine = build_engine(model, config)
        try:
            params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
            return [event async for event in engine.generate([1, 2, 3], params)]
        finally:
            engine.shutdown()

    return asyncio.run(main())


def test_dummy_weights_need_nothing_but_a_config_and_are_the_same_every_time(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    config = EngineConfig(load_format="dummy", num_kv_blocks=8)
    first, second = [answer(str(tmp_path), config) for _ in range(2)]
    assert isinstance(first[-1], Finished)
    assert [e.token_id for e in first if isinstance(e, Token)] == [e.token_id for e in second if isinstance(e, Token)]


def test_threads_of_torch_do_not_spin_beside_a_server_unless_they_are_told_to(tmp_path: Path) -> None:
    """On two busy cores spinning made a step several times as long. torch reads the policy when it is loaded."""
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    code = (
        "import os; from engine.build.engine import build_engine; from engine.config import EngineConfig;"
        f"build_engine({str(tmp_path)!r}, EngineConfig(load_format='dummy', num_kv_blocks=8)).shutdown();"
        "print(os.environ['OMP_WAIT_POLICY'])"
    )
    plain = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    for environment, policy in ((plain, "passive"), ({**plain, "OMP_WAIT_POLICY": "active"}, "active")):
        done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
        assert done.stdout.strip() == policy


def test_real_weights_are_asked_for_by_name_where_they_are_missing(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    with pytest.raises(ModelError, match=r"has no tokenizer.json, \*\.safetensors"):
        build_engine(str(tmp_path), EngineConfig())


def test_the_fake_executor_needs_no_model_and_answers_with_its_reply() -> None:
    events = answer("no such model", EngineConfig(executor="fake", fake=FakeConfig(reply="ab")))
    assert [event.token_id for event in events if isinstance(event, Token)] == [ord("a"), ord("b"), 256, 256]

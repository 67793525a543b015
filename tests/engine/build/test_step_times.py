"""The step time model at the start of an engine: what is measured, what is kept, and when it is measured again."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine.build.engine import build_engine
from engine.build.step_times import fake_step_times, kept_step_times, measured_step_times
from engine.config import ConfigError, EngineConfig, FakeConfig, Targets
from engine.protocol import Finished, SamplingParams, Token
from engine.scheduling.step_prediction import StepTimeModel
from engine.scheduling.step_time import StepCosts, StepWork, decode_work
from engine.step import PaddedSizes
from tests.engine.core.test_calibration import BUDGETS, COSTS, LARGE, ClockedExecutor
from tests.support.engines import resolved_config

CONFIG = EngineConfig(targets=Targets(tpot_ms=50))


@pytest.fixture
def model_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CHUNKSERVE_CACHE", str(tmp_path / "cache"))
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").write_text('{"hidden_size": 64}')
    return directory


def start(model_dir: Path, costs: StepCosts = COSTS, noise: float = 0.0, **served: Any) -> tuple[StepTimeModel, int]:
    """Start an engine whose steps take what `costs` say; return its model and the number of steps that ran."""
    executor = ClockedExecutor(costs, noise=noise)
    config = resolved_config(**{**LARGE, **BUDGETS, **served})
    model = measured_step_times(executor, model_dir, CONFIG, config, clock=lambda: executor.now)
    return model, len(executor.plans)


def slower(times: float) -> StepCosts:
    factors = {"sample_s": times * COSTS.sample_s, "key_s": times * COSTS.key_s, "attended_s": times * COSTS.attended_s}
    return StepCosts(COSTS.knots, tuple(times * y for y in COSTS.curve_s), **factors)


def kept(model_dir: Path) -> list[Path]:
    return sorted((model_dir.parent / "cache" / "step_times").glob("*"))


def test_the_second_start_measures_only_whether_steps_still_take_what_they_took(model_dir: Path) -> None:
    first, measured = start(model_dir)
    second, checked = start(model_dir)
    assert checked < measured / 4
    assert second.now.costs == first.now.costs
    assert second.now.scale == pytest.approx(1.0, rel=0.05)


def test_what_is_kept_says_what_it_is_of_and_is_found_by_the_model(model_dir: Path) -> None:
    start(model_dir)
    (path,) = kept(model_dir)
    of = json.loads(path.read_text())["of"]
    assert of["settings"]["max_num_seqs"] == resolved_config(**{**LARGE, **BUDGETS}).max_num_seqs
    assert kept_step_times(model_dir) == path
    (model_dir / "config.json").write_text('{"hidden_size": 128}')
    assert kept_step_times(model_dir) is None


def test_a_file_that_an_earlier_release_kept_says_so_after_the_next_start(model_dir: Path) -> None:
    start(model_dir)
    (path,) = kept(model_dir)
    document = json.loads(path.read_text())
    path.write_text(json.dumps({"costs": document["costs"], "deviation": document["deviation"]}))
    assert kept_step_times(model_dir) is None
    start(model_dir)
    assert json.loads(path.read_text()) == document


def test_a_machine_that_is_a_little_slower_now_scales_what_was_kept(model_dir: Path) -> None:
    start(model_dir)
    model, checked = start(model_dir, slower(1.5))
    assert checked < 40
    work = decode_work(8, 100)
    assert model.now.seconds(work) == pytest.approx(1.5 * COSTS.seconds(work), rel=0.1)


def test_a_machine_that_is_another_one_is_measured_again(model_dir: Path) -> None:
    _, measured = start(model_dir)
    model, again = start(model_dir, slower(3.0))
    assert again > measured / 2
    assert model.now.scale == 1.0
    assert model.now.seconds(StepWork(64)) == pytest.approx(3 * COSTS.seconds(StepWork(64)), rel=0.1)
    assert start(model_dir, slower(3.0))[1] < 40


@pytest.mark.parametrize("other", [{"num_threads": 2}, {"dtype": "float32"}, {"max_num_batched_tokens": 256}])
def test_other_settings_are_measured_for_themselves(model_dir: Path, other: dict[str, Any]) -> None:
    _, measured = start(model_dir)
    _, again = start(model_dir, **other)
    assert again > measured / 2
    assert len(kept(model_dir)) == 2


def test_steps_that_are_padded_otherwise_now_are_measured_again(
    model_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Which sizes are captured follows from a launch that is measured at each start."""
    _, measured = start(model_dir)
    padded = replace(COSTS, sizes=PaddedSizes((8, 16, 32), (64, 512)))
    with caplog.at_level(logging.INFO):
        model, again = start(model_dir, padded)
    assert again > measured / 2
    assert "pads otherwise" in caplog.text
    assert model.now.costs.sizes == padded.sizes
    assert start(model_dir, padded)[1] < measured / 4


def test_another_gpu_beside_the_same_processor_is_measured_for_itself(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_initialized", lambda: True)
    for name in ("NVIDIA H100", "NVIDIA H200"):
        monkeypatch.setattr("torch.cuda.get_device_name", lambda name=name: name)
        start(model_dir, device="cuda")
    assert len(kept(model_dir)) == 2


def test_another_model_is_measured_for_itself(model_dir: Path) -> None:
    start(model_dir)
    (model_dir / "config.json").write_text('{"hidden_size": 128}')
    start(model_dir)
    assert len(kept(model_dir)) == 2


@pytest.mark.parametrize("text", ["", "[]", "{", '{"costs": {"knots": [1, 2]}, "deviation": 0.1}', '{"costs": 1}'])
def test_a_broken_file_is_said_and_replaced(model_dir: Path, text: str, caplog: pytest.LogCaptureFixture) -> None:
    _, measured = start(model_dir)
    (path,) = kept(model_dir)
    whole = json.loads(path.read_text())
    path.write_text(text)
    with caplog.at_level(logging.WARNING):
        assert start(model_dir)[1] == measured
    assert f"{path} cannot be used" in caplog.text
    assert json.loads(path.read_text()).keys() == whole.keys()


def test_a_cache_that_cannot_be_written_fails_no_start(model_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    (model_dir.parent / "cache").write_text("a file where the directory should be")
    with caplog.at_level(logging.WARNING):
        model, measured = start(model_dir)
    assert measured > 100
    assert model.now.costs.curve_s
    assert "cannot be written" in caplog.text


def test_what_was_measured_on_a_busy_machine_is_not_kept(model_dir: Path) -> None:
    start(model_dir, noise=0.9)
    assert kept(model_dir) == []


def test_limits_that_leave_nothing_to_measure_are_refused(model_dir: Path) -> None:
    with pytest.raises(ConfigError, match=r"targets need measured step times, but .* raise max_num_batched_tokens"):
        start(model_dir, max_num_seqs=1, max_prefill_tokens=1, max_num_batched_tokens=1)


def test_the_fake_executors_steps_take_what_its_settings_say() -> None:
    model = fake_step_times(EngineConfig(fake=FakeConfig(step_delay_ms=5, token_delay_ms=0.5)))
    assert model.now.seconds(StepWork(1)) == pytest.approx(0.0055)
    assert model.now.seconds(StepWork(101, 3, 50, 50)) == pytest.approx(0.0555)


@pytest.mark.anyio
async def test_an_engine_with_targets_serves() -> None:
    config = EngineConfig(
        executor="fake", targets=Targets(tpot_ms=20, ttft_ms=500), fake=FakeConfig(token_delay_ms=0.05)
    )
    engine = build_engine("any", config)
    try:
        params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
        events = [event async for event in engine.generate((1, 2, 3), params)]
        assert [type(event) for event in events[-5:]] == [Token] * 4 + [Finished]
        assert engine.load().step_times is not None
    finally:
        engine.shutdown()

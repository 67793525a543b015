"""Every model on a CPU hands its group on to the passes of its steps.
Never has a second rank: a stand-in doubles what it is given."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.build.executor import create_executor
from engine.config import EngineConfig
from engine.models.decoder import Decoder
from kernels.collectives.group import RankLostError
from tests.golden import vision
from tests.support import plans
from tests.support.compiler import needs_compiler
from tests.support.tiny_models import save_model
from tests.support.tiny_vision import save_vision_model


class Doubling:
    """A Group whose ranks all compute the same, as far as sums are concerned."""

    rank, size = 0, 2

    def all_reduce(self, x: Tensor) -> Tensor:
        return x.mul_(2)


class Losing(Doubling):
    def all_reduce(self, x: Tensor) -> Tensor:
        raise RankLostError("Rank 1 has died.")


def logits(directory: Path, *, images: bool, **settings: Any) -> Tensor:
    config = EngineConfig(**{"device": "cpu", "dtype": "float32", "num_kv_blocks": 64, "num_threads": 2} | settings)
    executor, _ = create_executor(directory, config)
    try:
        if images:
            return vision.forced_logits(executor, vision.vision_prompts()[0], None)  # type: ignore[arg-type]
        return plans.forced_logits(executor, list(range(1, 20)), range(8), 8)
    finally:
        executor.shutdown()


def summed(monkeypatch: pytest.MonkeyPatch, group: Doubling) -> None:
    """Let decoders end in a sum over ranks, and models have the group."""
    forward = Decoder.forward
    monkeypatch.setattr(Decoder, "forward", lambda self, run, *rest: run.all_reduce(forward(self, run, *rest)))
    for module, names in (
        ("engine.build.cpu", ("NativeModel", "EagerModel", "AdaptedModel")),
        ("engine.build.encoder", ("NativeEncodingModel", "EncodingModel")),
    ):
        for name in names:
            place = f"{module}.{name}"
            monkeypatch.setattr(place, partial(_of(place), group=group))


def _of(place: str) -> Any:
    module, _, name = place.rpartition(".")
    return getattr(__import__(module, fromlist=[name]), name)


@pytest.mark.parametrize(
    ("images", "settings"),
    [
        pytest.param(False, {"kernels": "native"}, marks=needs_compiler),
        (False, {"kernels": "reference"}),
        (False, {"kernels": "torch_cpu", "max_loras": 2}),
        pytest.param(True, {"kernels": "native"}, marks=needs_compiler),
        (True, {"kernels": "torch_cpu"}),
    ],
)
def test_a_model_s_steps_sum_over_its_group(
    images: bool, settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if images:
        save_vision_model(tmp_path)
    else:
        save_model("llama", tmp_path)
    alone = logits(tmp_path, images=images, **settings)
    with monkeypatch.context() as patch:
        summed(patch, Doubling())
        assert torch.equal(logits(tmp_path, images=images, **settings), 2 * alone)
    summed(monkeypatch, Losing())
    with pytest.raises(RankLostError, match="Rank 1 has died"):
        logits(tmp_path, images=images, **settings)

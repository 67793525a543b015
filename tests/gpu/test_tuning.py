"""Owns the test that kernels choose among their configurations on a GPU: each that fits is timed, the fastest taken.
Never judges a time, and never leaves a choice behind for engines."""

from __future__ import annotations

import math

import pytest

from tests.kernels.rows import paged_case
from tests.kernels.triton.cases import check_attention

from kernels.triton.attention import attention  # isort: skip
from kernels.triton.shared import launch  # isort: skip
from kernels.triton.attention.kernel import _KEY, CHUNK_CONFIGS, DECODE_CONFIGS, attend  # isort: skip

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(
    ("name", "configs", "rows"),
    [
        ("attend_decodes", DECODE_CONFIGS, ([1000] * 8, [])),
        ("attend_chunks", CHUNK_CONFIGS, ([], [(500, 200)])),
    ],
)
def test_attention_takes_the_fastest_of_what_fits(
    device: object,
    name: str,
    configs: list[object],
    rows: tuple[list[int], list[tuple[int, int]]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kernel = launch.tuned(configs, _KEY, launch.FORGET)(attend)
    monkeypatch.setattr(attention, name, kernel)
    check_attention(paged_case(*rows, kv_heads=2, group=4, head_dim=128), str(getattr(device, "torch_device", "")))
    (chosen,) = kernel.cache.values()
    times = {config: found[0] for config, found in kernel.configs_timings.items()}
    fitting = {config: ms for config, ms in times.items() if math.isfinite(ms)}
    print({str(config): ms for config, ms in times.items()})
    assert len(fitting) > 1
    assert fitting[chosen] == min(fitting.values())

"""Owns the contract of the form in which a GGUF file is prepared: by settings and processor alone.
Never converts a file: test_gguf_convert and test_prepare do."""

from __future__ import annotations

from typing import Any

import pytest

from engine.checkpoints.gguf_form import MATRIX_UNIT, gguf_form, why_not_stored
from engine.config import EngineConfig
from engine.features import NATIVE, RULES, Group
from kernels.cpu import processor

STORED, WHOLE = {"stored": True, "either": True}, {"stored": False, "either": True}
ONLY_STORED = {"stored": True, "either": False}


@pytest.fixture(autouse=True)
def flags(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setattr(processor, "cpu_flags", lambda: frozenset({"avx512_bf16"}))
    return monkeypatch


def test_a_file_stays_as_it_is_for_engines_on_a_cpu_and_not_on_a_gpu() -> None:
    assert gguf_form(EngineConfig()) == STORED
    assert gguf_form(EngineConfig(), on_gpu=True) == WHOLE


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"kernels": "torch_cpu"}, "kernels is torch_cpu, and only the native kernels"),
        ({"load_format": "dummy"}, "load_format is dummy, and random numbers"),
    ],
    ids=str,
)
def test_settings_that_the_native_kernels_do_not_compute_with_want_bfloat16(settings: dict[str, Any], why: str) -> None:
    config = EngineConfig(**settings)
    assert gguf_form(config) == WHOLE
    assert (why_not_stored(config, matrix_unit=False) or "").startswith(why)


def test_no_setting_alone_excludes_the_native_kernels() -> None:
    """Else the form would have to follow from that setting, too."""
    for rule in RULES:
        if NATIVE in (*rule.features, *rule.against):
            others = {*rule.features, *rule.against, *rule.where} - {NATIVE}
            assert {other.group for other in others} - {Group.SETTING, Group.KERNELS}, rule.reason


@pytest.mark.parametrize(
    ("settings", "form"),
    [({}, WHOLE), ({"dtype": "bfloat16"}, WHOLE), ({"dtype": "float32"}, STORED), ({"activations": "int8"}, STORED)],
    ids=str,
)
def test_a_matrix_unit_wants_bfloat16_for_what_it_multiplies(
    settings: dict[str, Any], form: dict[str, bool], flags: pytest.MonkeyPatch
) -> None:
    flags.setattr(processor, "cpu_flags", lambda: frozenset({MATRIX_UNIT}))
    assert gguf_form(EngineConfig(**settings)) == form


@pytest.mark.parametrize(("quantize", "form"), [("none", WHOLE), ("int8", WHOLE), ("stored", ONLY_STORED)])
def test_a_setting_that_is_written_is_followed_whatever_the_machine_and_blocks_can_be_unpacked(
    quantize: str, form: dict[str, bool]
) -> None:
    """A volume that is only read may have blocks alone: `prepare` fills it with them by default."""
    written: dict[str, Any] = {"quantize": quantize}
    for on_gpu in (False, True):
        assert gguf_form(EngineConfig(**written), on_gpu=on_gpu) == form


@pytest.mark.parametrize("quantize", ["auto", "none", "int8", "stored"])
def test_with_batch_invariance_the_form_follows_from_settings_and_processor_alone(quantize: str) -> None:
    """Whether the network or the disk failed one replica must not decide about the weights of its answers."""
    for on_gpu in (False, True):
        written: dict[str, Any] = {"quantize": quantize}
        form = gguf_form(EngineConfig(**written, batch_invariant=True), on_gpu=on_gpu)
        assert form == {"stored": gguf_form(EngineConfig(**written), on_gpu=on_gpu)["stored"], "either": False}

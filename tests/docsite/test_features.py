"""Owns the promise that the page of features says the same about what goes with what as a start of the engine does.
Never starts an engine; tests/engine/build/test_features.py does."""

from __future__ import annotations

import re
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from docsite.features import MODELS, PLACES, ROWS, Notes, cell, render, sentences, where
from engine import features
from engine.build.facts import facts_of
from engine.config import EngineConfig, SchedulerConfig, SpeculativeConfig
from engine.features import RULES, Feature, find_conflict, turned_on
from engine.models.config import read_model_config
from serve_app.settings.features import APP_RULES
from tests.support.tiny_models import save_model
from tests.support.tiny_vision import save_vision_model

KINDS = {"dense": "llama", "mixture of experts": "qwen3_moe", "hybrid": "qwen3_5", "text and images": "vision"}

SETTINGS: dict[str, dict[str, Any]] = {
    "LoRA adapters": {"max_loras": 1},
    "Prompt lookup": {"speculative": SpeculativeConfig(method="suffix")},
    "A draft model": {"speculative": SpeculativeConfig(method="draft_model", model="small")},
    "A number of drafts": {"num_speculative_tokens": 4},
    "Overlapped steps": {"overlap": True},
    "Weights rounded to 8 bits": {"quantize": "int8"},
    "A checkpoint's own bits": {"quantize": "stored"},
    "Activations in int8": {"activations": "int8", "quantize": "stored"},
    "KV cache in 8 bits": {"kv_cache_dtype": "fp8_e4m3"},
    "Activations in fp8": {"activations": "fp8"},
    "Batch invariance": {"batch_invariant": True},
    "float16": {"dtype": "float16"},
    "CUDA graphs": {"cuda_graphs": "all"},
    "Snapshots of recurrent state": {"scheduler": SchedulerConfig(state_snapshot_tokens=16)},
    "Prompts cut by the engine": {"scheduler": SchedulerConfig(chunk_owner="engine")},
}


def facts(title: str) -> frozenset[Feature]:
    return next(row for name, row in ROWS.items() if name.startswith(title))


def asked(first: str, second: str) -> str:
    """Return the cell of two rows, or of a row and a kind of model."""
    return cell(facts(first), MODELS[second] if second in MODELS else facts(second), Notes()).partition("<")[0]


@pytest.mark.parametrize(
    ("first", "second", "places"),
    [
        ("LoRA", "dense", "N T R G"),
        ("LoRA", "hybrid", "–"),
        ("Prompt lookup", "Overlapped", "N T R G"),
        ("A draft model", "Overlapped", "–"),
        ("Prompt lookup", "hybrid", "N T R"),
        ("A draft model", "dense", "N T R"),
        ("Weights rounded", "hybrid", "N G"),
        ("Weights rounded", "dense", "N G"),
        ("Weights rounded", "text and images", "N"),
        ("LoRA", "text and images", "–"),
        ("Batch invariance", "text and images", "N"),
        ("Batch invariance", "dense", "N G"),
        ("Batch invariance", "hybrid", "N"),
        ("Batch invariance", "Activations in fp8", "–"),
        ("Activations in int8", "Activations in fp8", "or"),
        ("KV cache in 8 bits", "text and images", "N T"),
        ("KV cache in 8 bits", "dense", "N T G"),
        ("KV cache in 8 bits", "hybrid", "N T G"),
        ("KV cache in 8 bits", "CUDA graphs", "G"),
        ("Activations in int8", "dense", "N"),
        ("Activations in int8", "A checkpoint's own bits", "N"),
        ("Activations in int8", "hybrid", "N"),
        ("CUDA graphs", "Prompt lookup", "G"),
        ("Overlapped", "mixture of experts", "N T R G"),
    ],
)
def test_a_cell_says_where_two_go_together(first: str, second: str, places: str) -> None:
    assert asked(first, second) == places


def test_features_that_need_different_places_do_not_go_together_and_both_reasons_are_told() -> None:
    halves, stored = facts("float16"), facts("A checkpoint's own bits")
    assert find_conflict(halves | stored) is None
    places, conflicts = where(halves, stored)
    assert places == ""
    assert {feature for conflict in conflicts for feature in conflict.terms} >= {
        features.FLOAT16,
        features.STORED,
    }


def test_a_cell_has_the_reasons_of_two_and_not_those_of_one_alone() -> None:
    notes = Notes()
    assert cell(facts("Prompt lookup"), MODELS["hybrid"], notes) == "N T R<sup>1</sup>"
    assert cell(facts("LoRA"), MODELS["dense"], notes) == "N T R G"
    (line,) = notes.lines()
    assert line.endswith("on a GPU, recurrent state is not rolled back after a rejected draft.")


def test_every_rule_is_on_the_page_and_every_number_has_its_reason() -> None:
    page = render()
    lines = page.splitlines()
    for rule in (*RULES, *APP_RULES):
        for feature in rule.features:
            named = f"`{feature.setting}`" if feature.setting else feature.title
            assert [line for line in lines if named in line and rule.reason in line], (named, rule.reason)
    told = {int(number) for marks in re.findall(r"<sup>([\d, ]+)</sup>", page) for number in marks.split(",")}
    assert told == {int(number) for number in re.findall(r"^(\d+)\. ", page, re.MULTILINE)}
    assert len([*sentences()]) == sum(len(rule.features) * len(rule.against) for rule in (*RULES, *APP_RULES))


@pytest.mark.parametrize("kind", MODELS)
def test_the_kinds_of_models_are_what_a_start_finds(kind: str, tmp_path: Path) -> None:
    if KINDS[kind] == "vision":
        save_vision_model(tmp_path)
    else:
        save_model(KINDS[kind], tmp_path)
    assert facts_of(read_model_config(tmp_path)).keys() == MODELS[kind]


def test_the_rows_are_what_their_settings_turn_on() -> None:
    plain = turned_on(EngineConfig()).keys()
    for name, row in ROWS.items():
        if row == {features.PACKED}:
            continue  # PACKED is found in the checkpoint.
        found = turned_on(EngineConfig(**SETTINGS[name.partition(" (")[0]])).keys()
        assert row <= found
        assert found - row - plain <= {features.DRAFT_MODEL_NAME, features.STORED}


def test_places_and_models_break_no_rule_by_themselves() -> None:
    assert not [parts for parts in (*PLACES.values(), *MODELS.values()) if find_conflict(parts)]
    both = product(PLACES.values(), (MODELS[kind] for kind in ("dense", "mixture of experts")))
    assert not [place for place, model in both if find_conflict(place | model)]

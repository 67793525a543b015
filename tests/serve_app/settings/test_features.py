"""Owns the promise that each rule of an application is refused, and that outside the table no setting refuses another.
Never starts an application."""

from __future__ import annotations

import ast
from collections import Counter
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from engine.features import TEXT, Conflict, Feature, shown, terms_of
from serve_app.settings import features
from serve_app.settings.application import AppSettings
from serve_app.settings.features import APP_RULES, refused_images
from serve_app.settings.images import ImageSettings

SETTINGS = Path(__file__).resolve().parents[3] / "serve_app" / "settings"

VALUES: dict[Feature, Any] = {
    features.ADAPTERS: {"law": "/law"},
    features.ADAPTER_UPDATES: True,
    features.NO_ADAPTERS: 0,
    features.A_GPU: 1,
    features.NO_GPU: 0,
    features.ACCELERATOR: "H100",
    features.ON_CPU: "cpu",
    features.ON_CUDA: "cuda",
    features.FAKE: "fake",
    features.ENDPOINT: "http://collector:4318/v1/traces",
    features.NO_OTLP: "none",
}
"""A value for each feature's setting that turns it on. What a model accepts is found out later, and so is not here."""

CONFLICTS = [Conflict(rule, one, other) for rule in APP_RULES for one, other in product(rule.features, rule.against)]


def settings(terms: tuple[Feature, ...]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for term in terms:
        *path, name = term.setting.split(".")
        part = found
        for key in path:
            part = part.setdefault(key, {})
        part[name] = VALUES[term]
    return found


@pytest.mark.parametrize(
    "conflict",
    [conflict for conflict in CONFLICTS if conflict.against is not TEXT],
    ids=lambda conflict: " ".join(term.setting for term in conflict.terms),
)
def test_what_breaks_a_rule_is_refused_by_both_and_the_reason(conflict: Conflict) -> None:
    with pytest.raises(ValidationError) as refused:
        AppSettings.model_validate(settings(conflict.terms))
    text = refused.value.errors()[0]["msg"]
    assert text.endswith(f": {conflict.rule.reason}.")
    for term in conflict.terms:
        assert f"{term.setting} is {shown(VALUES[term])}" in text


def test_limits_of_images_are_refused_beside_a_model_that_takes_none_and_the_default_is_not() -> None:
    (conflict,) = [conflict for conflict in CONFLICTS if conflict.against is TEXT]
    refusal = refused_images(ImageSettings(max_per_request=2), "small")
    assert refusal == f"images is set, but small takes text alone: {conflict.rule.reason}."
    assert refused_images(ImageSettings(), "small") is None


def test_every_setting_of_a_rule_has_a_value_that_breaks_it() -> None:
    assert {*terms_of(APP_RULES)} - {features.IMAGES, TEXT} == VALUES.keys()


def test_settings_that_do_not_go_together_are_refused_by_the_table_alone() -> None:
    """What is left are names that mean two things, and numbers that contradict each other or are out of bounds."""
    found: Counter[str] = Counter()
    for path in SETTINGS.glob("*.py"):
        for function in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(function, ast.FunctionDef):
                found[function.name] += sum(isinstance(node, ast.Raise) for node in ast.walk(function))
    raising = {name: count for name, count in found.items() if count}
    assert raising == {
        "_adapters_have_other_names": 1,
        "_bounds_in_order": 1,
        "_is_one": 1,
        "_names_mean_one_thing": 4,
        "_one_or_several": 1,
        "_serves_one_model_or_several": 2,
        "_starts_within_bounds": 1,
        "refuse_shared_names": 1,
        "check_ranks": 4,
    }

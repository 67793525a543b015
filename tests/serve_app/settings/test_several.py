"""Owns the contract of `models`: an application of several models is checked as a whole, and each mistake is one line
that names it.
Never starts an application."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from serve_app.settings.application import AppSettings
from serve_app.settings.model import ModelSettings

FAKE = {"executor": "fake"}


def entry(name: str, **settings: Any) -> dict[str, Any]:
    return {"served_model_name": name, "engine": FAKE, **settings}


def several(*entries: dict[str, Any], **shared: Any) -> AppSettings:
    return AppSettings.model_validate({"models": list(entries), **shared})


def refusal(config: dict[str, Any]) -> tuple[tuple[Any, ...], str]:
    with pytest.raises(ValidationError) as refused:
        AppSettings.model_validate(config)
    (error,) = refused.value.errors()
    assert "\n" not in error["msg"]
    return error["loc"], error["msg"].removeprefix("Value error, ")


def test_each_model_has_its_own_settings_and_what_all_of_them_share() -> None:
    both = several(entry("a", pooling="mean"), entry("b", engine_replicas=3), strict=True, drain_timeout_s=7)
    one, other = both.each_model()
    assert (one.model_id, one.pooling, one.engine_replicas) == ("a", "mean", 1)
    assert (other.model_id, other.pooling, other.engine_replicas) == ("b", "none", 3)
    assert all(alone.strict and alone.drain_timeout_s == 7 and not alone.models for alone in (one, other))
    assert both.total_engines == 4


def test_a_model_alone_is_itself() -> None:
    alone = AppSettings.model_validate({"engine": FAKE, "engine_replicas": 2})
    assert alone.each_model() == (alone,)
    assert alone.engine_names == ("Engine",)
    assert alone.total_engines == 2


def test_what_is_set_for_one_model_is_not_taken_for_set_where_it_is_not() -> None:
    """Serve applies an initial number of replicas only where the config has one."""
    bounds = {"min_replicas": 1, "max_replicas": 4}
    one, other = several(entry("a", autoscaling=bounds), entry("b", autoscaling=bounds, engine_replicas=2)).each_model()
    assert "engine_replicas" not in one.model_fields_set
    assert "engine_replicas" in other.model_fields_set


@pytest.mark.parametrize("name", list(ModelSettings.model_fields))
def test_a_setting_of_one_model_does_not_stand_beside_models(name: str) -> None:
    value = {"max_replicas": 1} if name == "autoscaling" else getattr(AppSettings(), name)
    _, text = refusal({"models": [entry("a")], name: value})
    assert text == f"{name} stands beside models, but it is each model's own: put it into an entry there."


def test_an_empty_list_of_models_is_refused() -> None:
    assert refusal({"models": []})[1] == "models is empty: expected at least one model, or no `models` at all."


@pytest.mark.parametrize(
    ("entries", "text"),
    [
        (
            [entry("a"), entry("b"), entry("a")],
            "models.2.served_model_name is a, which models.0.served_model_name is already: expected another name.",
        ),
        (
            [{"model": "m", "engine": FAKE}, {"model": "m", "engine": FAKE}],
            "models.1.model is m, which models.0.model is already: expected another name.",
        ),
        (
            [entry("a", engine=FAKE | {"max_loras": 1}, lora_adapters={"b": "/b"}), entry("b")],
            "a name in models.0.lora_adapters is b, which models.1.served_model_name is already: "
            "expected another name.",
        ),
        (
            [entry("a", model_aliases={"b": "a"}), entry("b")],
            "a name in models.0.model_aliases is b, which models.1.served_model_name is already: "
            "expected another name.",
        ),
        (
            [entry("a", model_aliases={"gpt-*": "a"}), entry("b", model_aliases={"gpt-*": "b"})],
            "a name in models.1.model_aliases is gpt-*, which a name in models.0.model_aliases is already: "
            "expected another name.",
        ),
    ],
    ids=["names", "models", "adapter", "alias", "aliases"],
)
def test_a_name_that_means_two_things_is_refused_with_both_places(entries: list[dict[str, Any]], text: str) -> None:
    assert refusal({"models": entries})[1] == text


@pytest.mark.parametrize(
    ("aliases", "text"),
    [
        ({"x": "y", "y": "z", "z": "x"}, "model_aliases goes in a circle: x -> y -> z -> x."),
        ({"x": "x"}, "model_aliases goes in a circle: x -> x."),
        ({"w": "x", "x": "y", "y": "x"}, "model_aliases goes in a circle: x -> y -> x."),
        ({"x": "y", "y": "a"}, "model_aliases has x for y, which is an alias itself; name what that stands for: a."),
        ({"x": "b"}, "model_aliases has x for b, which is not served; served are: a."),
    ],
)
def test_an_alias_that_leads_nowhere_is_refused_where_it_stands(aliases: dict[str, str], text: str) -> None:
    assert refusal({"models": [entry("b"), entry("a", model_aliases=aliases)]}) == (("models", 1), text)
    assert refusal({"served_model_name": "a", "model_aliases": aliases}) == ((), text)


def test_the_rules_of_a_models_settings_hold_for_each_and_say_where() -> None:
    config = {"models": [entry("a"), entry("b", lora_adapters={"law": "/law"})]}
    place, text = refusal(config)
    assert place == ("models", 1)
    assert "adapters need engine.max_loras of 1 or more" in text


def test_an_unknown_setting_of_a_model_is_refused_where_it_stands() -> None:
    assert refusal({"models": [entry("a", ingress_replicas=2)]})[0] == ("models", 0, "ingress_replicas")


def test_each_models_engines_have_a_deployment_of_their_own() -> None:
    names = ["org/Qwen3 8B", "org-Qwen3-8B", "smol", "???"]
    assert several(*map(entry, names)).engine_names == (
        "Engine-org-Qwen3-8B",
        "Engine-org-Qwen3-8B-2",
        "Engine-smol",
        "Engine-model",
    )
    assert several(entry("smol")).engine_names == ("Engine-smol",)


def test_each_model_has_the_limits_that_stand_in_its_entry() -> None:
    settings = several(
        entry("a", admission={"max_concurrent_requests": 5, "max_queued_tokens": 6}),
        entry("b"),
        admission={"max_concurrent_requests": 9, "tenant_max_queued_tokens": 3, "tenant_min_priority": -1},
    )
    one, other = settings.gate_policies
    assert (one.deployment.max_concurrent_requests, one.deployment.max_queued_tokens) == (5, 6)
    assert other.of_deployment(1).max_concurrent_requests == 64 + 1024
    assert {policy.tenant.max_queued_tokens for policy in settings.gate_policies} == {3}
    assert {policy.tenant_min_priority for policy in settings.gate_policies} == {-1}
    assert settings.room_policy.limits.max_concurrent_requests == 9
    assert settings.ingress_capacity == 2 * (5 + 64 + 1024)


def test_half_of_a_shared_limit_is_reserved_in_proportion_to_the_shares() -> None:
    settings = several(
        entry("a", admission={"share": 3}), entry("b"), admission={"max_concurrent_requests": 16}, ingress_replicas=2
    )
    assert settings.room_policy.requests() == (8, (3, 1))
    assert settings.room_policy.tokens() is None

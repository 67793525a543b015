"""Owns the promise that the reference of settings begins with those to know, and shows those for experts last.
Never compares a description with itself; tests/docsite/test_pages.py compares the written page with the code."""

from __future__ import annotations

import dataclasses
import re
from typing import Literal, get_args, get_origin, get_type_hints

from pydantic import BaseModel

from docsite import reference
from engine.config import EngineConfig, SchedulerConfig, Targets
from engine.presets import PRESETS
from loadtest.server import ROOT

MOST_FIRST = 15
"""How many settings a page can ask its reader to know."""


def section(page: str, title: str) -> list[str]:
    """Return the names in the table under a heading."""
    text = page.partition(f"{title}\n")[2].partition("\n#")[0]
    return re.findall(r"^\| `([\w.]+)` \|", text, re.MULTILINE)


def test_the_page_begins_with_a_handful_of_settings_each_of_them_documented_below() -> None:
    page = reference.render()
    first = section(page, f"## {reference.FIRST_TITLE}")
    assert page.startswith(f"## {reference.FIRST_TITLE}")
    assert len(first) == sum(map(len, reference.FIRST.values())) <= MOST_FIRST
    for level, names in reference.FIRST.items():
        assert set(names) <= set(section(page, f"## {reference.SECTIONS[level]}"))


def test_a_setting_that_has_settings_of_its_own_has_their_table() -> None:
    """Regression: `engine.targets`, which config.yaml sets, was a bare name, and its two settings stood nowhere."""
    kinds = {f"{level.__name__}.{row.name}": row.kind for level in reference.SECTIONS for row in reference._rows(level)}
    assert kinds["EngineConfig.targets"] == f"[table]({reference.anchor(reference.SECTIONS[Targets])})"
    assert {name: kind for name, kind in kinds.items() if re.search("[A-Z]", kind.partition("](")[0])} == {}
    assert section(reference.render(), f"## {reference.SECTIONS[Targets]}") == ["tpot_ms", "ttft_ms"]


def test_the_guide_to_settings_names_those_that_the_reference_has_first() -> None:
    guide = (ROOT / "docs" / "how-to" / "tuning.md").read_text(encoding="utf-8")
    assert [
        name for name in section(reference.render(), f"## {reference.FIRST_TITLE}") if f"`{name}`" not in guide
    ] == []


def test_the_scheduler_shows_a_handful_of_settings_and_the_rest_for_experts() -> None:
    page = reference.render()
    shown = section(page, f"## {reference.SECTIONS[SchedulerConfig]}")
    expert = section(page, "### `args.engine.scheduler` for experts")
    assert shown == [
        *("preset", "reserve_mode", "preempt_policy", "long_prefill_token_threshold"),
        *("priority_age_ms", "state_snapshot_tokens"),
    ]
    assert shown + expert == [spec.name for spec in dataclasses.fields(SchedulerConfig)]


def test_no_setting_is_lost_between_the_two_tables_of_a_level() -> None:
    page = reference.render()
    both = section(page, f"## {reference.SECTIONS[EngineConfig]}") + section(page, "### `args.engine` for experts")
    assert sorted(both) == sorted(spec.name for spec in dataclasses.fields(EngineConfig))


NAMES_OF_OTHERS = {"preset", "tool_parser", "reasoning_parser"}
"""Settings whose values are names of designs and formats, which are explained on pages of their own."""


def test_each_value_of_a_setting_is_explained_where_the_setting_is() -> None:
    told = {}
    for level in reference.SECTIONS:
        hints = get_type_hints(level)
        for name, text in descriptions(level).items():
            for value in get_args(hints[name]) if get_origin(hints[name]) is Literal else ():
                if name not in NAMES_OF_OTHERS:
                    told[f"{level.__name__}.{name}: {value}"] = re.search(rf"`(\w+: )?{value}`", text)
    assert len(told) > 50
    assert [value for value, found in told.items() if not found] == []


def descriptions(level: type) -> dict[str, str]:
    if issubclass(level, BaseModel):
        return {name: spec.description or "" for name, spec in level.model_fields.items()}
    return {spec.name: spec.metadata["description"] for spec in dataclasses.fields(level)}


def test_the_table_of_presets_has_what_each_of_them_sets() -> None:
    head, _, *lines = reference.render_presets().splitlines()
    names = re.findall(r"`(\w+)`", head)
    found: dict[str, dict[str, str]] = {name: {} for name in names}
    for line in lines:
        setting, _, *cells = (cell.strip().strip("`") for cell in line.strip("|").split("|"))
        for name, cell in zip(names, cells, strict=True):
            if cell:
                found[name][setting] = cell
    assert found == {name: {key: str(value) for key, value in preset.items()} for name, preset in PRESETS.items()}

"""Owns the names of the parsers in the settings: those of the tables, and what `auto` and `none` mean."""

from __future__ import annotations

from typing import get_args

from serve_app.parsing.reasoning_parsers import REASONING_PARSERS
from serve_app.parsing.tools import TOOL_PARSERS
from serve_app.settings.application import AppSettings


def test_every_parser_can_be_named_in_the_settings_and_nothing_else() -> None:
    fields = AppSettings.model_fields
    assert set(get_args(fields["tool_parser"].annotation)) == {"auto", "none", *TOOL_PARSERS}
    assert set(get_args(fields["reasoning_parser"].annotation)) == {"auto", "none", *REASONING_PARSERS}

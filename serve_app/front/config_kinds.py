"""Owns what kinds of values Ray takes for the keys of a `serve run` config, as far as our checks know them.
Never reads a config: `config_file` does."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

ARGS = "args"
REFUSED = "expected {expected} (given: {given})"
REFUSED_NULL = "expected {expected}, or no such key (given: None)"
_SWITCH = frozenset(("0", "1", "true", "false", "yes", "no", "on", "off", "t", "f", "y", "n"))


@dataclass(frozen=True, slots=True)
class Kind:
    """What Ray takes for a key. `expected`: in words. `is_secret`: a refusal does not show the value."""

    expected: str
    takes: Callable[[Any], bool]
    is_secret: bool = False

    def refusal(self, value: Any) -> str:
        told = REFUSED_NULL if value is None else REFUSED
        return told.format(expected=self.expected, given="…" if self.is_secret else repr(value))


def _or_null(kind: Kind) -> Kind:
    return Kind(kind.expected, lambda value: value is None or kind.takes(value), kind.is_secret)


def _number(value: Any) -> float:
    """Read a number as Ray does, also from a text; NaN if it is none."""
    if not isinstance(value, int | float | str) or (isinstance(value, str) and not value.isascii()):
        return math.nan
    try:
        return float(value)
    except (ValueError, OverflowError):
        return math.nan


def _is_whole(value: Any) -> bool:
    has_power = isinstance(value, str) and "e" in value.lower()
    is_beyond = isinstance(value, float) and abs(value) >= 2**63
    return _number(value).is_integer() and not has_power and not is_beyond


def _is_switch(value: Any) -> bool:
    return value.lower() in _SWITCH if isinstance(value, str) else isinstance(value, int | float) and value in (0, 1)


_MAPPING = Kind("a mapping", lambda value: isinstance(value, dict))
_MAPPINGS = Kind("a list of mappings", lambda value: isinstance(value, list) and all(map(_MAPPING.takes, value)))
_TEXT = Kind("a text", lambda value: isinstance(value, str))
_PASSWORD = Kind("a text, such as digits in quotes", _TEXT.takes, is_secret=True)
_NAME = Kind("a text that is not empty", lambda value: isinstance(value, str) and value != "")
_PERCENTAGE = Kind("a number from 0 to 100", lambda value: 0 <= _number(value) <= 100)
_SECONDS = Kind("a whole number of seconds", _is_whole)
_YES_OR_NO = Kind("true or false", _is_switch)
TOP_KINDS: dict[str, Kind] = {
    "grpc_options": _MAPPING,
    **dict.fromkeys(("controller_options", "logging_config", "tracing_config"), _or_null(_MAPPING)),
    "target_capacity": _or_null(_PERCENTAGE),
}
HTTP_KINDS: dict[str, Kind] = {
    "root_path": _TEXT,
    "keep_alive_timeout_s": _SECONDS,
    **dict.fromkeys(("ssl_keyfile", "ssl_certfile", "ssl_ca_certs"), _or_null(_TEXT)),
    "ssl_keyfile_password": _or_null(_PASSWORD),
}
APPLICATION_KINDS: dict[str, Kind] = {
    "name": _NAME,
    **dict.fromkeys(("runtime_env", ARGS), _MAPPING),
    "deployments": _MAPPINGS,
    **dict.fromkeys(("autoscaling_policy", "logging_config"), _or_null(_MAPPING)),
    "external_scaler_enabled": _YES_OR_NO,
}
"""What Ray takes for these keys, as far as a section that was left empty, and is null, or another kind of value goes.
Ray would say so as well, but not before it has started. A test compares them with Ray."""

"""Owns the names that clients may ask for instead of a served one: patterns of the config, and what each stands for.
Never knows what is served: `serve_app.adapters.names` does, and looks there first."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase

_WILDCARDS = "*?["


class Aliases:
    """`by_pattern`: as a shell matches file names. A pattern without wildcards is a name, and goes before the others,
    of which the first that matches counts."""

    def __init__(self, by_pattern: Mapping[str, str]) -> None:
        self.names = {alias: target for alias, target in by_pattern.items() if not any(c in alias for c in _WILDCARDS)}
        """Those that can be listed."""
        self._patterns = {pattern: target for pattern, target in by_pattern.items() if pattern not in self.names}

    def target(self, asked: str) -> str | None:
        """What a name stands for; None: nothing."""
        matching = (target for pattern, target in self._patterns.items() if fnmatchcase(asked, pattern))
        return self.names.get(asked) or next(matching, None)

"""Resolves aliases: the config's patterns of names that clients may ask for instead of a served name.
Never knows what is served: `serve_app.adapters.names` does, and looks there first."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase

_WILDCARDS = "*?["


class Aliases:
    """Maps names to targets. `by_pattern`: patterns are matched as a shell matches file names. A pattern without
    wildcards is a name, and wins over the others; among these the first match wins."""

    def __init__(self, by_pattern: Mapping[str, str]) -> None:
        self.names = {alias: target for alias, target in by_pattern.items() if not any(c in alias for c in _WILDCARDS)}
        """The aliases without wildcards, which can be listed."""
        self._patterns = {pattern: target for pattern, target in by_pattern.items() if pattern not in self.names}

    def target(self, asked: str) -> str | None:
        """Return what a name stands for; None if it is no alias."""
        matching = (target for pattern, target in self._patterns.items() if fnmatchcase(asked, pattern))
        return self.names.get(asked) or next(matching, None)

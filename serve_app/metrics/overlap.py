"""Counts how much of the routed prompts was expected in the chosen engines' caches.
Never asks an engine: the router adds to it. It is a module of its own for the same reason as
serve_app.engines.engine_count."""

from __future__ import annotations

_prompt_tokens = 0  # written only by the router's thread, read by any
_overlap_tokens = 0


def add(prompt_tokens: int, overlap_tokens: int) -> None:
    """Count a routed call; called by the router, on its thread."""
    global _prompt_tokens, _overlap_tokens
    _prompt_tokens += prompt_tokens
    _overlap_tokens += overlap_tokens


def totals() -> tuple[int, int]:
    """Return the prompt tokens of all routed calls, and how many of them were expected to be cached."""
    return _prompt_tokens, _overlap_tokens

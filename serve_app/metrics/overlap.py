"""Owns how much of the routed prompts was expected in the chosen engines' caches, for whoever reports it.
Never asks anybody: the router adds to it. It stands apart from the router, which Serve pickles by value, as
serve_app.engines.engine_count does."""

from __future__ import annotations

_prompt_tokens = 0  # written by the router's thread alone, read by any
_overlap_tokens = 0


def add(prompt_tokens: int, overlap_tokens: int) -> None:
    """A call was routed. Called by the router, on its thread."""
    global _prompt_tokens, _overlap_tokens
    _prompt_tokens += prompt_tokens
    _overlap_tokens += overlap_tokens


def totals() -> tuple[int, int]:
    """Prompt tokens of the calls that were routed, and how many of them were expected to be cached there."""
    return _prompt_tokens, _overlap_tokens

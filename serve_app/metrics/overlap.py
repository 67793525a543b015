"""Counts how much of the routed prompts was expected in the chosen engines' caches, by deployment.
Never asks an engine: the router adds to it. It is a module of its own for the same reason as
serve_app.engines.engine_count."""

from __future__ import annotations

from serve_app.settings.engine_names import ENGINE

_totals: dict[str, tuple[int, int]] = {}  # written only by the routers' thread, read by any


def add(prompt_tokens: int, overlap_tokens: int, deployment: str = ENGINE) -> None:
    """Count a routed call; called by the router, on its thread."""
    prompts, overlaps = totals(deployment)
    _totals[deployment] = prompts + prompt_tokens, overlaps + overlap_tokens


def totals(deployment: str = ENGINE) -> tuple[int, int]:
    """Return the prompt tokens of all routed calls, and how many of them were expected to be cached."""
    return _totals.get(deployment, (0, 0))

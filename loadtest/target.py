"""Owns what is known of the server under load before and after it: its address, its model, what it holds.
Never sends a request of the load itself."""

from __future__ import annotations

import json
import urllib.request
from dataclasses import dataclass
from typing import Any

_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class Target:
    """The server, and how it is asked."""

    url: str
    model: str
    timeout_s: float
    keys: dict[str, str]
    """API keys by tenant; the first is that of requests of no tenant."""

    def key_of(self, tenant: str | None) -> str | None:
        return next(iter(self.keys.values()), None) if tenant is None else self.keys[tenant]


@dataclass(frozen=True, slots=True)
class Held:
    """What a server holds at a moment, of all engines."""

    requests: int
    """Running, waiting, or live in the ingress, whichever is most."""
    blocks: int
    """Of the KV cache, that requests hold; what is only cached is not among them."""

    def left_over(self, before: Held) -> str | None:
        """What there is beyond `before`; None if nothing."""
        if self.requests <= before.requests and self.blocks <= before.blocks:
            return None
        return (
            f"the server still holds {self.requests} requests and {self.blocks} blocks; "
            f"before the load it held {before.requests} and {before.blocks}"
        )


def first_model(target: Target) -> str:
    """Raises: OSError: no answer, or one that names no model."""
    try:
        return str(_get(target, "/v1/models")["data"][0]["id"])
    except (ValueError, LookupError, TypeError) as bad:
        raise OSError(f"{target.url}/v1/models names no model: {bad!r}") from bad


def held(target: Target) -> Held:
    """As GET /load says, which this project's server has.

    Raises:
        OSError: no answer, or another server's.
    """
    try:
        found = _get(target, "/load")
        engines = found["engines"]
        in_engines = sum(engine["num_running"] + engine["num_waiting"] for engine in engines)
        blocks = sum(engine["num_held_blocks"] for engine in engines)
        return Held(max(in_engines, found["ingress"]["num_live"]), blocks)
    except (ValueError, LookupError, TypeError) as bad:
        raise OSError(f"{target.url}/load does not say what the server holds: {bad!r}") from bad


def _get(target: Target, path: str) -> Any:
    key = target.key_of(None)
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    request = urllib.request.Request(f"{target.url}{path}", headers=headers)
    with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as response:
        return json.load(response)

"""Owns the facts about the server under load: its address, its model, and what it holds before and after the load.
Never sends a request of the load itself."""

from __future__ import annotations

import json
import urllib.request
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class Target:
    """The server, and how to send it requests."""

    url: str
    model: str
    timeout_s: float
    keys: dict[str, str]
    """API keys by tenant. Requests without a tenant use the first."""

    @property
    def prefix(self) -> str:
        """The URL's path, which every request's path follows: a server may stand behind a route prefix."""
        return urlsplit(self.url).path

    def key_of(self, tenant: str | None) -> str | None:
        return next(iter(self.keys.values()), None) if tenant is None else self.keys[tenant]


@dataclass(frozen=True, slots=True)
class Held:
    """What all engines of a server hold at one moment."""

    requests: int
    """The larger of the requests in the engines (running or waiting) and those live in the ingress."""
    blocks: int
    """KV cache blocks that requests hold. Blocks that are only cached do not count."""

    def left_over(self, before: Held) -> str | None:
        """Describe what is held beyond `before`; None if nothing is."""
        if self.requests <= before.requests and self.blocks <= before.blocks:
            return None
        return (
            f"the server still holds {self.requests} requests and {self.blocks} blocks; "
            f"before the load it held {before.requests} and {before.blocks}"
        )


def first_model(target: Target) -> str:
    """Raises: OSError: there is no answer, or it names no model."""
    try:
        return str(_get(target, "/v1/models")["data"][0]["id"])
    except (ValueError, LookupError, TypeError) as bad:
        raise OSError(f"{target.url}/v1/models names no model: {bad!r}") from bad


def held(target: Target) -> Held:
    """Ask GET /load, which only this project's server has.

    Raises:
        OSError: there is no answer, or it is not of the expected form.
    """
    try:
        found = _get(target, "/load")
        engines = found["engines"]
        for name, model in found.get("models", {}).items():
            if error := model.get("error"):
                raise OSError(f"{target.url}/load does not say what {name} holds: {error['message']}")
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

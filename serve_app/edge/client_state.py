"""Owns what the ingress tells the outermost ASGI layer about its client. It is only seen if both run in one process,
because Ray's proxy sends a copy of the scope.
Never decides when to give a client up; serve_app.api.http.asgi does."""

from __future__ import annotations

from dataclasses import dataclass

from starlette.types import Scope

_KEY = "serve_app.client_state"


@dataclass(slots=True)
class ClientState:
    is_gone: bool = False
    """There is nobody to answer: the client left, or does not read its answer."""


def track_client(scope: Scope) -> ClientState:
    """Attach a new state to the scope. Layers in between may copy the scope; the copies share the state."""
    state = ClientState()
    scope[_KEY] = state
    return state


def give_client_up(scope: Scope) -> None:
    state = scope.get(_KEY)
    if isinstance(state, ClientState):
        state.is_gone = True

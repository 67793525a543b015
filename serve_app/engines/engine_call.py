"""Owns what one unary Serve call to an engine replica carries.
Never holds text or HTTP: an engine takes token ids, and a router reads them to place the call."""

from __future__ import annotations

from dataclasses import dataclass

from engine.protocol import Submission


@dataclass(frozen=True, slots=True)
class ChannelAddress:
    """Where the tokens of a call go, and the keys that open the door there; see serve_app.channel."""

    endpoint: str
    """ZeroMQ endpoint of the ingress replica, such as tcp://10.0.0.7:41234."""
    server_key: bytes
    """CURVE public key of the ingress: an engine talks to nobody else at that endpoint."""
    public_key: bytes
    secret_key: bytes
    """CURVE key pair that the ingress lets in. It travels by the Serve call only."""


@dataclass(frozen=True, slots=True)
class EngineCall:
    """One request to one engine replica. A stream that moves to another replica makes a call there."""

    submission: Submission
    stream_id: int
    """Names the call on the channel; never reused by an ingress replica."""
    channel: ChannelAddress
    session: str | None = None
    """Calls of one session are routed to the same replica while its load allows."""
    avoid: tuple[str, ...] = ()
    """Replica ids that this request has failed on."""
    num_waiting: int = 0
    """Requests that wait in the ingress for a place with the engines; these are to know it, for scaling."""

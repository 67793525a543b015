"""Defines the contents of one unary Serve call to an engine replica.
Never holds text or HTTP: an engine takes token ids, and the router reads these to place the call."""

from __future__ import annotations

from dataclasses import dataclass

from engine.protocol import Submission


@dataclass(frozen=True, slots=True)
class ChannelAddress:
    """Where the tokens of a call go, and the keys for the connection; see serve_app.channel."""

    endpoint: str
    """The ZeroMQ endpoint of the ingress replica, such as tcp://10.0.0.7:41234."""
    server_key: bytes
    """The CURVE public key of the ingress: an engine talks to no other process at that endpoint."""
    public_key: bytes
    secret_key: bytes
    """The CURVE key pair that the ingress lets in. It only travels in the Serve call."""


@dataclass(frozen=True, slots=True)
class EngineCall:
    """One request to one engine replica. A stream that moves to another replica makes a call there."""

    submission: Submission
    stream_id: int
    """Identifies the call on the channel; an ingress replica never reuses it."""
    channel: ChannelAddress
    session: str | None = None
    """Calls of one session are routed to the same replica as long as its load allows."""
    avoid: tuple[str, ...] = ()
    """The ids of replicas at which this request has failed."""
    num_waiting: int = 0
    """How many requests wait in the ingress for a place with the engines, which use the number for scaling."""
    files: str = ""
    """Only an engine whose model has these files may take the call: an answer continues with the weights that began
    it. Empty: any engine of the model."""

"""Makes the ZeroMQ sockets of both ends of the token channel, with their keys and limits.
Never interprets a message, and knows nothing of requests."""

from __future__ import annotations

import asyncio
import hmac
from typing import cast

import zmq
import zmq.asyncio
from zmq.auth.asyncio import AsyncioAuthenticator

from serve_app.engines.engine_call import ChannelAddress

MAX_FRAME_BYTES = 64 * 2**20
"""The limit of one step's events for one ingress replica; by far the largest are log-probabilities of long prompts."""
MAX_QUEUED_FRAMES = 1000
"""The most frames that wait for a peer that does not read; `send_now` refuses more."""
HEARTBEAT_MS = 1000
_ZAP_DOMAIN = "chunkserve"


def listen(context: zmq.asyncio.Context, host: str) -> tuple[zmq.asyncio.Socket, AsyncioAuthenticator, ChannelAddress]:
    """Open a socket on a free port of `host`. It only lets in peers with the key pair in the returned address: an
    unknown peer fails the handshake, and none of its messages is read. The caller must stop the authenticator at the
    end."""
    server_public, server_secret = zmq.curve_keypair()
    public, secret = zmq.curve_keypair()
    authenticator = AsyncioAuthenticator(context)
    authenticator.start()
    authenticator.configure_curve_callback(_ZAP_DOMAIN, _OneKey(public))
    socket = _limited(context.socket(zmq.ROUTER))
    socket.zap_domain = _ZAP_DOMAIN.encode()
    socket.curve_server, socket.curve_secretkey = True, server_secret
    written = f"[{host}]" if ":" in host else host
    socket.ipv6 = ":" in host
    port = socket.bind_to_random_port(f"tcp://{written}")
    return socket, authenticator, ChannelAddress(f"tcp://{written}:{port}", server_public, public, secret)


def connect(context: zmq.asyncio.Context, address: ChannelAddress) -> zmq.asyncio.Socket:
    """Open a socket that connects, and reconnects, by itself. Messages sent meanwhile wait, up to the limit."""
    socket = _limited(context.socket(zmq.DEALER))
    socket.curve_serverkey = address.server_key
    socket.curve_publickey, socket.curve_secretkey = address.public_key, address.secret_key
    socket.ipv6 = "[" in address.endpoint
    socket.connect(address.endpoint)
    return socket


def send_now(socket: zmq.asyncio.Socket, parts: list[bytes]) -> bool:
    """Send a message without waiting; return whether the socket took it."""
    try:
        cast("asyncio.Future[None]", socket.send_multipart(parts, zmq.NOBLOCK)).result()
    except zmq.Again:
        return False
    return True


def _limited(socket: zmq.asyncio.Socket) -> zmq.asyncio.Socket:
    socket.linger = 0
    socket.maxmsgsize = MAX_FRAME_BYTES
    socket.sndhwm = socket.rcvhwm = MAX_QUEUED_FRAMES
    socket.heartbeat_ivl, socket.heartbeat_timeout = HEARTBEAT_MS, 3 * HEARTBEAT_MS
    return socket


class _OneKey:
    """Lets only the holders of one key connect."""

    def __init__(self, public_key: bytes) -> None:
        self._public_key = public_key

    def callback(self, domain: str, key: bytes) -> bool:
        return hmac.compare_digest(key, self._public_key)

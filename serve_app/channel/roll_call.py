"""Asks engine replicas that are not heard of, new ones and those that lost the connection, to beat for this ingress.
Never waits for one that hangs: a silent engine is asked again as long as it exists."""

from __future__ import annotations

import asyncio
import logging

from grpc.aio import AioRpcError
from ray.exceptions import RayError
from ray.serve.exceptions import DeploymentUnavailableError, RequestCancelledError
from ray.serve.handle import DeploymentHandle

from serve_app.channel.token_receiver import TokenReceiver

logger = logging.getLogger(__name__)

LOOK_S = 1.0
ANSWER_S = 5.0


async def call_the_roll(engine: DeploymentHandle, receiver: TokenReceiver) -> None:
    """Run forever; whenever an engine replica is not heard of, ask all of them to beat here."""
    while True:
        await asyncio.sleep(LOOK_S)
        if receiver.unheard:
            await _ask_all(engine, receiver)


async def _ask_all(engine: DeploymentHandle, receiver: TokenReceiver) -> None:
    try:
        async with asyncio.timeout(ANSWER_S):
            await engine.broadcast("beat_for", receiver.address).results_async()
    except (RayError, AioRpcError, DeploymentUnavailableError, RequestCancelledError, TimeoutError) as error:
        # A replica that hangs does not answer; the others got the call.
        logger.info("not every engine replica has answered the roll call: %s", type(error).__name__)

"""Asks every replica of a deployment for its measurements or its activity.
Never fails because a replica does not answer: it returns how many did not."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable
from typing import Any, TypeVar

from grpc.aio import AioRpcError
from ray.exceptions import RayError
from ray.serve.exceptions import DeploymentUnavailableError, RequestCancelledError
from ray.serve.handle import DeploymentHandle

from serve_app.metrics.values import MalformedSamples, decode

T = TypeVar("T")
logger = logging.getLogger(__name__)

TIMEOUT_S = 3.0
"""By default Prometheus allows a scrape 10 s; a replica with a running event loop answers in milliseconds."""

_FAILURES = (
    RayError,
    AioRpcError,
    DeploymentUnavailableError,
    RequestCancelledError,
    MalformedSamples,
    TimeoutError,
)


async def gather(handle: DeploymentHandle, method: str, kind: type[T], *arguments: object) -> tuple[list[T], int]:
    """Return the answers that come in time, and how many replicas did not answer; 1 if none could be asked.

    `method` must return a `kind`, encoded.
    """
    try:
        async with asyncio.timeout(TIMEOUT_S):
            # Private to Ray, because the public method loses all answers when one does not come.
            calls = await handle.broadcast(method, *arguments)._fetch_replica_results_async()
    except _FAILURES as error:
        logger.warning("%s: no replica could be asked: %s", method, type(error).__name__)
        return [], 1
    answers = await asyncio.gather(*(_answer(call.get_async(), method, kind) for call in calls))
    received = [answer for answer in answers if answer is not None]
    return received, len(answers) - len(received)


async def _answer(call: Awaitable[Any], method: str, kind: type[T]) -> T | None:
    try:
        async with asyncio.timeout(TIMEOUT_S):
            return decode(await call, kind)
    except _FAILURES as error:
        logger.warning("%s: a replica did not answer: %s", method, type(error).__name__)
        return None

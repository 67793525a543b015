"""Serves vLLM's two routes that load and unload adapters while the server runs.
Never decides who may use them: they need the admin key, see serve_app.auth."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from contextvars import Context
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from pydantic import Field
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from serve_app.api.admin.control import MAX_BODY_BYTES
from serve_app.api.http.asgi import read_json_body
from serve_app.api.models.lane import Lane
from serve_app.api.models.lanes import Lanes
from serve_app.api.requests.schema import parse_request
from serve_app.api.requests.strict_model import StrictModel
from serve_app.auth.keys import Keys, NeedsAdminKey
from serve_app.errors.api_error import ApiError
from serve_app.settings.adapter_name import AdapterName

logger = logging.getLogger(__name__)

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"


class LoadAdapterRequest(StrictModel):
    lora_name: AdapterName
    """The name by which clients ask for the adapter, as `model`."""
    lora_path: str = Field(min_length=1, max_length=1024)
    """A directory as PEFT writes it, which every engine replica can read and which must not change."""
    load_inplace: bool = False
    """Replace an adapter that already has the name. Running requests keep the old one until they end."""
    model: str | None = None
    """The served model that the adapter belongs to. Needed if the server has several."""


class UnloadAdapterRequest(StrictModel):
    lora_name: AdapterName
    model: str | None = None
    """As for loading."""


@dataclass(frozen=True, slots=True)
class AdapterRoutes:
    lanes: Lanes
    _one_at_a_time: asyncio.Lock = field(default_factory=asyncio.Lock)
    _running: set[asyncio.Task[None]] = field(default_factory=set)
    """The change that is being made, kept here because an event loop does not keep its tasks alive."""

    async def load(self, request: Request) -> Response:
        body = await read_json_body(request.scope, request.receive, MAX_BODY_BYTES)
        asked = parse_request(LoadAdapterRequest, body)
        lane, name = self._lane(asked.model), asked.lora_name
        for other in self.lanes:
            if other.names.is_own(name):
                text = f"lora_name is {name}, which is the model's own name."
                raise ApiError(400, text, param="lora_name", code="invalid_value")
        await lane.awake()  # before the lock: a model that takes long to wake holds up no other model's adapters
        await self._complete(partial(self._load, lane, asked))
        return PlainTextResponse(f"Success: LoRA adapter '{name}' added successfully.")

    async def _load(self, lane: Lane, asked: LoadAdapterRequest) -> None:
        name = asked.lora_name
        for other in self.lanes:
            if other is not lane and other.names.get(name) is not None:
                text = f"The adapter '{name}' has already been loaded for the model {other.model.id}."
                raise ApiError(400, text, param="lora_name", code="invalid_value")
        before = lane.names.get(name)
        if before is not None and not asked.load_inplace:
            text = f"The adapter '{name}' has already been loaded: set load_inplace to replace it."
            raise ApiError(400, text, param="lora_name", code="invalid_value")
        lane.names.put(await lane.client.load_adapter(name, asked.lora_path, before))

    async def unload(self, request: Request) -> Response:
        body = await read_json_body(request.scope, request.receive, MAX_BODY_BYTES)
        asked = parse_request(UnloadAdapterRequest, body)
        lane, name = self._lane(asked.model), asked.lora_name
        await self._complete(partial(self._unload, lane, name))
        return PlainTextResponse(f"Success: LoRA adapter '{name}' removed successfully.")

    async def _unload(self, lane: Lane, name: str) -> None:
        # An unload that failed may have reached some replicas, this one among them: a further one tells them all.
        is_known = lane.names.get(name) is not None
        await lane.client.unload_adapter(name)
        lane.names.remove(name)
        if not is_known:
            text = f"The adapter '{name}' cannot be found: it is not loaded."
            raise ApiError(404, text, param="lora_name", code="model_not_found")

    async def _complete(self, change: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Make a change when it is its turn. Once begun, it goes on if the client leaves: half of it would leave
        replicas with different adapters."""
        await self._one_at_a_time.acquire()
        # Not in the request's context: Serve cancels the calls that were made there when the client leaves.
        task = asyncio.create_task(change(), context=Context())
        self._running.add(task)
        task.add_done_callback(self._end)
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            task.add_done_callback(_log_failure)
            raise

    def _end(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        self._one_at_a_time.release()

    def _lane(self, asked: str | None) -> Lane:
        """Find the model that is meant, and check that its adapters may change.

        Raises:
            ApiError: 400 or 404, no model is named, or none that there is; 403, they may not.
        """
        if asked is None and self.lanes.are_several:
            models = ", ".join(lane.model.id for lane in self.lanes)
            text = f"model: name the model that the adapter is for; this server has {models}."
            raise ApiError(400, text, param="model", code="missing_required_parameter")
        lane = self.lanes.named(asked)
        if not lane.allow_lora_updates:
            text = "Adapters are those of the server's config: allow_lora_updates is false there."
            raise ApiError(403, text, type="permission_error", code="lora_updates_disabled")
        return lane

    def routes(self, keys: Keys) -> list[Route]:
        guard = [Middleware(NeedsAdminKey, keys=keys)]
        handlers = {LOAD: self.load, UNLOAD: self.unload}
        return [Route(path, handler, methods=["POST"], middleware=guard) for path, handler in handlers.items()]


def _log_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.warning("a change of adapters failed after its client had left", exc_info=error)

"""Owns what belongs to one served model in an ingress replica: its engines' client, tokenizer, names, gate and counts.
Never chooses between models: `lanes` does."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol

from engine.protocol import ErrorCode, RequestRejected
from serve_app.adapters.names import AdapterNames
from serve_app.admission.gate import Gate
from serve_app.api.generation.answer_readers import content_stops, thought_counter
from serve_app.api.generation.submission import Prepared
from serve_app.api.generation.thoughts import ThoughtCounter
from serve_app.api.requests.schema import ChatRequest
from serve_app.api.text.content_stops import ContentStops
from serve_app.api.text.tokenizer import Tokenizer
from serve_app.engines.engine_client import EngineClient, ServedModel
from serve_app.engines.engine_load import EngineLoad
from serve_app.metrics.ingress_recorder import IngressRecorder


class Sleeper(Protocol):
    """A model that may have no engine for a while."""

    @property
    def is_known(self) -> bool:
        """Whether an engine has told what it serves since this replica started."""
        ...

    async def wake(self) -> None:
        """Return once there is an engine; start one if there is none.

        Raises:
            ApiError: 503, there is none in time.
        """
        ...


@dataclass(frozen=True, slots=True)
class Lane:
    client: EngineClient
    tokenizer: Tokenizer
    names: AdapterNames
    gate: Gate
    recorder: IngressRecorder
    engine_load: Callable[[], EngineLoad | None] = lambda: None
    allow_lora_updates: bool = False
    sleeper: Sleeper | None = None
    """None if there is always an engine."""
    ask_adapters: Callable[[], Awaitable[None]] | None = None
    """Asks engines for their adapters again, and enters these in `names`."""

    @property
    def model(self) -> ServedModel:
        return self.names.base

    async def known(self) -> None:
        """Wait until an engine has told what it serves, so that a request can be read.

        Raises:
            ApiError: 503, the model cannot be woken.
        """
        if self.sleeper is not None and not self.sleeper.is_known:
            await self.sleeper.wake()

    async def awake(self) -> None:
        """Wait until there is an engine. Raises ApiError as `known`."""
        if self.sleeper is not None:
            await self.sleeper.wake()

    async def with_adapter(self, asked: str) -> ServedModel:
        """Return what answers to the name of an adapter of the config of which nothing is known but the path, because
        the engines that were asked did not have it: others are asked.

        Raises:
            ApiError: as `known`.
            EngineError: no engine has read the adapter yet.
        """
        await self.awake()
        if self.ask_adapters is not None:
            await self.ask_adapters()
        found = self.names.served(asked)
        if found.adapter is not None and not found.adapter.digest:
            text = f"No engine has read the adapter {found.adapter.name} yet."
            raise RequestRejected(ErrorCode.ADAPTER_UNAVAILABLE, text, "model")
        return found

    def thoughts(self, request: ChatRequest, ready: Prepared) -> ThoughtCounter | None:
        """See thought_counter."""
        return thought_counter(request, self.tokenizer, self.model, ready)

    def stops(self, request: ChatRequest, ready: Prepared) -> ContentStops | None:
        """See content_stops."""
        return content_stops(request, self.tokenizer, self.model, ready)

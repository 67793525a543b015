"""Owns what belongs to one served model in an ingress replica: its engines' client, tokenizer, names, gate and counts.
Never chooses between models: `lanes` does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from serve_app.adapters.names import AdapterNames
from serve_app.admission.gate import Gate
from serve_app.api.generation.chat_reader import make_parsers, needs_reader, prompt_end
from serve_app.api.generation.submission import Prepared
from serve_app.api.generation.thoughts import ThoughtCounter
from serve_app.api.requests.schema import ChatRequest
from serve_app.api.text.content_stops import ContentStops
from serve_app.api.text.stop_strings import StopStrings
from serve_app.api.text.tokenizer import Tokenizer
from serve_app.engines.engine_client import EngineClient, ServedModel
from serve_app.engines.engine_load import EngineLoad
from serve_app.metrics.ingress_recorder import IngressRecorder
from serve_app.parsing.reasoning_parsers import reasoning_parser


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

    def thoughts(self, ready: Prepared) -> ThoughtCounter | None:
        """Make the counter of a chat answer's thoughts; None if the model does not mark its thoughts."""
        if self.model.reasoning_parser is None:
            return None
        end = prompt_end(self.tokenizer, ready.submission.prompt_token_ids)
        return ThoughtCounter(reasoning_parser(self.model.reasoning_parser, end))

    def stops(self, request: ChatRequest, ready: Prepared) -> ContentStops | None:
        """Make the stop strings' reader for a chat answer that may have thoughts or calls; None if it has no stop
        strings, or is only text."""
        if not (ready.stops and needs_reader(request, self.model)):
            return None
        end = prompt_end(self.tokenizer, ready.submission.prompt_token_ids)
        stops = StopStrings(ready.stops, shown=ready.shows_stop)
        return ContentStops(stops, *make_parsers(request, self.model, end))

"""Owns what the HTTP side needs of an engine: one stream of events a request, its health, and the served model's facts.
Never says how the engine is reached: in the same process, through Ray, or scripted by a test."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol

from engine.protocol import AdapterRef, ErrorCode, Event, LoadSnapshot, Submission
from serve_app.images.intake import ImageIntake
from serve_app.metrics.activity import FleetActivity
from serve_app.metrics.exposition import Scrape


@dataclass(frozen=True, slots=True)
class Move:
    """An answer went on at another engine replica."""

    at: float
    """By the event loop's clock."""
    code: ErrorCode
    """How the one before it failed."""
    replica_id: str | None
    """Which one that was; None if it never answered."""


@dataclass(slots=True)
class Course:
    """What the reader of a stream and its client tell each other about it."""

    is_complete: bool = False
    """Set by the reader: it has all that it wants, so that closing the stream is a stop and no abort."""
    moves: list[Move] = field(default_factory=list)
    """Kept by the client."""


class EngineClient(Protocol):
    def stream(
        self, submission: Submission, *, session: str | None = None, course: Course | None = None
    ) -> AsyncGenerator[list[Event], None]:
        """Yield everything queued since the last item, the first as soon as there is one.

        Requests of one `session` go to the same engine while its load allows.
        Closing the generator, or cancelling the task that waits on it, aborts the request.

        Raises:
            RequestRejected: at the first item at the latest.
            EngineError: the engine cannot go on.
        """
        ...

    async def check_health(self) -> None:
        """Raise EngineError when requests cannot be served."""
        ...

    async def load(self) -> list[LoadSnapshot]:
        """Each engine's load after its last step."""
        ...

    async def metrics(self) -> Scrape:
        """What the replicas of both deployments have measured. One that does not answer is counted, and no failure."""
        ...

    async def activity(self, after: Mapping[str, int]) -> FleetActivity:
        """What the replicas do just now. One that does not answer is counted, and no failure.

        `after`: engine -> a step's id; of that engine, only the steps that came later are told.
        """
        ...

    async def abort(self, name: str) -> bool:
        """End the requests of that name that other ingress replicas of the deployment hold; False if there are none.

        Raises:
            EngineError: a replica did not answer.
        """
        ...

    async def drain_all(self, draining: bool) -> None:
        """Have every ingress replica of the deployment refuse new requests, or take them again.

        Raises:
            EngineError: a replica did not answer.
        """
        ...

    async def load_adapter(self, name: str, path: str) -> AdapterRef:
        """Have every engine load an adapter, or none, and every other ingress replica know it by its name.

        Raises:
            EngineError: an engine refuses it, or a replica did not answer.
        """
        ...

    async def unload_adapter(self, name: str) -> None:
        """Have all replicas forget it; requests that run keep it until they end.

        Raises:
            EngineError: a replica did not answer.
        """
        ...

    async def reset_prefix_cache(self) -> list[int]:
        """Have each engine forget the cached prefixes that no live request holds; how many blocks that were.

        Raises:
            EngineError: an engine did not answer.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    id: str
    max_model_len: int
    """Longest prompt + answer that is accepted, in tokens."""
    created: int
    """Unix time in seconds."""
    owned_by: str = "chunkserve"
    tool_parser: str | None = None
    """How the model writes its calls: a name of serve_app.parsing.tools; None: it has not learnt to."""
    reasoning_parser: str | None = None
    """How it marks what it thinks: a name of serve_app.parsing.reasoning_parsers; None: it does not."""
    pooling: Literal["mean", "last"] | None = None
    """How a text's hidden states become its embedding; None: it makes none."""
    images: ImageIntake | None = None
    """Reads images as the model takes them; None: it takes none."""
    adapter: AdapterRef | None = None
    """What answers under this name; None: the model as it is."""
    base: str | None = None
    """With an adapter: the model's own name."""

    @property
    def capabilities(self) -> tuple[str, ...]:
        """In Ollama's words."""
        has = {
            "completion": True,
            "tools": self.tool_parser is not None,
            "vision": self.images is not None,
            "thinking": self.reasoning_parser is not None,
            "embedding": self.pooling is not None,
        }
        return tuple(name for name, is_so in has.items() if is_so)

"""Defines what the HTTP side needs of an engine: a stream of events per request, its health, and the served model's
facts.
Never says how the engine is reached: in the same process, through Ray, or as a test's script."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol

from engine.config import Targets
from engine.protocol import AdapterRef, EngineTimes, ErrorCode, Event, LoadSnapshot, Submission
from serve_app.images.intake import ImageIntake
from serve_app.metrics.activity import FleetActivity
from serve_app.metrics.exposition import Scrape
from serve_app.metrics.timing import Timing


@dataclass(frozen=True, slots=True)
class Move:
    """Records that an answer continued at another engine replica."""

    at: float
    """The time on the event loop's clock."""
    code: ErrorCode
    """The failure of the previous replica."""
    replica_id: str | None
    """The previous replica; None if it never answered."""


@dataclass(slots=True)
class StreamRecord:
    """Shared between the reader of a stream and the engine client: what each tells the other about it."""

    is_complete: bool = False
    """Set by the reader when it has all that it wants, so that closing the stream is a stop and not an abort."""
    moves: list[Move] = field(default_factory=list)
    """Written by the client."""
    is_over: bool = False
    """Set by the reader when it has the engine's terminal event, which it does not wait for after a stop string."""
    given: float | None = None
    """When the reader began, on the event loop's clock."""
    returned: float | None = None
    """When the reader had the whole answer."""
    unread_s: float = 0.0
    """How much of the time between the two the reader spent on sending, while a client took nothing."""
    times: EngineTimes | None = None
    """Where the time of the last engine went. It may come some milliseconds after an answer that the reader ended, and
    never comes from an engine that was lost."""
    lost_s: float = 0.0
    """Written by the client: seconds from the last news of engines that were lost until another was asked."""
    before_loss_s: float = 0.0
    """Written by the client: seconds that those engines worked until then."""


class EngineClient(Protocol):
    def stream(
        self, submission: Submission, *, session: str | None = None, record: StreamRecord | None = None
    ) -> AsyncGenerator[list[Event], None]:
        """Yield everything queued since the last item, and the first item as soon as there is one.

        Requests of one `session` go to the same engine as long as its load allows.
        Closing the generator, or cancelling the task that waits on it, aborts the request.

        Raises:
            RequestRejected: the request is refused; raised at the first item at the latest.
            EngineError: the engine cannot continue.
        """
        ...

    async def check_health(self) -> None:
        """Raise EngineError when requests cannot be served."""
        ...

    async def load(self) -> list[LoadSnapshot]:
        """Return each engine's load after its last step."""
        ...

    async def metrics(self) -> Scrape:
        """Collect the measurements of both deployments' replicas. One that does not answer is counted; that is no
        error.
        """
        ...

    async def activity(self, after: Mapping[str, int]) -> FleetActivity:
        """Collect what the replicas are doing now. One that does not answer is counted; that is no error.

        `after`: engine -> a step's id; only later steps of that engine are returned.
        """
        ...

    async def abort(self, name: str) -> bool:
        """End the requests of that name in the deployment's other ingress replicas; False if there are none.

        Raises:
            EngineError: a replica did not answer.
        """
        ...

    async def timing(self, name: str, tenant: str) -> Timing | None:
        """Return where the time of a request went that ended in another ingress replica of the deployment; None if none
        of them knows a request of that name and tenant. One that does not answer knows none."""
        ...

    async def drain_all(self, draining: bool) -> None:
        """Let every ingress replica of the deployment refuse new requests, or accept them again.

        Raises:
            EngineError: a replica did not answer.
        """
        ...

    async def load_adapter(self, name: str, path: str, before: AdapterRef | None) -> AdapterRef:
        """Load an adapter on every engine, or on none, and tell every other ingress replica its name.

        `before`: what the name means in the ingress replicas, which return to it if the load fails.

        Raises:
            EngineError: an engine refuses it, or a replica did not answer.
        """
        ...

    async def unload_adapter(self, name: str) -> None:
        """Let all replicas forget an adapter; running requests keep it until they end.

        Raises:
            EngineError: a replica did not answer.
        """
        ...

    async def reset_prefix_cache(self) -> list[int]:
        """Let each engine drop the cached prefixes that no live request holds, and all that is in its tiers, files on
        disk included. Return how many blocks each dropped.

        Raises:
            EngineError: an engine did not answer.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingDefaults:
    """How answers are sampled where a request does not say it."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    id: str
    max_model_len: int
    """The limit of prompt and answer together, in tokens."""
    created: int
    """A Unix time in seconds."""
    owned_by: str = "chunkserve"
    tool_parser: str | None = None
    """The format of the model's calls, as a name of serve_app.parsing.tools; None if it makes no calls."""
    reasoning_parser: str | None = None
    """How the model marks its thoughts, as a name of serve_app.parsing.reasoning_parsers; None if it does not."""
    pooling: Literal["mean", "last"] | None = None
    """How a text's hidden states become its embedding; None if the server makes no embeddings."""
    images: ImageIntake | None = None
    """Reads images in the form that the model takes; None if it takes none."""
    adapter: AdapterRef | None = None
    """The adapter that answers under this name; None for the model itself."""
    base: str | None = None
    """The model's own name, if this is an adapter."""
    targets: Targets = field(default_factory=Targets)
    """The server's service-level targets, which a request's own may exceed."""
    sampling: SamplingDefaults = field(default_factory=SamplingDefaults)

    @property
    def capabilities(self) -> tuple[str, ...]:
        """The model's capabilities, named as in Ollama."""
        has = {
            "completion": True,
            "tools": self.tool_parser is not None,
            "vision": self.images is not None,
            "thinking": self.reasoning_parser is not None,
            "embedding": self.pooling is not None,
        }
        return tuple(name for name, is_so in has.items() if is_so)

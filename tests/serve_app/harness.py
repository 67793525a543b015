"""Owns what HTTP tests share: a scripted engine client, and raw ASGI exchanges that see every message as it is sent.
Never uses an HTTP client: httpx's ASGI transport buffers whole bodies and cannot leave in the middle."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from typing import Any

import pytest
from starlette.types import ASGIApp, Message

from engine.async_engine import AsyncEngine
from engine.protocol import (
    AdapterRef,
    EngineError,
    Event,
    Failed,
    Finished,
    FinishReason,
    LoadSnapshot,
    Scheduled,
    Submission,
    Token,
    Usage,
)
from serve_app.adapters.named_adapters import NamedAdapters
from serve_app.api.ingress import create_app
from serve_app.api.text.tokenizer import Tokenizer
from serve_app.engines.engine_client import ServedModel, StreamRecord
from serve_app.metrics.activity import FleetActivity, IngressActivity
from serve_app.metrics.engine_recorder import EngineRecorder
from serve_app.metrics.exposition import Scrape
from serve_app.metrics.ingress_recorder import IngressRecorder
from serve_app.metrics.timing import Timing
from serve_app.metrics.values import ReplicaSamples

MODEL = ServedModel(id="org/tiny", max_model_len=200, created=1_700_000_000)
UNASKED = {"token_ids": None, "prompt_token_ids": None, "prompt_logprobs": None}
"""The token fields of a whole completion, where they were not asked for."""
EOS = {"stop_reason": None, "matched_stop": 256}
"""What a choice says of the end that `finished()` gives."""
CHAT: dict[str, Any] = {"model": MODEL.id, "messages": [{"role": "user", "content": "hi"}]}
PROMPT: dict[str, Any] = {"model": MODEL.id, "prompt": "hi"}
TIMEOUT_S = 10  # only ever reached by a failure

Step = list[Event] | asyncio.Event | Exception | Callable[[], None]


def scheduled(cached: int = 0) -> Event:
    return Scheduled("r", cached)


def tokens(text: str | bytes) -> list[Event]:
    """Return the byte-level tokenizer's tokens of a text."""
    data = text.encode() if isinstance(text, str) else text
    return [Token("r", byte) for byte in data]


def finished(reason: FinishReason = FinishReason.STOP, prompt: int = 7, completion: int = 5, cached: int = 0) -> Event:
    return Finished("r", reason, Usage(prompt, completion, cached), 256 if reason is FinishReason.STOP else None)


def failed(error: EngineError) -> Event:
    return Failed("r", error.code, error.message)


def make_time_pass(seconds: float, patch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Return a step that moves the running event loop's clock forward: a deadline passes at one point of a script, and
    never sooner, however busy the machine is. `seconds` must be less than TIMEOUT_S."""
    loop = asyncio.get_running_loop()
    real, ahead = loop.time, 0.0

    def step() -> None:
        nonlocal ahead
        ahead = seconds

    patch.setattr(loop, "time", lambda: real() + ahead)
    return step


class ScriptedClient:
    """Follows one script for every request: an item is sent, an asyncio.Event is waited for, an exception is raised,
    and a function is called."""

    def __init__(self, *script: Step, health: EngineError | None = None) -> None:
        self.script = script
        self.health = health
        self.submissions: list[Submission] = []
        self.sessions: list[str | None] = []
        self.aborted_elsewhere: set[str] = set()
        self.timings_elsewhere: dict[tuple[str, str], Timing] = {}
        self.drains: list[bool] = []
        self.scrape = Scrape()
        self.fleet = FleetActivity()
        self.asked_after: list[Mapping[str, int]] = []
        self.items_taken = 0
        self.started = asyncio.Event()
        self.closed = asyncio.Event()

    async def stream(
        self, submission: Submission, *, session: str | None = None, record: StreamRecord | None = None
    ) -> AsyncGenerator[list[Event], None]:
        self.submissions.append(submission)
        self.sessions.append(session)
        self.started.set()
        try:
            for step in self.script:
                match step:
                    case asyncio.Event():
                        await step.wait()
                    case Exception():
                        raise step
                    case _ if callable(step):
                        step()
                    case _:
                        self.items_taken += 1
                        yield step
        finally:
            self.closed.set()

    async def check_health(self) -> None:
        if self.health is not None:
            raise self.health

    async def load(self) -> list[LoadSnapshot]:
        return [
            LoadSnapshot(
                num_running=0,
                num_waiting=0,
                num_preparing=0,
                num_waiting_preempted=0,
                wait_reason=None,
                num_queued_tokens=0,
                num_blocks=8,
                num_held_blocks=0,
                num_evictable_blocks=0,
                num_reserved_blocks=0,
                num_steps=len(self.submissions),
                num_preemptions=0,
                reserve_ratio=0.7,
                reserve_margin=0.5,
            )
        ]

    async def metrics(self) -> Scrape:
        return self.scrape

    async def activity(self, after: Mapping[str, int]) -> FleetActivity:
        self.asked_after.append(after)
        return self.fleet

    async def abort(self, name: str) -> bool:
        return name in self.aborted_elsewhere

    async def timing(self, name: str, tenant: str) -> Timing | None:
        return self.timings_elsewhere.get((name, tenant))

    async def drain_all(self, draining: bool) -> None:
        self.drains.append(draining)

    async def load_adapter(self, name: str, path: str, before: AdapterRef | None) -> AdapterRef:
        return AdapterRef(name, path, "0f")

    async def unload_adapter(self, name: str) -> None:
        return

    async def reset_prefix_cache(self) -> list[int]:
        return [3]


class LocalClient:
    """An engine in the same process, as the routes of the only ingress replica see it."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine
        self._adapters = NamedAdapters(engine)
        self.check_health = engine.check_health
        self.ingress: IngressRecorder | None = None
        self._recorder = EngineRecorder(engine.config)
        engine.observe(self._recorder)

    def stream(
        self, submission: Submission, *, session: str | None = None, record: StreamRecord | None = None
    ) -> AsyncGenerator[list[Event], None]:
        return self._stream(submission, record or StreamRecord())

    async def _stream(self, submission: Submission, record: StreamRecord) -> AsyncGenerator[list[Event], None]:
        async with aclosing(self._engine.stream(submission)) as items:
            try:
                async for events in items:
                    yield events
            finally:
                if record.is_complete:
                    self._engine.abort(submission.request_id, FinishReason.STOP)

    async def metrics(self) -> Scrape:
        own = [] if self.ingress is None else [ReplicaSamples("ingress-1", self.ingress.samples())]
        return Scrape([ReplicaSamples("engine-1", self._recorder.samples(self._engine.load()))], own)

    async def activity(self, after: Mapping[str, int]) -> FleetActivity:
        engine = self._recorder.activity("engine-1", self._engine.load(), after.get("engine-1"))
        return FleetActivity([engine], [IngressActivity("ingress-1", 0, 0)])

    async def abort(self, name: str) -> bool:
        return False

    async def timing(self, name: str, tenant: str) -> Timing | None:
        return None

    async def drain_all(self, draining: bool) -> None:
        return

    async def load_adapter(self, name: str, path: str, before: AdapterRef | None) -> AdapterRef:
        return await self._adapters.load(name, path)

    async def unload_adapter(self, name: str) -> None:
        self._adapters.unload(name)

    async def reset_prefix_cache(self) -> list[int]:
        return [await self._engine.reset_prefix_cache()]

    async def load(self) -> list[LoadSnapshot]:
        return [self._engine.load()]


def app_for(client: ScriptedClient, *, model: ServedModel = MODEL, **options: Any) -> ASGIApp:
    return create_app(client, Tokenizer.byte_level(), model, **options)


class Exchange:
    """One request to an ASGI app, message by message."""

    def __init__(
        self,
        app: ASGIApp,
        method: str,
        path: str,
        body: bytes = b"",
        headers: Sequence[tuple[str, str]] = (("content-type", "application/json"),),
    ) -> None:
        self._inbox: asyncio.Queue[Message] = asyncio.Queue()
        self._outbox: asyncio.Queue[Message] = asyncio.Queue()
        self._inbox.put_nowait({"type": "http.request", "body": body, "more_body": False})
        self.may_send = asyncio.Event()
        self.may_send.set()
        self.broken = False
        self.has_sent = False  # or waits to
        path, _, query = path.partition("?")
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "scheme": "http",
            "method": method,
            "path": path,
            "raw_path": path.encode(),
            "root_path": "",
            "query_string": query.encode(),
            "headers": [(name.lower().encode(), value.encode()) for name, value in headers],
            "server": ("test", 80),
            "client": ("test", 1),
        }
        self.task = asyncio.ensure_future(app(scope, self._inbox.get, self._send))

    async def _send(self, message: Message) -> None:
        self.has_sent = True
        await self.may_send.wait()
        if self.broken:
            raise BrokenPipeError
        self._outbox.put_nowait(message)

    def disconnect(self) -> None:
        self._inbox.put_nowait({"type": "http.disconnect"})

    @property
    def silent(self) -> bool:
        return self._outbox.empty()

    async def next(self) -> Message:
        return await asyncio.wait_for(self._outbox.get(), TIMEOUT_S)

    async def finish(self) -> Answer:
        await asyncio.wait_for(self.task, TIMEOUT_S)
        messages = [self._outbox.get_nowait() for _ in range(self._outbox.qsize())]
        start, bodies = messages[0], messages[1:]
        headers = {name.decode(): value.decode() for name, value in start["headers"]}
        return Answer(start["status"], headers, [message.get("body", b"") for message in bodies])


class Answer:
    def __init__(self, status: int, headers: dict[str, str], parts: list[bytes]) -> None:
        self.status = status
        self.headers = headers
        self.parts = [part for part in parts if part]

    @property
    def json(self) -> Any:
        return json.loads(b"".join(self.parts))

    @property
    def error(self) -> dict[str, Any]:
        """Return the error in OpenAI's envelope."""
        body = self.json
        assert list(body) == ["error"]
        assert {"message", "type", "param", "code"} <= set(body["error"])
        assert isinstance(body["error"]["code"], str | None)
        return dict(body["error"])

    @property
    def anthropic_error(self) -> dict[str, Any]:
        body = self.json
        assert (set(body), body["type"]) == ({"type", "error", "request_id"}, "error")
        assert set(body["error"]) == {"type", "message"}
        return dict(body["error"])

    @property
    def frames(self) -> list[Any]:
        """Return the stream's payloads. Each ASGI message has whole frames, only one except in the first message,
        and the last is [DONE]."""
        assert self.parts[-1] == b"data: [DONE]\n\n"
        assert all(part.startswith(b"data: ") and part.endswith(b"\n\n") for part in self.parts)
        assert all(part.count(b"\n\n") == 1 for part in self.parts[1:])
        payloads = [line for part in self.parts[:-1] for line in part.decode().split("\n\n") if line]
        return [json.loads(payload.removeprefix("data: ")) for payload in payloads]

    @property
    def text(self) -> str:
        """Return the streamed answer's text."""
        choices = [choice for frame in self.frames for choice in frame.get("choices", [])]
        return "".join(c["text"] if "text" in c else c["delta"].get("content", "") for c in choices)


def said(message: dict[str, Any]) -> dict[str, Any]:
    """Leave out of a whole message what it does not say, so that the fields of a stream's deltas remain."""
    assert (message["refusal"], message["annotations"]) == (None, [])
    nulls = ("reasoning", "reasoning_content")
    left_out = {"refusal", "annotations", *(name for name in nulls if message[name] is None)}
    return {name: value for name, value in message.items() if name not in left_out}


def joined_choice(answer: Answer) -> dict[str, Any]:
    """Join the chunks of a streamed completion to the choice of a whole one."""
    choices = [frame["choices"][0] for frame in answer.frames]
    assert all(choice["finish_reason"] is None for choice in choices[:-1])
    logprobs = choices[0]["logprobs"] and {
        key: [value for choice in choices for value in choice["logprobs"][key]] for key in choices[0]["logprobs"]
    }
    ids = [token_id for choice in choices for token_id in choice["token_ids"] or ()]
    has_ids = any(choice["token_ids"] is not None for choice in choices)
    return choices[-1] | {
        "text": "".join(choice["text"] for choice in choices),
        "logprobs": logprobs,
        "token_ids": ids if has_ids else None,
        "prompt_token_ids": choices[0]["prompt_token_ids"],
        "prompt_logprobs": None,
    }


async def post(app: ASGIApp, path: str, body: Any) -> Answer:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return await Exchange(app, "POST", path, data).finish()


async def chat(client: ScriptedClient, **fields: Any) -> Answer:
    return await post(app_for(client), "/v1/chat/completions", CHAT | fields)


async def complete(client: ScriptedClient, **fields: Any) -> Answer:
    return await post(app_for(client), "/v1/completions", PROMPT | fields)


async def get(client: ScriptedClient, path: str, method: str = "GET") -> Answer:
    return await Exchange(app_for(client), method, path, headers=()).finish()

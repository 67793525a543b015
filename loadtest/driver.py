"""Owns the sending of a plan's requests from one worker: at their due times, or by clients that wait for answers.
Never lets a slow answer delay a due request. The worker's own lateness is recorded with the request."""

from __future__ import annotations

import itertools
import json
import random
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from http.client import HTTPException

import gevent
from gevent.pool import Group
from geventhttpclient import HTTPClient
from geventhttpclient.response import HTTPSocketPoolResponse

from loadtest.plan import Ask, Closed, Plan, Point, Source
from loadtest.sse import Lines, parse_lines, read_lines
from loadtest.tally import Tally
from loadtest.target import Target
from loadtest.timeline import CANCELLED, FAILED, OK, REJECTED, TOO_MUCH, Timeline

_MANY = 100_000
"""Connections: enough that a request never waits for one, as the users of an open load do not wait for each other."""
_SMALL_BUFFER = 4096
"""Receive buffer of a slow reader's socket, in bytes. With a larger one the kernel would read whole answers ahead."""

Heard = tuple[Timeline, str]
"""A request's times, and the text of its answer."""


@dataclass(frozen=True, slots=True)
class _Head:
    """The status and headers of an answer that a report uses."""

    status: int = 0
    queue_ms: float | None = None
    """Only of an answer that has begun: a refusal or an error says how soon it came, and not how long one waits."""
    retry_after: bool = False

    @staticmethod
    def of(response: HTTPSocketPoolResponse) -> _Head:
        has_begun, retry_after = response.status_code == 200, response.get("retry-after") is not None
        queue_ms = _milliseconds(response.get("openai-processing-ms")) if has_begun else None
        return _Head(response.status_code, queue_ms, retry_after)


def _milliseconds(value: object) -> float | None:
    """Read a header of another server, which may be anything; None if it is no time."""
    try:
        found = float(value) if isinstance(value, str) else -1.0
    except ValueError:
        return None
    return found if 0 <= found < float("inf") else None


class _Left(BaseException):
    """The client disconnects, as planned."""


class _TimeUp(BaseException):
    """The client's timeout has passed."""


class Driver:
    """One worker's share of a plan: `shard` of `shards`."""

    def __init__(
        self,
        plan: Plan,
        target: Target,
        tally: Tally,
        seed: int,
        shard: int = 0,
        shards: int = 1,
        on_answer: Callable[[str, Timeline], None] = lambda kind, answer: None,
        before_point: Callable[[int], None] = lambda number: None,
    ) -> None:
        """`before_point` blocks until the point may begin: all workers begin a point together."""
        self._plan, self._target, self._tally, self._seed = plan, target, tally, seed
        self._shard, self._shards = shard, shards
        self._on_answer, self._before_point = on_answer, before_point
        self._client = _client(target)
        self._slow_client = _client(target, _SMALL_BUFFER)
        self._began = 0.0
        self._faults: list[BaseException] = []
        self.in_flight = 0
        self.point = ""
        self._is_over = False
        self._window = (0.0, 0.0)

    def run(self) -> None:
        """Run all points in turn. A point ends when its last answer has ended."""
        try:
            for number, point in enumerate(self._plan.points):
                self._before_point(number)
                self._began = self._began or time.monotonic()
                self._run_point(point, f"{self._seed} {number}")
        finally:
            self._is_over = True
        # Not if the load is ended from outside: requests that are still running may ask for another connection.
        self._client.close()
        self._slow_client.close()

    def _now(self) -> float:
        return time.monotonic() - self._began

    def _run_point(self, point: Point, seed: str) -> None:
        self.point = point.name
        begin = self._now()
        window = (begin + point.warm_up_s, begin + point.seconds)
        self._window = window
        group = Group()
        for source in point.sources:
            self._spawn(group, self._run_source, source, seed, window, begin, group)
        group.join()
        self._tally.open_window(point.name, window[1] - window[0])
        if self._faults:
            raise self._faults[0]

    def note_window(self) -> None:
        """Let the point's window be what has passed of it: the load may be ended before its own end."""
        if self.point:
            begin, end = self._window
            self._tally.open_window(self.point, max(0.0, min(end, self._now()) - begin))

    def _spawn(self, group: Group, function: Callable[..., object], *arguments: object) -> None:
        """Spawn a greenlet whose failure fails the run. Otherwise a bug of ours would only leave out a request."""
        greenlet = group.spawn(function, *arguments)
        greenlet.link_exception(lambda failed: self._faults.append(failed.exception))

    def _run_source(self, source: Source, seed: str, window: tuple[float, float], begin: float, group: Group) -> None:
        recorder = _Recorder(self, self.point, source.kind, window)
        if isinstance(source, Closed):
            for client in range(self._shard, source.clients, self._shards):
                self._spawn(group, self._run_client, source, f"{seed} {client}", recorder)
            return
        # The request is built before it is due: building it at its due time would add to the lag.
        for at, request in source.due(seed, self._shard, self._shards):
            gevent.sleep(max(begin + at - self._now(), 0.0))
            self._spawn(group, recorder.ask, request, begin + at)

    def _run_client(self, source: Closed, seed: str, recorder: _Recorder) -> None:
        draw = random.Random(f"{seed} think")
        numbers = itertools.count()
        while self._now() < recorder.window[1]:
            said: list[dict[str, str]] = []
            for _ in range(source.turns):
                request = source.next_ask(seed, next(numbers), said)
                answer, heard = recorder.ask(request, self._now())
                if source.turns > 1:
                    said = [*request.body["messages"], {"role": "assistant", "content": heard}]
                gevent.sleep(source.thought_s(draw, answer))
                if answer.outcome != OK or self._now() >= recorder.window[1]:
                    break

    # --- one request ------------------------------------------------------------------------------------------------

    def ask(self, request: Ask, due: float) -> Heard:
        """Send a request and read its answer. A failure is recorded in the returned timeline.

        Raises: GreenletExit: the load was ended; nothing more is sent."""
        if self._is_over:
            raise gevent.GreenletExit
        self.in_flight += 1
        try:
            return self._ask(request, due)
        finally:
            self.in_flight -= 1

    def _ask(self, request: Ask, due: float) -> Heard:
        lines: Lines = []
        sent = self._now()
        outcome, error, head = self._exchange(request, lines)
        return _heard(due, (sent, self._now()), outcome, error, lines, head)

    def _exchange(self, request: Ask, lines: Lines) -> tuple[str, str | None, _Head]:
        """Send the request and fill `lines`; return the outcome so far, the error, and the answer's head."""
        response: HTTPSocketPoolResponse | None = None
        outcome, error = OK, None
        try:
            with gevent.Timeout(request.cancel_after_s, _Left), gevent.Timeout(self._target.timeout_s, _TimeUp):
                response = self._send(request)
                outcome, error = self._read(response, request, lines)
        except _Left:
            outcome = CANCELLED
        except _TimeUp:
            outcome, error = FAILED, f"no end within {self._target.timeout_s:g} s"
        except (OSError, HTTPException) as lost:
            outcome, error = FAILED, f"{type(lost).__name__}: {lost}"
        if response is None:
            return outcome, error, _Head()
        response.release()  # closes the connection if the answer is incomplete
        return outcome, error, _Head.of(response)

    def _send(self, request: Ask) -> HTTPSocketPoolResponse:
        client = self._slow_client if request.read_pause_s else self._client
        body = json.dumps({"model": self._target.model, **request.body})
        return client.request("POST", self._target.prefix + request.path, body, self._headers(request))

    def _read(self, response: HTTPSocketPoolResponse, request: Ask, lines: Lines) -> tuple[str, str | None]:
        if response.status_code == 200:
            read_lines(lambda: response.readline(b"\n"), self._now, lines, self._pause(request))
            return OK, None
        error = f"{response.status_code}: {bytes(response.read())[:120]!r}"
        return REJECTED if response.status_code in TOO_MUCH else FAILED, error

    def _pause(self, request: Ask) -> Callable[[], None]:
        return (lambda: gevent.sleep(request.read_pause_s)) if request.read_pause_s else (lambda: None)

    def _headers(self, request: Ask) -> dict[str, str]:
        key = self._target.key_of(request.tenant)
        return {"Content-Type": "application/json", **({"Authorization": f"Bearer {key}"} if key else {})}

    def record(self, point: str, kind: str, window: tuple[float, float], request: Ask, answer: Timeline) -> None:
        if self._is_over:  # the load was ended: whatever happens to this request, its server is not the cause
            return
        self._tally.record(point, kind, answer, window, request.asked_tokens)
        self._on_answer(kind, answer)


@dataclass(frozen=True, slots=True)
class _Recorder:
    """Records the answers of one source."""

    driver: Driver
    point: str
    kind: str
    window: tuple[float, float]

    def ask(self, request: Ask, due: float) -> Heard:
        answer, heard = self.driver.ask(request, due)
        self.driver.record(self.point, self.kind, self.window, request, answer)
        return answer, heard


def _client(target: Target, buffer: int | None = None) -> HTTPClient:
    """`buffer` is the receive buffer of each socket, in bytes; None leaves the system's default."""
    client = HTTPClient.from_url(
        target.url, concurrency=_MANY, connection_timeout=target.timeout_s, network_timeout=target.timeout_s
    )
    if buffer is not None:
        # The client has no argument for this hook of the pool.
        client._connection_pool.after_connect = lambda sock: sock.setsockopt(  # type: ignore[method-assign]
            socket.SOL_SOCKET, socket.SO_RCVBUF, buffer
        )
    return client


def _heard(
    due: float, stamps: tuple[float, float], outcome: str, error: str | None, lines: Lines, head: _Head
) -> Heard:
    answer = parse_lines(lines)
    if outcome == OK and answer.error:
        outcome, error = FAILED, answer.error
    timeline = Timeline(
        due=due,
        sent=stamps[0],
        ended=stamps[1],
        outcome=outcome,
        arrivals=tuple(answer.arrivals),
        prompt_tokens=answer.prompt_tokens,
        output_tokens=answer.output_tokens or (len(answer.arrivals) if outcome == CANCELLED else 0),
        status=head.status,
        finish_reason=answer.finish_reason,
        queue_ms=head.queue_ms,
        retry_after=head.retry_after,
        error=error,
    )
    return timeline, answer.text

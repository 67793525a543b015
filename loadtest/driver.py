"""Owns the sending of a plan's requests from one worker: at their due times, or by clients that wait for answers.
Never lets a slow answer delay a due request; what the worker itself was late is recorded with the request."""

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
from loadtest.sse import Lines, read_lines, understood
from loadtest.tally import Tally
from loadtest.target import Target
from loadtest.timeline import CANCELLED, FAILED, OK, REJECTED, TOO_MUCH, Timeline

_MANY = 100_000
"""Connections: none is ever waited for, as users of an open load do not wait for one another."""
_SMALL_BUFFER = 4096
"""Bytes a slow reader's socket takes in: the kernel would read whole answers for it otherwise."""

Heard = tuple[Timeline, str]
"""A request's times, and the text of its answer."""


@dataclass(frozen=True, slots=True)
class _Head:
    """What an answer's head says."""

    status: int = 0
    queue_ms: float | None = None
    retry_after: bool = False

    @staticmethod
    def of(response: HTTPSocketPoolResponse) -> _Head:
        queue_ms = response.get("openai-processing-ms")
        told = response.get("retry-after") is not None
        return _Head(response.status_code, float(queue_ms) if isinstance(queue_ms, str) else None, told)


class _Left(BaseException):
    """The client leaves, as planned."""


class _TimeUp(BaseException):
    """The client has waited long enough."""


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
        """`before_point` returns when the point may begin: all workers begin a point together."""
        self._plan, self._target, self._tally, self._seed = plan, target, tally, seed
        self._shard, self._shards = shard, shards
        self._on_answer, self._before_point = on_answer, before_point
        self._client = _client(target)
        self._slow_client = _client(target, _SMALL_BUFFER)
        self._began = 0.0
        self._faults: list[BaseException] = []
        self.in_flight = 0
        self.point = ""

    def run(self) -> None:
        """All points in turn; a point ends when its last answer has ended."""
        try:
            for number, point in enumerate(self._plan.points):
                self._before_point(number)
                self._began = self._began or time.monotonic()
                self._run_point(point, f"{self._seed} {number}")
        finally:
            self._client.close()
            self._slow_client.close()

    def _now(self) -> float:
        return time.monotonic() - self._began

    def _run_point(self, point: Point, seed: str) -> None:
        self.point = point.name
        begin = self._now()
        window = (begin + point.warm_up_s, begin + point.seconds)
        self._tally.open_window(point.name, point.seconds - point.warm_up_s)
        group = Group()
        for source in point.sources:
            self._spawn(group, self._run_source, source, seed, window, begin, group)
        group.join()
        if self._faults:
            raise self._faults[0]

    def _spawn(self, group: Group, function: Callable[..., object], *arguments: object) -> None:
        """A fault of ours in one request would otherwise only be missing from the figures."""
        greenlet = group.spawn(function, *arguments)
        greenlet.link_exception(lambda failed: self._faults.append(failed.exception))

    def _run_source(self, source: Source, seed: str, window: tuple[float, float], begin: float, group: Group) -> None:
        recorder = _Recorder(self, self.point, source.kind, window)
        if isinstance(source, Closed):
            for client in range(self._shard, source.clients, self._shards):
                self._spawn(group, self._ask_on, source, f"{seed} {client}", recorder)
            return
        # What is asked is made before it is due: to make it then would be lag.
        for at, one in source.due(seed, self._shard, self._shards):
            gevent.sleep(max(begin + at - self._now(), 0.0))
            self._spawn(group, recorder.ask, one, begin + at)

    def _ask_on(self, source: Closed, seed: str, recorder: _Recorder) -> None:
        draw = random.Random(f"{seed} think")
        numbers = itertools.count()
        while self._now() < recorder.window[1]:
            said: list[dict[str, str]] = []
            for _ in range(source.turns):
                one = source.next_ask(seed, next(numbers), said)
                answer, heard = recorder.ask(one, self._now())
                if source.turns > 1:
                    said = [*one.body["messages"], {"role": "assistant", "content": heard}]
                gevent.sleep(source.thought_s(draw, answer))
                if answer.outcome != OK or self._now() >= recorder.window[1]:
                    break

    # --- one request ------------------------------------------------------------------------------------------------

    def ask(self, one: Ask, due: float) -> Heard:
        """Send it and read the answer; what goes wrong is in its times."""
        self.in_flight += 1
        try:
            return self._ask(one, due)
        finally:
            self.in_flight -= 1

    def _ask(self, one: Ask, due: float) -> Heard:
        lines: Lines = []
        sent = self._now()
        outcome, error, head = self._exchange(one, lines)
        return _heard(due, (sent, self._now()), outcome, error, lines, head)

    def _exchange(self, one: Ask, lines: Lines) -> tuple[str, str | None, _Head]:
        """Fill `lines`: the outcome so far, what went wrong, and what the answer's head said."""
        response: HTTPSocketPoolResponse | None = None
        outcome, error = OK, None
        try:
            with gevent.Timeout(one.cancel_after_s, _Left), gevent.Timeout(self._target.timeout_s, _TimeUp):
                response = self._send(one)
                outcome, error = self._read(response, one, lines)
        except _Left:
            outcome = CANCELLED
        except _TimeUp:
            outcome, error = FAILED, f"no end within {self._target.timeout_s:g} s"
        except (OSError, HTTPException) as lost:
            outcome, error = FAILED, f"{type(lost).__name__}: {lost}"
        if response is None:
            return outcome, error, _Head()
        response.release()  # which closes the connection of an answer that is not whole
        return outcome, error, _Head.of(response)

    def _send(self, one: Ask) -> HTTPSocketPoolResponse:
        client = self._slow_client if one.read_pause_s else self._client
        body = json.dumps({"model": self._target.model, **one.body})
        return client.request("POST", one.path, body, self._headers(one))

    def _read(self, response: HTTPSocketPoolResponse, one: Ask, lines: Lines) -> tuple[str, str | None]:
        if response.status_code == 200:
            read_lines(lambda: response.readline(b"\n"), self._now, lines, self._pause(one))
            return OK, None
        error = f"{response.status_code}: {bytes(response.read())[:120]!r}"
        return REJECTED if response.status_code in TOO_MUCH else FAILED, error

    def _pause(self, one: Ask) -> Callable[[], None]:
        return (lambda: gevent.sleep(one.read_pause_s)) if one.read_pause_s else (lambda: None)

    def _headers(self, one: Ask) -> dict[str, str]:
        key = self._target.key_of(one.tenant)
        return {"Content-Type": "application/json", **({"Authorization": f"Bearer {key}"} if key else {})}

    def record(self, point: str, kind: str, window: tuple[float, float], one: Ask, answer: Timeline) -> None:
        self._tally.record(point, kind, answer, window, one.asked_tokens)
        self._on_answer(kind, answer)


@dataclass(frozen=True, slots=True)
class _Recorder:
    """Where the answers of one source go."""

    driver: Driver
    point: str
    kind: str
    window: tuple[float, float]

    def ask(self, one: Ask, due: float) -> Heard:
        answer, heard = self.driver.ask(one, due)
        self.driver.record(self.point, self.kind, self.window, one, answer)
        return answer, heard


def _client(target: Target, buffer: int | None = None) -> HTTPClient:
    """`buffer`: bytes that each socket takes in unread; None: as the system has it."""
    client = HTTPClient.from_url(
        target.url, concurrency=_MANY, connection_timeout=target.timeout_s, network_timeout=target.timeout_s
    )
    if buffer is not None:
        # The pool's own hook, which the client has no argument for.
        client._connection_pool.after_connect = lambda sock: sock.setsockopt(  # type: ignore[method-assign]
            socket.SOL_SOCKET, socket.SO_RCVBUF, buffer
        )
    return client


def _heard(
    due: float, stamps: tuple[float, float], outcome: str, error: str | None, lines: Lines, head: _Head
) -> Heard:
    answer = understood(lines)
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

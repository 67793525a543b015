"""Finds the lane of the model that a request asks for, by its name, an adapter or an alias.
Never reads more of a body than the name: the route's schema does, and refuses what is wrong with it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import msgspec
import pydantic_core

from engine.protocol import EngineError
from serve_app.admission.arrivals import Arrival, Arrivals
from serve_app.api.http.offload import run_sized, work_of
from serve_app.api.models.lane import Lane
from serve_app.api.requests.deadline import MAX_TIMEOUT_MS
from serve_app.api.requests.hints import hints
from serve_app.engines.engine_client import ServedModel
from serve_app.errors.api_error import ApiError, model_not_found, to_api_error
from serve_app.settings.limits import Tenant

T = TypeVar("T")


class _Body(msgspec.Struct):
    model: str
    timeout_ms: int | None = None


@dataclass(frozen=True, slots=True)
class Asked:
    """What is known of a request before its model has read it."""

    lane: Lane
    is_served: bool = True
    """Whether the lane answers to the name; otherwise it only says what is wrong, and is not woken for that."""
    timeout_ms: int | None = None
    """The body's own, which a wait for a sleeping model must obey. None if it has none that is valid."""


_decode = msgspec.json.Decoder(_Body).decode


class Lanes:
    """The lanes of one ingress replica, in the order of the config."""

    def __init__(self, lanes: Sequence[Lane]) -> None:
        assert lanes, "a server serves at least one model"
        self._lanes = tuple(lanes)
        self._arrivals = Arrivals([lane.gate for lane in lanes])

    def __iter__(self) -> Iterator[Lane]:
        return iter(self._lanes)

    @property
    def first(self) -> Lane:
        return self._lanes[0]

    @property
    def are_several(self) -> bool:
        return len(self._lanes) > 1

    async def each(self, ask: Callable[[Lane], Awaitable[T]]) -> list[T | ApiError]:
        """Ask all models at once, and return their answers. A model that fails has an error instead, and does not take
        the answers of the others away.

        Raises:
            ApiError: none has answered.
        """
        found = await asyncio.gather(*(_answer_of(ask, lane) for lane in self._lanes))
        errors = [one for one in found if isinstance(one, ApiError)]
        if len(errors) == len(found):
            raise errors[0]
        return found

    @contextmanager
    def arriving(self, tenant: Tenant) -> Iterator[Arrival]:
        """Count a request from before its body is read, and let its work in threads take the tenant's turns. A request
        that goes to a gate leaves the count there.

        Raises:
            ApiError: 429 or 503, a limit of the tenant or of the deployment is reached.
        """
        with self._arrivals.enter(tenant) as arrival, work_of(tenant.name):
            yield arrival

    def check_gates(self, tenant: Tenant) -> None:
        """Raise what a gate would if all of them refuse a request now, so that its body need not be read."""
        try:
            self._arrivals.check_gates(tenant)
        except EngineError as error:
            raise to_api_error(error, self.first.gate.retry_after_s()) from error

    async def of_body(self, body: bytes) -> Asked:
        """Find the lane for a body's `model`; the first if it names none that is served, whose route then says what
        is wrong. With a single lane the body is not looked at."""
        if not self.are_several:
            return Asked(self.first)
        name, timeout_ms = await run_sized(len(body), lambda: _read(body))
        lane = self.of(name)
        return Asked(lane, name is not None and lane.names.find(name) is not None, timeout_ms)

    def of(self, asked: str | None) -> Lane:
        """Return the lane for a name; the first if there is no name, or nothing is served under it. The hints that a
        request gives in vain count for the lane's model from then on."""
        lane = self.first if asked is None else self._find(asked) or self.first
        hints().count = lane.recorder.ignored
        return lane

    def named(self, asked: str | None) -> Lane:
        """Return the lane for a name; the first without one.

        Raises:
            ApiError: 404, nothing has that name.
        """
        if asked is not None:
            self.served(asked)
        return self.of(asked)

    def served(self, asked: str) -> ServedModel:
        """Find what answers to a name.

        Raises:
            ApiError: 404, nothing has that name.
        """
        lane = self._find(asked)
        found = None if lane is None else lane.names.find(asked)
        if found is None:
            raise self.not_found(asked)
        return found

    def served_by(self, lane: Lane, asked: str) -> ServedModel:
        """Find what answers to a name in a lane.

        Raises:
            ApiError: 404, nothing there has that name.
        """
        if (found := lane.names.find(asked)) is None:
            raise self.not_found(asked)
        return found

    def not_found(self, asked: str) -> ApiError:
        return model_not_found(asked, *(lane.model.id for lane in self._lanes))

    def listed(self) -> list[tuple[str, ServedModel]]:
        """List the names that clients can ask for, with what answers."""
        return [listed for lane in self._lanes for listed in lane.names.listed()]

    def _find(self, asked: str) -> Lane | None:
        """As in one lane, names go before aliases, and these before patterns; the first pattern that matches counts."""
        lanes = self._lanes
        named = (lane for lane in lanes if lane.names.named(asked) is not None)
        aliased = (lane for lane in lanes if lane.names.has_alias(asked) and lane.names.find(asked) is not None)
        matched = (lane for lane in lanes if lane.names.find(asked) is not None)
        return next(named, None) or next(aliased, None) or next(matched, None)


async def _answer_of(ask: Callable[[Lane], Awaitable[T]], lane: Lane) -> T | ApiError:
    try:
        return await ask(lane)
    except Exception as error:  # noqa: BLE001 - whatever it is, it is this model's alone
        return to_api_error(error)


def _read(body: bytes) -> tuple[str | None, int | None]:
    try:
        read = _decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return _carefully(body), None
    within = read.timeout_ms is not None and 1 <= read.timeout_ms <= MAX_TIMEOUT_MS
    return read.model, read.timeout_ms if within else None


def _carefully(body: bytes) -> str | None:
    """Read what the quick decoder refuses, with the parser of the routes, which takes more."""
    try:
        parsed = pydantic_core.from_json(body)
    except ValueError:
        return None
    asked = parsed.get("model") if isinstance(parsed, dict) else None
    return asked if isinstance(asked, str) else None

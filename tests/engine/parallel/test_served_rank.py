"""Contracts of a rank that is given requests: an accepted one has an end, for caller and observer.
Never starts an engine or a process: what the engine does is written here."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from engine.observer import StepFacts
from engine.parallel import leading_engine, served_rank
from engine.parallel.leading_engine import LeadingEngine
from engine.parallel.rank_messages import Abort, Drain, End, Stepped, Submit, Told
from engine.parallel.served_rank import ServedRank
from engine.protocol import ErrorCode, Event, Failed, FinishReason, RequestRejected, SamplingParams, Submission
from tests.support.conditions import until
from tests.support.fleet import load_snapshot

pytestmark = pytest.mark.anyio


class Engine:
    """Notes what it is asked. A request is ready once `opened` is set."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error, self.opened, self.asked = error, asyncio.Event(), list[str]()

    def observe(self, observer: object) -> None: ...

    def load(self) -> Any:
        return load_snapshot()

    async def make_ready(self, submission: Submission) -> dict[Any, float]:
        self.asked.append("make ready")
        if self.error is not None:
            raise self.error
        await self.opened.wait()
        return {}

    def submit(self, submission: Submission, sink: Any, spent: Any) -> None:
        self.asked.append("submit")

    def abort(self, request_id: str, reason: FinishReason) -> None:
        self.asked.append(f"abort {reason.value}")

    async def drain(self) -> None:
        self.asked.append("drain")

    def shutdown(self) -> None:
        self.asked.append("shutdown")


class Wire:
    """A line whose messages stay here."""

    def __init__(self) -> None:
        self.sent = list[Any]()

    def send(self, message: Any) -> None:
        self.sent.append(message)


def serve(engine: Engine) -> tuple[ServedRank, Wire]:
    served, wire = ServedRank(engine, None), Wire()  # type: ignore[arg-type]
    served.line = wire  # type: ignore[assignment]
    return served, wire


ASKED = Submit(Submission("a", (1, 2), SamplingParams()))


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (RequestRejected(ErrorCode.GRAMMAR_LIMIT_EXCEEDED, "too long"), ErrorCode.GRAMMAR_LIMIT_EXCEEDED),
        (ValueError("a bug"), ErrorCode.PREPARATION_FAILED),
    ],
)
async def test_a_request_that_cannot_be_taken_for_any_reason_ends_for_its_caller_and_for_the_observer_once(
    error: Exception, code: ErrorCode
) -> None:
    served, wire = serve(Engine(error))
    served.hear(ASKED)
    await until(lambda: len(wire.sent) >= 2)
    (told,) = [message.events for message in wire.sent if isinstance(message, Told) and message.events]
    (stepped,) = [message.events for message in wire.sent if isinstance(message, Stepped)]
    assert told == stepped
    (failed,) = told
    assert isinstance(failed, Failed)
    assert (failed.request_id, failed.code) == ("a", code)


async def test_a_request_that_was_accepted_before_a_drain_is_taken_before_it_begins() -> None:
    """An engine that drains would refuse it, and its grammar may take seconds."""
    engine = Engine()
    served, _ = serve(engine)
    served.hear(ASKED)
    served.hear(Drain())
    await until(lambda: bool(engine.asked))
    served.hear(Abort("a", FinishReason.STOP))
    await until(lambda: len(engine.asked) == 2)  # messages are taken in order
    assert engine.asked == ["make ready", "abort stop"]
    engine.opened.set()
    await until(lambda: "drain" in engine.asked)
    assert engine.asked == ["make ready", "abort stop", "submit", "abort stop", "drain"]
    served.hear(End())
    await served.run()
    assert engine.asked[-1] == "shutdown"


async def test_a_request_that_is_aborted_before_the_rank_has_begun_to_take_it_is_aborted() -> None:
    """Regression: both messages came within a turn of the loop, and nobody read what was then answered to the end."""
    engine = Engine()
    engine.opened.set()
    served, _ = serve(engine)
    served.hear(ASKED)
    served.hear(Abort("a", FinishReason.ABORT))
    await until(lambda: "submit" in engine.asked)
    assert engine.asked == ["abort abort", "make ready", "submit", "abort abort"]


async def test_a_rank_says_what_it_has_before_it_has_a_request() -> None:
    served, wire = serve(Engine())
    served.hear(End())
    await served.run()
    assert wire.sent == [Told([], load_snapshot())]


async def test_a_step_of_a_rank_on_another_machine_began_by_the_leaders_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each machine counts from its own start: a request waited in the queue for as long as one had been up longer."""
    served, wire = serve(Engine())
    monkeypatch.setattr(served_rank, "time", SimpleNamespace(monotonic=lambda: 9_000.25))
    served.stepped(StepFacts(9_000.0, preempted=("a",)), [])
    monkeypatch.setattr(leading_engine, "time", SimpleNamespace(monotonic=lambda: 50.5))
    assert told_of(wire.sent) == [(StepFacts(50.25, preempted=("a",)), [])]


async def test_a_step_of_another_rank_is_counted_at_once_and_before_its_readers_have_it() -> None:
    """It waited for the leader's own step: first tokens came later than they did, and two steps seemed to be one."""
    served, wire = serve(Engine(ValueError("a bug")))
    served.hear(ASKED)
    await until(lambda: len(wire.sent) >= 2)
    (failed,) = wire.sent[1].events
    assert [events for _, events in told_of(wire.sent[:1])] == [[failed]]


def told_of(messages: Sequence[Any]) -> list[tuple[StepFacts, Sequence[Event]]]:
    """Return what the leader's observer is told while the leader hears these messages of a rank."""
    told: list[tuple[StepFacts, Sequence[Event]]] = []
    leader = SimpleNamespace(_tell_observer=lambda *step: told.append(step))
    for message in messages:
        LeadingEngine.hear(leader, 1, message)  # type: ignore[arg-type]
    return told

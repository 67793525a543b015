"""Divides the wall time of one request by cause, from the times that its ingress replica and its engine have noted.
Never measures anything, and never says whose requests were in the way."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from engine.protocol import TimeCause
from serve_app.engines.engine_client import StreamRecord
from serve_app.metrics.ingress_recorder import Outcome
from serve_app.metrics.request_times import RequestTimes
from serve_app.metrics.timing import Ahead, TimePart, Timing

UPLOAD, SERVER, GATE, NETWORK = "upload", "server", "gate", "network"
MIGRATION, CLIENT, UNRECORDED = "migration", "client", "unrecorded"

ABOUT: Mapping[str, str] = {
    UPLOAD: "The client sent its body.",
    SERVER: "The ingress replica read the request with its images and grammars, made its tokens, and wrote the answer.",
    GATE: "It waited at the gate for a place with the engines.",
    NETWORK: "Calls and tokens travelled between the ingress replica and the engine, or waited for one of them.",
    MIGRATION: "Its engine was lost, and another one had to go on.",
    CLIENT: "The client took its answer slowly.",
    UNRECORDED: "An engine worked on it that has not told on what.",
    TimeCause.ADAPTER: "The engine loaded its adapter.",
    TimeCause.GRAMMAR: "Its grammar was compiled, or steps waited for grammars.",
    TimeCause.INPUTS: "Images were encoded.",
    TimeCause.QUEUE: "It waited for its turn in an engine, behind other requests.",
    TimeCause.MEMORY: "It waited because the engine's KV cache was full.",
    TimeCause.KV_LOAD: "A part of its prompt, computed before, was loaded from memory or disk.",
    TimeCause.PREFILL: "Its prompt was computed.",
    TimeCause.PREFILL_BESIDE_PROMPTS: "While its prompt was computed, so were other prompts.",
    TimeCause.PREFILL_BESIDE_ANSWERS: "While its prompt was computed, so were answers.",
    TimeCause.DECODE: "Its answer was computed.",
    TimeCause.DECODE_BESIDE_PROMPTS: "While its answer was computed, so were prompts.",
    TimeCause.DECODE_BESIDE_ANSWERS: "While its answer was computed, so were other answers.",
    TimeCause.PREEMPTION: "The engine needed its memory for others, and computed it again later.",
    TimeCause.SLOW_STEPS: "The engine's steps took longer than their work explains.",
}
"""Every cause in words."""
OWN = frozenset({TimeCause.KV_LOAD, TimeCause.PREFILL, TimeCause.DECODE, UNRECORDED})
"""What a request needs by itself, or may have needed."""
_OF_ANSWERS = frozenset({TimeCause.DECODE, TimeCause.DECODE_BESIDE_PROMPTS, TimeCause.DECODE_BESIDE_ANSWERS})

Seconds = dict[str, float]


@dataclass(frozen=True, slots=True)
class EndedTimes:
    """What is known of the times of a request that is over. All times are on the event loop's clock."""

    answer_id: str | None
    request_id: str
    outcome: Outcome
    times: RequestTimes
    ended: float
    record: StreamRecord | None
    """That of its answer, of several the one that ended last; None if it did not get to an engine."""
    leader: StreamRecord | None = None
    """That of the first answer to the same prompt, for which the others wait; None if it is the same."""

    @property
    def awaits_engine(self) -> bool:
        """Whether the answer was ended by its reader, so that its engine has not told yet where its time went."""
        record = self.record
        return record is not None and record.is_complete and not record.is_over and record.times is None

    def timing(self) -> Timing:
        wall_s = self.ended - self.times.arrived
        left = self.outcome == "client_gone"
        seconds = wall_seconds(self.times, self.ended, self.record, self.leader, client_left=left)
        parts = sorted(
            (_part(cause, value, wall_s) for cause, value in seconds.items() if value > 0), key=lambda part: -part.ms
        )
        first, told = self.times.first_token, self.leader or self.record
        engine = None if told is None else told.times
        return Timing(
            id=self.answer_id,
            request_id=self.request_id,
            status=self.outcome,
            wall_ms=_ms(wall_s),
            first_token_ms=None if first is None else _ms(first - self.times.arrived),
            own=tuple(part for part in parts if part.cause in OWN),
            slowed_by=tuple(part for part in parts if part.cause not in OWN),
            ahead=None if engine is None else Ahead(engine.requests_ahead, engine.tokens_ahead),
            migrations=0 if self.record is None else len(self.record.moves),
        )


def wall_seconds(
    times: RequestTimes,
    ended: float,
    record: StreamRecord | None,
    leader: StreamRecord | None = None,
    *,
    client_left: bool = False,
) -> Seconds:
    """Return the seconds of each cause, whose sum is the wall time. `leader`: see EndedTimes. `client_left`: before it
    had its answer.

    arrived     read        at the gate    given                     returned        ended
    | upload    | server    | gate  | server | engine, network, ...  | server, client |
    """
    seconds: Seconds = defaultdict(float)
    read = ended if times.read_at is None else times.read_at
    seconds[UPLOAD] = read - times.arrived
    seconds[GATE] = times.gate_s
    if record is None or record.given is None or times.given is None:
        seconds[SERVER] = ended - read - times.gate_s
        return seconds
    seconds[SERVER] = times.given - read - times.gate_s
    returned = ended if record.returned is None else record.returned
    within_s = times.unread_s if record.returned is None else record.unread_s
    if client_left and times.scheduled is None and record.times is None:
        seconds[TimeCause.QUEUE] = ended - times.given  # no engine has begun, and none will tell
        return seconds
    for part in (
        _before_its_turn(leader, record.given - times.given),
        _with_engines(record, returned - record.given, within_s),
    ):
        for cause, value in part.items():
            seconds[cause] += value
    unread_s = min(times.unread_s - within_s, ended - returned)
    seconds[CLIENT] += unread_s
    seconds[SERVER] += ended - returned - unread_s
    return seconds


def _before_its_turn(leader: StreamRecord | None, seconds: float) -> Seconds:
    """Divide the time in which an answer waited for the first answer to its prompt, until that was computed. What has
    no leader waited for other prompts of its request: the engines have a limited number of them at the same time."""
    if leader is None:
        return {TimeCause.QUEUE: seconds}
    told = {} if leader.times is None else leader.times.seconds
    causes = {cause: value for cause, value in told.items() if cause not in _OF_ANSWERS}
    total_s = sum(causes.values())
    if total_s <= 0:
        return {TimeCause.PREFILL: seconds}
    return {cause: seconds * value / total_s for cause, value in causes.items()}


def _with_engines(record: StreamRecord, window_s: float, unread_s: float) -> Seconds:
    """Divide the time between a submission and its complete answer. `unread_s`: how much of it the client took
    nothing."""
    seconds: Seconds = defaultdict(float)
    seconds[MIGRATION] = min(record.lost_s, window_s)
    seconds[UNRECORDED] = min(record.before_loss_s, window_s - seconds[MIGRATION])
    left_s = window_s - seconds[MIGRATION] - seconds[UNRECORDED]
    if record.times is None:  # an engine that was lost, or a client that was given up or left
        seconds[CLIENT] = min(unread_s, left_s)
        seconds[UNRECORDED] += left_s - seconds[CLIENT]
        return seconds
    told_s = sum(record.times.seconds.values())
    scale = min(left_s / told_s, 1.0) if told_s > 0 else 0.0  # an engine goes on for a step after a stop string
    for cause, value in record.times.seconds.items():
        again = record.moves and cause not in _OF_ANSWERS
        seconds[MIGRATION if again else cause] += value * scale
    left_s -= told_s * scale
    seconds[CLIENT] = min(unread_s, left_s)  # the engine had ended, and what it had sent waited for the client
    seconds[NETWORK] = left_s - seconds[CLIENT]
    return seconds


def _part(cause: str, seconds: float, wall_s: float) -> TimePart:
    share = seconds / wall_s if wall_s > 0 else 0.0
    return TimePart(str(cause), _ms(seconds), round(share, 4), _ms(wall_s - seconds), ABOUT[cause])


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 3)

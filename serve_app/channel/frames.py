"""Defines the token channel's bytes: one MessagePack frame for a step's events of many requests, beats, and replies.
Never trusts what it reads: malformed bytes raise, and nothing in them is executed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from engine.protocol import (
    EngineTimes,
    ErrorCode,
    Event,
    Failed,
    Finished,
    FinishReason,
    Pooled,
    PromptLogprobs,
    Scheduled,
    TimeCause,
    Token,
    TokenLogprobs,
    Usage,
)

# A plain token is a bare integer; every other event is a list that begins with one of these.
_SCHEDULED, _PROMPT_LOGPROBS, _SCORED_TOKEN, _FINISHED, _FAILED, _POOLED = range(6)

RawEvent = int | list[Any]
_CAUSES = {cause.value: cause for cause in TimeCause}

_encoder = msgspec.msgpack.Encoder()


class MalformedFrame(Exception):
    """The bytes were not written by a sender of this channel."""


class Entry(msgspec.Struct, array_like=True, gc=False):  # never part of a cycle
    """New events of one request. `first` is the index of the first of them among all of the request's events, so that a
    reader sees which it has missed or already has."""

    stream_id: int
    first: int
    events: list[RawEvent]
    times: list[Any] | None = None
    """With the terminal event: where the request's time went, as `pack_times` writes it. Readers of a version before
    it ignore it."""


class Beat(msgspec.Struct, array_like=True, gc=False):
    """A sign of life of an engine replica, sent several times a second whatever its steps do."""

    is_late: bool
    """The current step takes so long that it may never return."""
    stream_ids: list[int]
    """The calls that the engine runs for this ingress replica."""


class Frame(msgspec.Struct, array_like=True, gc=False):
    """A message from an engine replica to an ingress replica: after a step with new events, or as a beat."""

    replica_id: str
    entries: list[Entry]
    beat: Beat | None = None


class Reply(msgspec.Struct, array_like=True, gc=False):
    """A message from an ingress replica to an engine replica."""

    unread: list[int]
    """Streams without a reader."""
    reason: FinishReason = FinishReason.ABORT
    """Why `unread` streams have no reader. STOP: their readers have all that they want."""
    missing: list[tuple[int, int]] = []
    """Streams that have lost a frame, each with the index of the first missing event."""


_frame_decoder = msgspec.msgpack.Decoder(Frame)
_reply_decoder = msgspec.msgpack.Decoder(Reply)
# For invalid UTF-8 and for arrays nested too deeply, msgspec raises errors that are not its own.
_UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


def encode_frame(frame: Frame) -> bytes:
    return _encoder.encode(frame)


def decode_frame(data: bytes) -> Frame:
    """May raise MalformedFrame."""
    try:
        return _frame_decoder.decode(data)
    except _UNREADABLE as error:
        raise MalformedFrame(str(error)) from error


def encode_reply(reply: Reply) -> bytes:
    return _encoder.encode(reply)


def decode_reply(data: bytes) -> Reply:
    """May raise MalformedFrame."""
    try:
        return _reply_decoder.decode(data)
    except _UNREADABLE as error:
        raise MalformedFrame(str(error)) from error


def pack(event: Event) -> RawEvent:
    match event:
        case Token(token_id=token_id, logprobs=None):
            return token_id
        case Token():
            return [_SCORED_TOKEN, event.token_id, _pack_score(event.logprobs)]
        case Scheduled():
            return [_SCHEDULED, event.cached_tokens]
        case PromptLogprobs():
            scores = event.logprobs
            return [_PROMPT_LOGPROBS, [_pack_score(score) for score in scores], [score.rank for score in scores]]
        case Pooled():
            return [_POOLED, event.values]
        case Finished():
            usage = event.usage
            counts = [usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens]
            return [_FINISHED, event.reason, counts, event.stop_token_id, _pack_score(event.stop_logprobs)]
        case Failed():
            return [_FAILED, event.code, event.message]


def pack_times(times: EngineTimes) -> list[Any]:
    seconds = {cause.value: round(value, 6) for cause, value in times.seconds.items()}
    return [seconds, times.requests_ahead, times.tokens_ahead]


def unpack_times(raw: list[Any] | None) -> EngineTimes | None:
    """Decode where a request's time went. Causes that this version does not know are left out.

    Raises:
        MalformedFrame: it is not what a sender writes.
    """
    if raw is None:
        return None
    try:
        seconds, requests_ahead, tokens_ahead = raw[:3]
        known = {_CAUSES[name]: float(value) for name, value in seconds.items() if name in _CAUSES}
        return EngineTimes(known, int(requests_ahead), int(tokens_ahead))
    except (TypeError, ValueError, AttributeError) as error:
        raise MalformedFrame(f"{type(error).__name__}: {error}") from error


def unpack(request_id: str, raw: Sequence[RawEvent]) -> list[Event]:
    """Decode the events of one request.

    Raises:
        MalformedFrame: an event is not one that a sender writes.
    """
    try:
        return [Token(request_id, item) if isinstance(item, int) else _unpack(request_id, item) for item in raw]
    except (TypeError, ValueError, IndexError) as error:
        raise MalformedFrame(f"{type(error).__name__}: {error}") from error


def _unpack(request_id: str, item: list[Any]) -> Event:
    tag, *fields = item
    if tag == _SCHEDULED:
        return Scheduled(request_id, *fields)
    if tag == _PROMPT_LOGPROBS:
        return PromptLogprobs(request_id, _unpack_ranked(*fields[:2]))
    if tag == _POOLED:
        return Pooled(request_id, tuple(map(float, fields[0])))
    if tag == _SCORED_TOKEN:
        return Token(request_id, fields[0], _unpack_score(fields[1]))
    if tag == _FINISHED:
        reason, counts, stop_token_id, stop_score = fields
        stop_logprobs = None if stop_score is None else _unpack_score(stop_score)
        return Finished(request_id, FinishReason(reason), Usage(*counts), stop_token_id, stop_logprobs)
    if tag == _FAILED:
        return Failed(request_id, ErrorCode(fields[0]), fields[1])
    raise ValueError(f"unknown event {tag!r}")


def _pack_score(score: TokenLogprobs | None) -> list[Any] | None:
    return None if score is None else [score.token_id, score.logprob, score.top]


def _unpack_ranked(scores: list[Any], ranks: list[int | None] | None = None) -> tuple[TokenLogprobs, ...]:
    """Decode scores. An engine of a version before ranks sends none; readers of that version ignore a second list."""
    places = [None] * len(scores) if ranks is None else ranks
    return tuple(_unpack_score(score, rank) for score, rank in zip(scores, places, strict=True))


def _unpack_score(item: list[Any], rank: int | None = None) -> TokenLogprobs:
    token_id, logprob, top = item
    return TokenLogprobs(token_id, logprob, tuple((token, value) for token, value in top), rank)

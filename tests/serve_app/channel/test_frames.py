"""Contracts of the channel's bytes: every event comes out as it went in,
and bytes that are no frame are refused as such.
Never opens a socket."""

from __future__ import annotations

import contextlib
import math
from dataclasses import replace

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.protocol import (
    MAX_LOGPROBS,
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
from serve_app.channel.frames import (
    Beat,
    Entry,
    Frame,
    MalformedFrame,
    Reply,
    decode_frame,
    decode_reply,
    encode_frame,
    encode_reply,
    pack,
    pack_times,
    unpack,
    unpack_times,
)

TOKEN_IDS = st.integers(0, 2**31 - 1)
STREAM_IDS = st.integers(0, 2**60)
COUNTS = st.integers(0, 2**40)
LOGPROBS = st.floats(max_value=0, allow_nan=False) | st.just(-math.inf)
SCORES = st.builds(
    TokenLogprobs,
    TOKEN_IDS,
    LOGPROBS,
    st.lists(st.tuples(TOKEN_IDS, LOGPROBS), max_size=MAX_LOGPROBS).map(tuple),
)
RANKED = st.builds(lambda score, rank: replace(score, rank=rank), SCORES, st.none() | COUNTS)
USAGES = st.builds(Usage, COUNTS, COUNTS, COUNTS)
EVENTS: st.SearchStrategy[Event] = st.one_of(
    st.builds(Scheduled, st.just("r"), COUNTS),
    st.builds(PromptLogprobs, st.just("r"), st.lists(RANKED, max_size=5).map(tuple)),
    st.builds(Pooled, st.just("r"), st.lists(st.floats(allow_nan=False), max_size=5).map(tuple)),
    st.builds(Token, st.just("r"), TOKEN_IDS, st.none() | SCORES),
    st.builds(Finished, st.just("r"), st.sampled_from(FinishReason), USAGES, st.none() | TOKEN_IDS, st.none() | SCORES),
    st.builds(Failed, st.just("r"), st.sampled_from(ErrorCode), st.text()),
)
FRAMES = st.builds(
    Frame,
    st.text(max_size=20),
    st.lists(
        st.builds(
            Entry,
            st.integers(0, 2**60),
            COUNTS,
            st.lists(EVENTS, max_size=4).map(lambda events: [pack(event) for event in events]),
        ),
        max_size=4,
    ),
)


def read(data: bytes) -> None:
    """Read everything that an ingress reads from the bytes of a frame."""
    for entry in decode_frame(data).entries:
        unpack("r", entry.events)


def read_if_well_formed(data: bytes) -> None:
    with contextlib.suppress(MalformedFrame):
        read(data)


@settings(deadline=None)
@given(st.lists(EVENTS, max_size=8))
def test_every_event_comes_out_as_it_went_in(events: list[Event]) -> None:
    frame = decode_frame(encode_frame(Frame("replica", [Entry(7, 3, [pack(event) for event in events])])))
    assert frame.replica_id == "replica"
    (entry,) = frame.entries
    assert (entry.stream_id, entry.first) == (7, 3)
    assert unpack("r", entry.events) == events


def test_the_most_alternatives_of_a_certain_token_come_out_as_they_went_in() -> None:
    top = ((5, 0.0), *((token, -math.inf) for token in range(MAX_LOGPROBS - 1)))
    events: list[Event] = [Token("r", 5, TokenLogprobs(5, 0.0, top))]
    frame = decode_frame(encode_frame(Frame("e", [Entry(0, 0, [pack(event) for event in events])])))
    assert unpack("r", frame.entries[0].events) == events


def test_ranks_are_beside_the_scores_so_that_another_version_reads_its_own() -> None:
    """While a deployment is rolled out, engines and ingresses of two versions meet: one without ranks reads only the
    first list, and sends no second one."""
    scores = (TokenLogprobs(5, -0.5, ((4, -0.25),), 2), TokenLogprobs(6, -9.0, (), 700))
    raw = pack(PromptLogprobs("r", scores))
    assert isinstance(raw, list)
    assert [len(score) for score in raw[1]] == [3, 3]
    (older,) = unpack("r", [raw[:2]])
    assert older == PromptLogprobs("r", tuple(replace(score, rank=None) for score in scores))


def test_events_carry_the_request_id_of_the_reader_and_the_codes_as_enums() -> None:
    raw = [pack(Failed("other", ErrorCode.STEP_FAILED, "x")), pack(Finished("o", FinishReason.STOP, Usage(1, 2, 0), 9))]
    failed, finished = unpack("r", decode_frame(encode_frame(Frame("e", [Entry(0, 0, raw)]))).entries[0].events)
    assert isinstance(failed, Failed)
    assert isinstance(finished, Finished)
    assert (failed.request_id, finished.request_id) == ("r", "r")
    assert failed.code is ErrorCode.STEP_FAILED
    assert finished.reason is FinishReason.STOP


def test_a_plain_token_costs_one_integer() -> None:
    assert pack(Token("r", 70_000)) == 70_000
    one, two = (len(encode_frame(Frame("e", [Entry(1, 0, [100] * count)]))) for count in (1, 2))
    assert two - one == 1


@settings(deadline=None)
@given(st.lists(STREAM_IDS, max_size=20), st.sampled_from(FinishReason), st.lists(st.tuples(STREAM_IDS, STREAM_IDS)))
def test_replies_come_out_as_they_went_in(
    unread: list[int], reason: FinishReason, missing: list[tuple[int, int]]
) -> None:
    reply = Reply(unread, reason, missing)
    assert decode_reply(encode_reply(reply)) == reply


@settings(deadline=None)
@given(st.booleans(), st.lists(STREAM_IDS, max_size=20))
def test_beats_come_out_as_they_went_in(is_late: bool, stream_ids: list[int]) -> None:
    frame = Frame("replica", [], Beat(is_late, stream_ids))
    assert decode_frame(encode_frame(frame)) == frame


def test_frames_and_replies_of_a_version_without_beats_are_read() -> None:
    """In a rolling update, engines and ingress replicas of two versions meet."""
    assert decode_frame(msgspec.msgpack.encode(["replica", []])) == Frame("replica", [])
    assert decode_reply(msgspec.msgpack.encode([[1, 2], "stop"])) == Reply([1, 2], FinishReason.STOP)


class EntryBeforeTimes(msgspec.Struct, array_like=True):
    """What a version without times reads."""

    stream_id: int
    first: int
    events: list[object]


def test_where_the_time_went_comes_out_as_it_went_in_and_another_version_reads_the_rest() -> None:
    times = EngineTimes({TimeCause.QUEUE: 0.25, TimeCause.DECODE: 1.5}, 3, 700)
    entry = Entry(7, 0, [pack(finished := Finished("r", FinishReason.STOP, Usage(1, 2, 0), 9))], pack_times(times))
    data = encode_frame(Frame("e", [entry]))
    (read,) = decode_frame(data).entries
    assert unpack_times(read.times) == times
    older = msgspec.msgpack.decode(data, type=tuple[str, list[EntryBeforeTimes], None])
    assert older[1] == [EntryBeforeTimes(7, 0, [pack(finished)])]
    (without,) = decode_frame(msgspec.msgpack.encode(["e", [[7, 0, [5]]]])).entries
    assert unpack_times(without.times) is None


def test_causes_of_a_later_version_are_left_out() -> None:
    assert unpack_times([{"queue": 1, "tides": 2}, 0, 0, "more"]) == EngineTimes({TimeCause.QUEUE: 1.0})


@pytest.mark.parametrize("raw", [[], [1, 2, 3], [{"queue": "long"}, 0, 0], [{"queue": 1}, None, 0], [{}, 0]])
def test_times_that_no_sender_writes_are_malformed(raw: list[object]) -> None:
    with pytest.raises(MalformedFrame):
        unpack_times(raw)


# --- what no sender of ours has written ------------------------------------------------------------------------------


@settings(deadline=None)
@given(st.binary(max_size=200))
def test_random_bytes_are_malformed_or_read_and_nothing_else(data: bytes) -> None:
    read_if_well_formed(data)
    with contextlib.suppress(MalformedFrame):
        decode_reply(data)


@settings(deadline=None)
@given(FRAMES, st.data())
def test_a_truncated_frame_is_malformed(frame: Frame, data: st.DataObject) -> None:
    whole = encode_frame(frame)
    with pytest.raises(MalformedFrame):
        read(whole[: data.draw(st.integers(0, len(whole) - 1))])


@settings(deadline=None)
@given(FRAMES, st.data())
def test_a_frame_with_flipped_bits_is_malformed_or_read_and_nothing_else(frame: Frame, data: st.DataObject) -> None:
    whole = bytearray(encode_frame(frame))
    for place in data.draw(st.lists(st.integers(0, len(whole) - 1), min_size=1, max_size=4)):
        whole[place] ^= data.draw(st.integers(1, 255))
    read_if_well_formed(bytes(whole))


JSONS = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=4)
    | st.binary(max_size=4),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=12,
)


@settings(deadline=None)
@given(st.lists(st.one_of(JSONS, st.tuples(st.integers(0, 5), JSONS, JSONS, JSONS, JSONS)), max_size=3))
def test_well_formed_messagepack_that_is_no_event_is_malformed_or_read(events: list[object]) -> None:
    read_if_well_formed(msgspec.msgpack.encode(["e", [[1, 0, events]]]))


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"\x92\xa1\xff\x90", id="text that is no UTF-8"),
        pytest.param(b"\x92\xa1r\x91\x93\x01\x00\x91\x91\xa1\xff", id="text in an event that is no UTF-8"),
        pytest.param(b"\x92\xa1r\x91\x93\x01\x00" + b"\x91" * 100_000, id="nested too deeply"),
        pytest.param(b"\x92\xa1r\x91\x93\x01\x00\xdd\xff\xff\xff\xff", id="four billion events, it says"),
        pytest.param(b"\x92\xa1r\x91\x93\x01\x00\x91\xc3", id="a boolean for a token"),
        pytest.param(b"\x92\xa1r\x90\x00", id="bytes behind the frame"),
        pytest.param(b"", id="nothing"),
    ],
)
def test_hostile_bytes_are_malformed(data: bytes) -> None:
    """Regression: the first three raised an exception that nobody caught,
    and the task that reads the channel for all streams ended."""
    with pytest.raises(MalformedFrame):
        read(data)


def test_abort_messages_with_text_that_is_no_utf8_or_nested_too_deeply_are_malformed() -> None:
    for data in (b"\x91\xa1\xff", b"\x91" * 100_000):
        with pytest.raises(MalformedFrame):
            decode_reply(data)

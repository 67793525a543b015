"""Owns the contract of what the leader tells: a plan arrives as it was, without anything that chooses a token."""

from __future__ import annotations

import msgspec
import pytest

from engine.batch.inputs import NONE_PENDING
from engine.execution.gpu.ranks import Way
from engine.multimodal_inputs import EncodeJob, PlacedInput
from engine.parallel.messages import (
    DeviceStep,
    Drop,
    End,
    Keep,
    Message,
    Rewind,
    Score,
    Start,
    Step,
    bare,
    decode,
    encode,
)
from engine.step import (
    PENDING_TOKEN,
    LogitControls,
    PromptScoring,
    RowInputs,
    RowKind,
    RowSampling,
    ScheduledRequest,
    StateUse,
    StepPlan,
)

SAMPLING = RowSampling(0.7, 5, 0.9, 0.1, 42, num_logprobs=3, controls=LogitControls(grammar="secret"))
IMAGE = PlacedInput(b"digest", 1, (1, 2, 2), 1)
PLAN = StepPlan(
    7,
    (
        ScheduledRequest(
            "a", RowKind.DECODE, 9, (PENDING_TOKEN,), (3, 1), SAMPLING, answer=(5, PENDING_TOKEN), adapter="lora"
        ),
        ScheduledRequest("b", RowKind.MIDDLE, 0, (1, 2, 3), (4,), None, PromptScoring(0, (2,), 1), StateUse(1, 0, 2)),
        ScheduledRequest("c", RowKind.LAST, 4, (8, 9), (5, 6), SAMPLING, inputs=RowInputs((IMAGE,), -2), pool_from=0),
    ),
    state_moves=((0, 1),),
    dropped=(b"gone",),
    encodes=(EncodeJob(b"digest", (1, 2, 2), b"pixels"),),
)


def told(plan: StepPlan, newest: dict[str, int]) -> StepPlan:
    message = decode(encode(Step(bare(plan, newest))))
    assert isinstance(message, Step)
    return message.plan


def test_a_plan_arrives_with_all_that_decides_what_is_computed() -> None:
    found = told(PLAN, {"a": 77})
    assert [row.token_ids for row in found.rows] == [(77,), (1, 2, 3), (8, 9)], "the token in flight is filled in"
    for name in ("kind", "start", "block_ids", "state", "inputs", "adapter"):
        assert [getattr(row, name) for row in found.rows] == [getattr(row, name) for row in PLAN.rows], name
    for name in ("step_id", "state_moves", "dropped", "encodes"):
        assert getattr(found, name) == getattr(PLAN, name), name
    assert [row.sampling is None for row in found.rows] == [False, True, False]


def test_a_step_for_a_device_arrives_with_its_way_and_with_where_its_tokens_are() -> None:
    sent = DeviceStep(Way.BEGIN, bare(PLAN, {}), [(0, 1, 3)], [[4, 5], [6]])
    assert decode(encode(sent)) == sent
    assert b"secret" not in encode(sent)


def test_nothing_that_chooses_a_token_and_no_name_of_a_request_is_told() -> None:
    found = told(PLAN, {"a": 77})
    assert {row.request_id for row in found.rows} == {""}
    assert not any(row.answer or row.scoring or row.draft_context or row.pool_from is not None for row in found.rows)
    assert b"secret" not in encode(Step(bare(PLAN, {"a": 77})))


def test_a_row_whose_token_was_lost_computes_some_token() -> None:
    assert told(PLAN, dict(NONE_PENDING)).rows[0].token_ids == (0,)


@pytest.mark.parametrize(
    "message",
    [Start("digest"), Score([3, 1]), Rewind([2, 0]), Keep("digest", {"a.json": b"{}"}), Drop("digest"), End()],
    ids=lambda message: type(message).__name__,
)
def test_every_message_arrives_as_it_was_sent(message: Message) -> None:
    assert decode(encode(message)) == message


@pytest.mark.parametrize("data", [b"", b"\xc1", msgspec.msgpack.encode(["step", "no plan"]), b"\x91\xa5other"])
def test_what_is_no_message_is_refused(data: bytes) -> None:
    with pytest.raises(msgspec.MsgspecError):
        decode(data)

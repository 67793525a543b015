"""Owns what the leader tells the other ranks: MessagePack of the steps' integers, checked against their types as read.
Never carries a text, a sampling option or a tensor: the others compute, and choose nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from engine.batch.inputs import fed_tokens
from engine.execution.gpu.ranks import Way
from engine.step import RowSampling, ScheduledRequest, StepPlan


class Start(msgspec.Struct, tag="start", array_like=True):
    """What must be the same on all ranks."""

    model: str
    """The digest of the model's files; see engine.parallel.model_digest."""


class Step(msgspec.Struct, tag="step", array_like=True):
    """Compute a step, and give the leader the logits of its sampled places."""

    plan: StepPlan
    """See `bare`."""


class Score(msgspec.Struct, tag="score", array_like=True):
    """Give the leader the logits of these tokens of the last step, which on a device was one of Way.COMPUTE."""

    tokens: list[int]


class Rewind(msgspec.Struct, tag="rewind", array_like=True):
    """Set recurrent states to those after so many tokens of each row of the last step."""

    counts: list[int]


class Keep(msgspec.Struct, tag="keep", array_like=True):
    """Keep an adapter for the rows that name it."""

    digest: str
    files: dict[str, bytes]
    """The adapter's directory, by file name: another machine may not have it."""


class Drop(msgspec.Struct, tag="drop", array_like=True):
    """Drop an adapter."""

    digest: str


class End(msgspec.Struct, tag="end", array_like=True):
    """There will be no more steps."""


class DeviceStep(msgspec.Struct, tag="device_step", array_like=True):
    """Queue a step on a device."""

    way: Way
    plan: StepPlan
    """See `bare`. With Way.GO_ON, a row without blocks has those of the step before."""
    pending: list[tuple[int, int, int]]
    """Fed tokens that are on the device: (its place in the step, how many steps with chosen tokens ago, its number
    among that step's)."""
    scored: list[list[int]]
    """Tokens whose logits are joined before tokens are chosen, piece by piece."""


Message = Start | Step | Score | Rewind | Keep | Drop | End | DeviceStep

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(Message)

_SAMPLED = RowSampling(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0)
"""In place of how a token is chosen."""


def encode(message: Message) -> bytes:
    return _encoder.encode(message)


def decode(data: bytes) -> Message:
    """Raises msgspec.MsgspecError: the bytes are not a message."""
    message: Message = _decoder.decode(data)
    return message


def bare(plan: StepPlan, newest: Mapping[str, int]) -> StepPlan:
    """Return what of a plan the other ranks need: tokens, positions, blocks, states, images and adapters. newest: by
    request, the token that its PENDING_TOKEN stands for."""
    return StepPlan(
        plan.step_id,
        tuple(_bare_row(row, newest) for row in plan.rows),
        state_moves=plan.state_moves,
        dropped=plan.dropped,
        encodes=plan.encodes,
    )


def _bare_row(row: ScheduledRequest, newest: Mapping[str, int]) -> ScheduledRequest:
    return ScheduledRequest(
        "",
        row.kind,
        row.start,
        fed_tokens(row, newest),
        row.block_ids,
        None if row.sampling is None else _SAMPLED,
        state=row.state,
        inputs=row.inputs,
        adapter=row.adapter,
    )
